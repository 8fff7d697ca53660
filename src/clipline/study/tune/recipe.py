"""The three steps, in order. Every run goes through a `Study`: what was run before is read and not repeated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..study import Study
from .optuna_search import search_with_optuna
from .question import Question, Scaled, Unreachable, scale_up
from .trials import STEP, Metric, Rates, Tell, Trial, Trials, check_learnt

GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SHORT_STEP = 1.5  # a step by less than this factor is not halved
_AT_ONCE = 2  # noises of step 2 that are tried side by side
WORTH = 0.01  # of the metric, relative: less than this is no reason to search on
_LARGEST = 1e30  # of a rate, as the settings allow

Offsets = tuple[int, int]  # steps from the task's client rate and from its server rate


def change_in_words(loss: float) -> str:
    """What `Metric.loss` gave, for people: 5.0% worse, 0.3% better, or no change."""
    if abs(loss) < 0.0005:
        return "no change"
    return f"{100 * abs(loss):.1f}% {'worse' if loss > 0 else 'better'}"


def borne(trials: Sequence[Trial], allowed: float, metric: Metric) -> Trial:
    """The most noise before the first, from the least upwards, that degrades the metric by more than `allowed`.

    The trial with the least noise is the reference. A run with more noise that happens to recover does not count: the
    metric has begun to degrade before it.
    """
    rising = sorted(trials, key=lambda trial: trial.noise_multiplier)
    chosen = rising[0]
    for trial in rising[1:]:
        if metric.loss(rising[0].value, trial.value) > allowed:
            break
        chosen = trial
    return chosen


def next_noises(
    trials: Sequence[Trial], allowed: float, metric: Metric, *, limit: float, at_once: int = 1
) -> list[float]:
    """The noises to try next, `at_once` of them at most and none above `limit`; none if step 2 is at its end."""
    rising = sorted(trial.noise_multiplier for trial in trials)
    chosen = borne(trials, allowed, metric).noise_multiplier
    if chosen == rising[-1]:  # not degraded yet
        return sorted({z for z in (*GRID, limit) if chosen < z <= limit})[:at_once]
    above = min(z for z in rising if z > chosen)
    # One run between points of the grid is enough: a second one would be told apart by chance alone.
    middle = float(f"{math.sqrt(chosen * above):.3g}")
    on_grid = chosen in (*GRID, rising[0]) and above in (*GRID, limit)
    return [middle] if on_grid and above > _SHORT_STEP * chosen else []


@dataclass(frozen=True)
class RateGrid:
    """The lattice. `reach` steps to each side are tried first: 1 is a grid of 3 x 3."""

    client_lr: float
    server_lr: float
    reach: int = 1

    def rates(self, offsets: Offsets) -> dict[str, float]:
        """The settings of a point."""
        return {"client_lr": self.client_lr * STEP ** offsets[0], "server_lr": self.server_lr * STEP ** offsets[1]}

    def first(self) -> list[Offsets]:
        """The points to begin with."""
        side = range(-self.reach, self.reach + 1)
        return [(client, server) for client in side for server in side if self._allowed((client, server))]

    def next(self, scores: Mapping[Offsets, float], metric: Metric) -> list[Offsets]:
        """The neighbours of the best point that were not tried; none if the search is at its end."""
        first = best_point(scores, metric)
        inside = (point for point in scores if not self._untried(point, scores))
        if any(metric.loss(scores[first], scores[point]) <= WORTH for point in inside):
            return []
        return self._untried(first, scores)

    def _untried(self, point: Offsets, scores: Mapping[Offsets, float]) -> list[Offsets]:
        around = [(point[0] + i, point[1] + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        return [other for other in around if other not in scores and self._allowed(other)]

    def _allowed(self, point: Offsets) -> bool:
        return all(0 < rate <= _LARGEST for rate in self.rates(point).values())


def best_point(scores: Mapping[Offsets, float], metric: Metric) -> Offsets:
    """The point with the best score; of equals the one nearest to where the search began.

    A run that diverged has the worst score there is. Where all of them did, the smallest rates count as the best, so
    that the search turns there.
    """

    def order(point: Offsets) -> tuple[float, int, Offsets]:
        client, server = point
        away = client**2 + server**2 if math.isfinite(scores[point]) else sum(point)
        return metric.sign * scores[point], away, point

    return min(scores, key=order)


@dataclass(frozen=True)
class Tuned:
    """The answer. `scaled` is None where the target cannot be met: `refusal` then says what could be changed.

    `noises` are the trials of step 2, from the least noise upwards: the first is the reference. `enough` is the noise
    with which the trial's cohort itself meets the target.
    """

    question: Question
    metric: Metric
    rates: Rates
    noises: tuple[Trial, ...]
    chosen: Trial
    enough: float
    scaled: Scaled | None
    refusal: Unreachable | None = None

    @property
    def losses(self) -> dict[float, float]:
        """Noise -> loss of each trial of step 2."""
        return losses_of(self.noises, self.metric)

    @property
    def next_above(self) -> float | None:
        """The least noise tried above the chosen one, if there is one."""
        return next((z for z in self.losses if z > self.chosen.noise_multiplier), None)

    @property
    def more_noise_untried(self) -> bool:
        """Whether step 2 ended because the target was met, so that the model may tolerate more noise than was tried."""
        return self.next_above is None and self.chosen.noise_multiplier < self.question.most_noise


def losses_of(rising: Sequence[Trial], metric: Metric) -> dict[float, float]:
    """Noise -> loss against the first trial, which has the least noise."""
    return {trial.noise_multiplier: metric.loss(rising[0].value, trial.value) for trial in rising}


STAGES = ("rates", "noise", "scale")  # as the progress of the search names them


def tune(question: Question, study: Study, tell: Tell = lambda line: None) -> Tuned:
    """The recipe on proxy data. `tell` gets a line whenever something was found."""
    trials = Trials(question, study)
    study.progress.next_stage()
    tell(f"step 1 of 3: client and server rates at m = {question.trial.cohort_size}, z = {question.noise_multiplier:g}")
    search = search_with_optuna if question.search == "optuna" else search_grid
    rates = search(question, trials, tell)
    study.progress.next_stage()
    tell(f"step 2 of 3: more noise, at rates {rates.chosen.client_lr:.3g} and {rates.chosen.server_lr:.3g}")
    metric, enough = trials.metric, question.target.enough_noise()
    noises = raise_noise(question, trials, rates.chosen, min(enough, question.most_noise), tell)
    chosen = borne(noises, question.degradation, metric)
    study.progress.next_stage()
    tell(f"step 3 of 3: cohort and noise together, for epsilon {question.target.epsilon:g}")
    scaled = refusal = None
    try:
        scaled = scale_up(question.target, chosen.noise_multiplier, [*losses_of(noises, metric).items()])
    except Unreachable as error:
        refusal = error
    return Tuned(question, metric, rates, noises, chosen, enough, scaled, refusal)


def search_grid(question: Question, trials: Trials, tell: Tell) -> Rates:
    """Step 1 on the lattice of half decades, until the best pair has beaten its neighbours or `runs` are spent."""
    grid = RateGrid(question.trial.client_lr, question.trial.server_rate, question.reach)
    found: dict[Offsets, Trial] = {}
    points = sorted(grid.first(), key=lambda point: point[0] ** 2 + point[1] ** 2)  # the centre first, if runs are few
    while points := points[: question.runs - len(found)]:
        found |= zip(points, trials.run([grid.rates(point) for point in points]), strict=True)
        scores = {point: trial.value for point, trial in found.items()}
        chosen = found[best_point(scores, trials.metric)]
        tell(f"  {len(found)} runs: {trials.metric.words(chosen)}")
        points = untried = grid.next(scores, trials.metric)
    check_learnt(chosen)
    return Rates(tuple(found.values()), chosen, on_edge=bool(untried))


def raise_noise(question: Question, trials: Trials, chosen: Trial, limit: float, tell: Tell) -> tuple[Trial, ...]:
    """Step 2: more noise at these rates, up to `limit`, until the metric degrades. From the least noise upwards."""
    metric, tried = trials.metric, [chosen]
    while following := next_noises(tried, question.degradation, metric, limit=limit, at_once=_AT_ONCE):
        for trial in trials.run([{**chosen.rates, "noise_multiplier": z} for z in following]):
            tried.append(trial)
            loss = metric.loss(chosen.value, trial.value)
            shown = "diverged" if math.isinf(loss) else f"{metric.name} {trial.value:.4g}, {change_in_words(loss)}"
            tell(f"  z = {trial.noise_multiplier:.3g}: {shown}")
    return tuple(sorted(tried, key=lambda trial: trial.noise_multiplier))
