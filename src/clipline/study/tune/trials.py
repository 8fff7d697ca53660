"""Runs of the trial, by what they are compared, and what a search for rates gives back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RunError, refuse
from ...metric_direction import better_facts, lower_is_better
from ..record import RunRecord, RunSpec
from ..study import Study
from .question import Question

STEP = 10**0.5  # half a decade, from one rate to the next
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One run: its rates, its noise, its converged metric (infinite if it diverged) and its identity in the study."""

    client_lr: float
    server_lr: float
    noise_multiplier: float
    value: float
    run: str = ""
    pruned: bool = False  # ended before its last round: its metric is that of fewer rounds

    @property
    def rates(self) -> dict[str, float]:
        """The settings of both rates."""
        return {"client_lr": self.client_lr, "server_lr": self.server_lr}


@dataclass(frozen=True)
class Metric:
    """By what runs are compared."""

    name: str
    lower_is_better: bool
    window: int = 1  # rounds at the end over which it is averaged

    @property
    def sign(self) -> int:
        """Times a value: the smaller the better."""
        return 1 if self.lower_is_better else -1

    @property
    def worst(self) -> float:
        """What a run that diverged counts as."""
        return self.sign * math.inf

    def of(self, record: RunRecord) -> float:
        """The converged metric of a run; the worst there is if it diverged."""
        value = math.nan if record.outcome == "diverged" else record.average(self.name, self.window)
        return value if math.isfinite(value) else self.worst

    def loss(self, reference: float, value: float) -> float:
        """By how much `value` is worse than `reference`, relative to it: 0.05 is 5%; below 0 it is better.

        Infinite for a run that diverged. A reference of zero cannot be worsened relatively: any loss from it is
        infinite.
        """
        if not math.isfinite(value):
            return math.inf
        loss = self.sign * (value - reference)
        return loss / abs(reference) if reference else math.inf if loss > 0 else 0.0

    def words(self, trial: Trial) -> str:
        """The best trial in a few words."""
        value = f"{self.name} {trial.value:.4g}" if math.isfinite(trial.value) else "diverged"
        return f"best {value} at client rate {trial.client_lr:.3g}, server rate {trial.server_lr:.3g}"


@dataclass(frozen=True)
class Rates:
    """What step 1 found. `on_edge`: the best pair has neighbours that were not tried, for want of runs."""

    trials: tuple[Trial, ...]
    chosen: Trial
    on_edge: bool = False


class Trials:
    """Makes runs of the trial and reads their converged metric."""

    def __init__(self, question: Question, study: Study) -> None:
        self.question, self.study = question, study
        self.metric = Metric("", False)  # known after the first run

    def run(self, changes: Sequence[dict[str, Any]]) -> list[Trial]:
        """The trial with each of these settings changed."""
        records = self.study.results([self.spec(change) for change in changes])
        self.metric = metric_of(self.question, records)
        least = self.question.noise_multiplier
        return [
            Trial(
                change["client_lr"], change["server_lr"], change.get("noise_multiplier", least),
                self.metric.of(record), record.id,
            )
            for change, record in zip(changes, records, strict=True)
        ]  # fmt: skip

    def spec(self, changes: dict[str, Any]) -> RunSpec:
        """The run of the trial with these settings changed."""
        question = self.question
        # At least five of the rounds that are averaged are measured.
        every = min(question.trial.measured_every, max(1, question.window // 5))
        settings = {"noise_multiplier": question.noise_multiplier, "evaluate_every": every, **changes}
        return RunSpec(question.trial.overridden(settings, "the trial"))


def metric_of(question: Question, records: Sequence[RunRecord]) -> Metric:
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


def check_learnt(chosen: Trial) -> None:
    """Refuse to go on where no pair of rates gave a model."""
    if not math.isfinite(chosen.value):
        raise RunError(
            f"every run of step 1 diverged, down to rates {chosen.client_lr:.3g} and {chosen.server_lr:.3g}: start "
            "from smaller ones with --client-lr and --server-lr, or give more --runs"
        )
