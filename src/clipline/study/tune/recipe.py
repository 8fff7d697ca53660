"""The three steps, in order. Every run goes through a `Study`: what was run before is read and not repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import RunError, refuse
from ...metric_direction import better_facts, lower_is_better
from ..runs.record import RunRecord, RunSpec
from ..runs.study import Study
from . import noise, rates, scale
from .noise import NoiseTrial
from .question import Question

Tell = Callable[[str], None]

_AT_ONCE = 2  # noises of step 2 that are tried side by side


@dataclass(frozen=True)
class Metric:
    """By what runs are compared."""

    name: str
    lower_is_better: bool
    window: int  # rounds at the end over which it is averaged

    def of(self, record: RunRecord) -> float:
        """The converged metric of a run; the worst there is if it diverged."""
        if record.outcome == "diverged":
            return self.worst
        value = record.average(self.name, self.window)
        return value if math.isfinite(value) else self.worst

    @property
    def worst(self) -> float:
        """What a run that diverged counts as."""
        return math.inf if self.lower_is_better else -math.inf


@dataclass(frozen=True)
class RateTrial:
    """One run of step 1: its rates, its converged metric (infinite if it diverged) and its identity in the study."""

    client_lr: float
    server_lr: float
    value: float
    run: str
    pruned: bool = False  # ended before its last round: its metric is that of fewer rounds


@dataclass(frozen=True)
class Rates:
    """What step 1 found. `on_edge`: the best pair has neighbours that were not tried, for want of runs."""

    trials: tuple[RateTrial, ...]
    chosen: RateTrial
    on_edge: bool = False


@dataclass(frozen=True)
class NoiseSearch:
    """What step 2 found. `enough` is the noise with which the trial's cohort itself meets the target."""

    trials: tuple[NoiseTrial, ...]
    chosen: NoiseTrial
    enough: float

    def losses(self, metric: Metric) -> list[tuple[float, float]]:
        """(noise, degradation) of each trial, from the least noise upwards."""
        rising = sorted(self.trials, key=lambda trial: trial.noise_multiplier)
        return [
            (
                trial.noise_multiplier,
                noise.degradation(rising[0].value, trial.value, lower_is_better=metric.lower_is_better),
            )
            for trial in rising
        ]


@dataclass(frozen=True)
class Tuned:
    """The answer. `scaled` is None where the target cannot be met: `refusal` then says what could be changed."""

    question: Question
    metric: Metric
    rates: Rates
    noise: NoiseSearch
    scaled: scale.Scaled | None
    refusal: scale.Unreachable | None = None

    @property
    def more_noise_untried(self) -> bool:
        """Whether step 2 ended because the target was met, so that the model may tolerate more noise than was tried."""
        z = self.noise.chosen.noise_multiplier
        return z == max(trial.noise_multiplier for trial in self.noise.trials) and z < self.question.most_noise


def tune(question: Question, study: Study, tell: Tell = lambda line: None) -> Tuned:
    """The recipe on proxy data. `tell` gets a line whenever something was found."""
    trials = Trials(question, study)
    tell(f"step 1 of 3: client and server rates at m = {question.trial.cohort_size}, z = {question.noise_multiplier:g}")
    found = _searched(question, trials, tell)
    tell(f"step 2 of 3: more noise, at rates {found.chosen.client_lr:.3g} and {found.chosen.server_lr:.3g}")
    bearable = raise_noise(question, trials, found.chosen, tell)
    tell(f"step 3 of 3: cohort and noise together, for epsilon {question.target.epsilon:g}")
    try:
        losses = bearable.losses(trials.metric)
        scaled = scale.scaled(question.target, bearable.chosen.noise_multiplier, losses)
        return Tuned(question, trials.metric, found, bearable, scaled)
    except scale.Unreachable as refusal:
        return Tuned(question, trials.metric, found, bearable, None, refusal)


class Trials:
    """Makes runs of the trial and reads their converged metric."""

    def __init__(self, question: Question, study: Study) -> None:
        self.question, self.study = question, study
        self._metric: Metric | None = None

    def run(self, settings: Sequence[dict[str, float]]) -> list[tuple[float, RunRecord]]:
        """(converged metric, record) of the trial with each of these settings changed."""
        records = self.study.results([self.spec(changes) for changes in settings])
        self._metric = self._metric or _metric_of(self.question, records)
        return [(self._metric.of(record), record) for record in records]

    def spec(self, changes: dict[str, float]) -> RunSpec:
        """The run of the trial with these settings changed."""
        question = self.question
        # At least five of the rounds that are averaged are measured.
        every = min(question.trial.measured_every, max(1, question.window // 5))
        settings = {"noise_multiplier": question.noise_multiplier, "evaluate_every": every, **changes}
        return RunSpec(question.trial.overridden(settings, "the trial"))

    @property
    def metric(self) -> Metric:
        """What runs are compared by; known after the first one."""
        assert self._metric is not None, "a trial was run"
        return self._metric


def _metric_of(question: Question, records: Sequence[RunRecord]) -> Metric:
    """The metric asked for, or the task's main one: of a task of one's own the first that is not the loss."""
    known = next((list(record.final) for record in records if record.final), [])
    name = question.metric or question.task.metric_name
    if question.metric is None and question.task.data == "own":
        name = next((other for other in known if other != "loss"), "loss")
    if known and name not in known:
        raise refuse("metric", name, f"one of {', '.join(known)}", "give one that the task measures")
    lower = question.lower_is_better
    if lower is None:
        lower = lower_is_better(name, better_facts(question.task.better))
    return Metric(name, lower, question.window)


def _searched(question: Question, trials: Trials, tell: Tell) -> Rates:
    if question.search == "optuna":
        from .optuna_search import search_with_optuna

        return search_with_optuna(question, trials, tell)
    return search_grid(question, trials, tell)


def search_grid(question: Question, trials: Trials, tell: Tell) -> Rates:
    """Step 1 on the lattice of half decades, until the best pair has beaten its neighbours or `runs` are spent."""
    grid = rates.RateGrid(question.trial.client_lr, question.trial.server_lr, question.reach)
    found: dict[rates.Offsets, RateTrial] = {}
    scores: dict[rates.Offsets, float] = {}
    points = sorted(grid.first(), key=lambda point: point[0] ** 2 + point[1] ** 2)  # the centre first, if runs are few
    while points := points[: question.runs - len(found)]:
        pairs = [grid.rates(point) for point in points]
        results = trials.run([{"client_lr": client, "server_lr": server} for client, server in pairs])
        for point, (client, server), (value, record) in zip(points, pairs, results, strict=True):
            found[point], scores[point] = RateTrial(client, server, value, record.id), value
        best = found[rates.best(scores, lower_is_better=trials.metric.lower_is_better)]
        tell(f"  {len(found)} runs: {told(best, trials.metric)}")
        points = grid.next(scores, lower_is_better=trials.metric.lower_is_better)
    chosen = found[rates.best(scores, lower_is_better=trials.metric.lower_is_better)]
    check_learnt(chosen)
    return Rates(
        tuple(found.values()), chosen, on_edge=bool(grid.next(scores, lower_is_better=trials.metric.lower_is_better))
    )


def raise_noise(question: Question, trials: Trials, chosen: RateTrial, tell: Tell) -> NoiseSearch:
    """Step 2: more noise at these rates until the metric degrades, or until the target needs no more."""
    metric, enough = trials.metric, question.target.enough_noise()
    tried = [NoiseTrial(question.noise_multiplier, chosen.value, chosen.run)]
    limits = {"enough": enough, "most": question.most_noise}
    while following := noise.next_noises(
        tried, question.degradation, **limits, lower_is_better=metric.lower_is_better, at_once=_AT_ONCE
    ):
        pair = {"client_lr": chosen.client_lr, "server_lr": chosen.server_lr}
        results = trials.run([{**pair, "noise_multiplier": z} for z in following])
        for z, (value, record) in zip(following, results, strict=True):
            tried.append(NoiseTrial(z, value, record.id))
            loss = noise.degradation(tried[0].value, value, lower_is_better=metric.lower_is_better)
            shown = "diverged" if math.isinf(loss) else f"{metric.name} {value:.4g}, {noise.change_in_words(loss)}"
            tell(f"  z = {z:.3g}: {shown}")
    best = noise.borne(tried, question.degradation, lower_is_better=metric.lower_is_better)
    return NoiseSearch(tuple(tried), best, enough)


def check_learnt(chosen: RateTrial) -> None:
    """Refuse to go on where no pair of rates gave a model."""
    if not math.isfinite(chosen.value):
        raise RunError(
            f"every run of step 1 diverged, down to rates {chosen.client_lr:.3g} and {chosen.server_lr:.3g}: start "
            "from smaller ones with --client-lr and --server-lr, or give more --runs"
        )


def told(trial: RateTrial, metric: Metric) -> str:
    """A trial in a few words."""
    value = f"{metric.name} {trial.value:.4g}" if math.isfinite(trial.value) else "diverged"
    return f"best {value} at client rate {trial.client_lr:.3g}, server rate {trial.server_lr:.3g}"
