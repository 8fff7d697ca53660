"""What is told of a round, and in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..federated.mechanism import Release
from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee
from .evaluation import Metrics

if TYPE_CHECKING:
    from .callbacks import Callback

_MEASURED_AT_ONCE = 2  # rounds whose metrics may be in the making before training waits for them


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


@dataclass(frozen=True, eq=False)
class Waiting:
    """A round whose release or metrics may still be computed."""

    state: TrainState  # after the round
    release: Release
    clip: float
    unprivate_seconds: float
    metrics: Sequence[Future[Metrics]]
    account_now: Callable[[], Guarantee]


class ReportQueue:
    """Reports of rounds, in order: each is handed to the callbacks once its metrics are there and the GPU is done.

    A GPU works on the next round by then: the report of a round waits until the next one has been begun.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.done: list[RoundReport] = []
        self._callbacks = callbacks
        self._waiting: deque[Waiting] = deque()

    def put(self, waiting: Waiting) -> None:
        """Take in one more, and hand out those that are ready. Waits if too many are not."""
        self._waiting.append(waiting)
        while self._waiting:
            first = self._waiting[0]
            measured = all(future.done() for future in first.metrics)
            released = len(self._waiting) > 1 or first.release.is_ready()
            too_many = sum(bool(one.metrics) for one in self._waiting) > _MEASURED_AT_ONCE
            if not (measured and released) and not too_many:
                return
            self._hand_out()

    def flush(self) -> None:
        """Hand out all that is left."""
        while self._waiting:
            self._hand_out()

    def _hand_out(self) -> None:
        one = self._waiting.popleft()
        metrics = {name: value for future in one.metrics for name, value in future.result().items()}
        fraction, round_index = one.release.fraction_within, one.state.round_index - 1
        report = RoundReport(round_index, one.clip, fraction, metrics, one.unprivate_seconds, one.account_now)
        self.done.append(report)
        for callback in self._callbacks:
            callback.on_round(report, one.state)
