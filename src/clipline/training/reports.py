"""What is told of a round, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property

from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee
from .evaluation import Metrics


@dataclass(frozen=True, eq=False)
class RoundReport:
    """What may be shown and stored of one round: released numbers, and metrics on users outside the population."""

    round_index: int
    clip: float  # that clipped in this round
    fraction_within: float | None  # noisy
    metrics: Metrics  # empty where this round was not evaluated
    unprivate_seconds: float  # how long the round took, which tells something of how many users came
    account_now: Callable[[], Guarantee] = field(repr=False)

    @cached_property
    def guarantee(self) -> Guarantee:
        """Of all rounds so far. Accounted when it is asked for: that may take longer than the round."""
        return self.account_now()


class ReportQueue:
    """Takes in reports as rounds end, waits for their metrics and hands them on in order."""

    def __init__(self, observe: Callable[[RoundReport, TrainState], None] | None, limit: int) -> None:
        self.reports: list[RoundReport] = []
        self._observe = observe
        self._limit = limit
        self._waiting: deque[tuple[RoundReport, TrainState, Future[Metrics] | None]] = deque()

    def hand_in(self, report: RoundReport, state: TrainState, metrics: Future[Metrics] | None) -> None:
        """Take in one more, and hand on those that are ready. Waits if too many are not."""
        self._waiting.append((report, state, metrics))
        self._hand_on(self._limit)

    def finish(self) -> None:
        """Hand on all that is left."""
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
