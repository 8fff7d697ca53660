"""What is told of a round, and the queue that hands it on in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee

Metrics = Mapping[str, float]


@dataclass(frozen=True, eq=False)
class RoundReport:
    """What may be shown and stored of one round: released numbers, and metrics on users outside the population."""

    round_index: int
    clip: float  # that clipped in this round
    fraction_within: float | None  # noisy
    metrics: Metrics  # empty where this round was not evaluated
    unprivate_seconds: float  # how long the round took, which depends on which users were drawn
    account_now: Callable[[], Guarantee] = field(repr=False)

    @cached_property
    def guarantee(self) -> Guarantee:
        """Of all rounds so far. Accounted when it is asked for: that may take longer than the round."""
        return self.account_now()


def round_json(report: RoundReport, unprivate_timing: bool = False) -> dict[str, Any]:
    """One round as a line of metrics.jsonl; epsilon is null where there is no guarantee.

    How long the round took is left out unless asked for: it tells whether a user with much data took part.
    """
    seconds = {"unprivate_seconds": round(report.unprivate_seconds, 6)} if unprivate_timing else {}
    return {
        "round": report.round_index,
        "clip": finite_or_none(report.clip),
        "fraction_within": report.fraction_within,
        "epsilon": finite_or_none(report.guarantee.epsilon),
        "delta": report.guarantee.delta,
        **seconds,
        **{name: finite_or_none(value) for name, value in report.metrics.items()},
    }


RELEASED = ("round", "clip", "fraction_within", "epsilon", "delta", "unprivate_seconds")  # no metric has such a name


def finite_or_none(number: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return number if math.isfinite(number) else None


class ReportQueue:
    """Takes in reports as rounds end, waits for their metrics and hands them on in order."""

    def __init__(self, observe: Callable[[RoundReport, TrainState], None] | None, limit: int) -> None:
        self.reports: list[RoundReport] = []
        self._observe = observe
        self._limit = limit
        self._waiting: deque[tuple[RoundReport, TrainState, Future[Metrics] | None]] = deque()

    def hand_in(self, report: RoundReport, state: TrainState, metrics: Future[Metrics] | None) -> None:
        """Add a report, then hand on those that are ready. Waits while more than `limit` are not."""
        self._waiting.append((report, state, metrics))
        self._hand_on(self._limit)

    def finish(self) -> None:
        """Hand on all that are left."""
        self._hand_on(0)

    def _hand_on(self, limit: int) -> None:
        while self._waiting:
            report, state, metrics = self._waiting[0]
            if metrics is not None and not metrics.done() and len(self._waiting) <= limit:
                return
            if metrics is not None:
                report = replace(report, metrics=metrics.result())
            self._waiting.popleft()
            self.reports.append(report)
            if self._observe is not None:
                self._observe(report, state)
