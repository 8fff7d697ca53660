"""The three steps, in order. Every run goes through a `Study`: what was run before is read and not repeated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..study import Study
from .optuna_search import search_with_optuna
from .question import Question, Scaled, Unreachable, scale_up
from .trials import STEP, Metric, Rates, RateTrial, Tell, Trials, check_learnt, degradation, told

GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SHORT_STEP = 1.5  # a step by less than this factor is not halved


@dataclass(frozen=True)
class NoiseTrial:
    """One run of step 2: its noise multiplier and its converged metric, which is not finite where it diverged."""

    noise_multiplier: float
    value: float
    run: str = ""  # its identity in the study


def change_in_words(loss: float) -> str:
    """What `degradation` gave, for people: 5.0% worse, 0.3% better, or no change."""
    if abs(loss) < 0.0005:
        return "no change"
    return f"{100 * abs(loss):.1f}% {'worse' if loss > 0 else 'better'}"


def borne(trials: Sequence[NoiseTrial], allowed: float, *, lower_is_better: bool) -> NoiseTrial:
    """The most noise before the first, from the least upwards, that degrades the metric by more than `allowed`.

    The trial with the least noise is the reference. A run with more noise that happens to recover does not count: the
    metric has begun to degrade before it.
    """
    rising = sorted(trials, key=lambda trial: trial.noise_multiplier)
    chosen = rising[0]
    for trial in rising[1:]:
        if degradation(rising[0].value, trial.value, lower_is_better=lower_is_better) > allowed:
            break
        chosen = trial
    return chosen


def next_noises(
    trials: Sequence[NoiseTrial], allowed: float, *, enough: float, most: float, lower_is_better: bool, at_once: int = 1
) -> list[float]:
    """The noises to try next, `at_once` of them at most; none if step 2 is at its end.

    `enough` is the noise that meets the target without a larger cohort: more than that buys nothing and is not tried.
    `most` is the largest noise that the cohort of the trial can have.
    """
    rising = sorted(trial.noise_multiplier for trial in trials)
    chosen = borne(trials, allowed, lower_is_better=lower_is_better).noise_multiplier
    limit = min(enough, most)
    if chosen == rising[-1]:  # not degraded yet
        return sorted({z for z in (*GRID, limit) if chosen < z <= limit})[:at_once]
    above = min(z for z in rising if z > chosen)
    # One run between points of the grid is enough: a second one would be told apart by chance alone.
    middle = float(f"{math.sqrt(chosen * above):.3g}")
    on_grid = chosen in (*GRID, rising[0]) and above in (*GRID, limit)
    return [middle] if on_grid and above > _SHORT_STEP * chosen else []


WORTH = 0.01  # of the metric, relative: less than this is no reason to search on
_LARGEST = 1e30  # of a rate, as the settings allow

Offsets = tuple[int, int]  # steps from the task's client rate and from its server rate


@dataclass(frozen=True)
class RateGrid:
    """The lattice. `reach` steps to each side are tried first: 1 is a grid of 3 x 3."""

    client_lr: float
    server_lr: float
    reach: int = 1

    def rates(self, offsets: Offsets) -> tuple[float, float]:
        """(client rate, server rate) of a point."""
        return self.client_lr * STEP ** offsets[0], self.server_lr * STEP ** offsets[1]

    def first(self) -> list[Offsets]:
        """The points to begin with."""
        side = range(-self.reach, self.reach + 1)
        return [(client, server) for client in side for server in side if self._allowed((client, server))]

    def next(self, scores: Mapping[Offsets, float], *, lower_is_better: bool) -> list[Offsets]:
        """The neighbours of the best point that were not tried; none if the search is at its end."""
        first = best_point(scores, lower_is_better=lower_is_better)
        inside = (point for point in scores if not self._untried(point, scores))
        for point in inside:
            if degradation(scores[first], scores[point], lower_is_better=lower_is_better) <= WORTH:
                return []
        return self._untried(first, scores)

    def _untried(self, point: Offsets, scores: Mapping[Offsets, float]) -> list[Offsets]:
        around = [(point[0] + i, point[1] + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        return [other for other in around if other not in scores and self._allowed(other)]

    def _allowed(self, point: Offsets) -> bool:
        return all(0 < rate <= _LARGEST for rate in self.rates(point))


def best_point(scores: Mapping[Offsets, float], *, lower_is_better: bool) -> Offsets:
    """The point with the best score; of equals the one nearest to where the search began.

    A run that diverged has the worst score there is. Where all of them did, the smallest rates count as the best, so
    that the search turns there.
    """
    sign = 1 if lower_is_better else -1

    def order(point: Offsets) -> tuple[float, int, Offsets]:
        client, server = point
        return sign * scores[point], client**2 + server**2 if math.isfinite(scores[point]) else sum(point), point

    return min(scores, key=order)


def runs_with_fixed_clips(runs: int) -> int:
    """How many runs the same search takes where the clip is one more thing to try: the paper tries five clips."""
    return 5 * runs


_AT_ONCE = 2  # noises of step 2 that are tried side by side


@dataclass(frozen=True)
class NoiseSearch:
    """What step 2 found. `enough` is the noise with which the trial's cohort itself meets the target."""

    trials: tuple[NoiseTrial, ...]
    chosen: NoiseTrial
    enough: float

    @property
    def rising(self) -> list[NoiseTrial]:
        """The trials, from the least noise upwards: the first is the reference."""
        return sorted(self.trials, key=lambda trial: trial.noise_multiplier)

    @property
    def next_above(self) -> float | None:
        """The least noise tried above the chosen one, if there is one."""
        above = (trial.noise_multiplier for trial in self.rising)
        return next((z for z in above if z > self.chosen.noise_multiplier), None)

    def losses(self, metric: Metric) -> list[tuple[float, float]]:
        """(noise, degradation) of each trial, from the least noise upwards."""
        reference, lower = self.rising[0].value, metric.lower_is_better
        return [(one.noise_multiplier, degradation(reference, one.value, lower_is_better=lower)) for one in self.rising]


@dataclass(frozen=True)
class Tuned:
    """The answer. `scaled` is None where the target cannot be met: `refusal` then says what could be changed."""

    question: Question
    metric: Metric
    rates: Rates
    noise: NoiseSearch
    scaled: Scaled | None
    refusal: Unreachable | None = None

    @property
    def more_noise_untried(self) -> bool:
        """Whether step 2 ended because the target was met, so that the model may tolerate more noise than was tried."""
        return self.noise.next_above is None and self.noise.chosen.noise_multiplier < self.question.most_noise


def tune(question: Question, study: Study, tell: Tell = lambda line: None) -> Tuned:
    """The recipe on proxy data. `tell` gets a line whenever something was found."""
    trials = Trials(question, study)
    tell(f"step 1 of 3: client and server rates at m = {question.trial.cohort_size}, z = {question.noise_multiplier:g}")
    search = search_with_optuna if question.search == "optuna" else search_grid
    found = search(question, trials, tell)
    tell(f"step 2 of 3: more noise, at rates {found.chosen.client_lr:.3g} and {found.chosen.server_lr:.3g}")
    bearable = raise_noise(question, trials, found.chosen, tell)
    tell(f"step 3 of 3: cohort and noise together, for epsilon {question.target.epsilon:g}")
    try:
        losses = bearable.losses(trials.metric)
        scaled = scale_up(question.target, bearable.chosen.noise_multiplier, losses)
        return Tuned(question, trials.metric, found, bearable, scaled)
    except Unreachable as refusal:
        return Tuned(question, trials.metric, found, bearable, None, refusal)


def search_grid(question: Question, trials: Trials, tell: Tell) -> Rates:
    """Step 1 on the lattice of half decades, until the best pair has beaten its neighbours or `runs` are spent."""
    grid = RateGrid(question.trial.client_lr, question.trial.server_rate, question.reach)
    found: dict[Offsets, RateTrial] = {}
    scores: dict[Offsets, float] = {}
    points = sorted(grid.first(), key=lambda point: point[0] ** 2 + point[1] ** 2)  # the centre first, if runs are few
    while points := points[: question.runs - len(found)]:
        pairs = [grid.rates(point) for point in points]
        results = trials.run([{"client_lr": client, "server_lr": server} for client, server in pairs])
        for point, (client, server), (value, record) in zip(points, pairs, results, strict=True):
            found[point], scores[point] = RateTrial(client, server, value, record.id), value
        lower = trials.metric.lower_is_better
        chosen = found[best_point(scores, lower_is_better=lower)]
        tell(f"  {len(found)} runs: {told(chosen, trials.metric)}")
        points = untried = grid.next(scores, lower_is_better=lower)
    check_learnt(chosen)
    return Rates(tuple(found.values()), chosen, on_edge=bool(untried))


def raise_noise(question: Question, trials: Trials, chosen: RateTrial, tell: Tell) -> NoiseSearch:
    """Step 2: more noise at these rates until the metric degrades, or until the target needs no more."""
    metric, enough, lower = trials.metric, question.target.enough_noise(), trials.metric.lower_is_better
    tried = [NoiseTrial(question.noise_multiplier, chosen.value, chosen.run)]
    limits: dict[str, Any] = {
        "enough": enough,
        "most": question.most_noise,
        "lower_is_better": lower,
        "at_once": _AT_ONCE,
    }
    while following := next_noises(tried, question.degradation, **limits):
        pair = {"client_lr": chosen.client_lr, "server_lr": chosen.server_lr}
        results = trials.run([{**pair, "noise_multiplier": z} for z in following])
        for z, (value, record) in zip(following, results, strict=True):
            tried.append(NoiseTrial(z, value, record.id))
            loss = degradation(tried[0].value, value, lower_is_better=lower)
            shown = "diverged" if math.isinf(loss) else f"{metric.name} {value:.4g}, {change_in_words(loss)}"
            tell(f"  z = {z:.3g}: {shown}")
    return NoiseSearch(tuple(tried), borne(tried, question.degradation, lower_is_better=lower), enough)
