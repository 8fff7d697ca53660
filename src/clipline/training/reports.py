"""What is told of a round, and the queue that hands it on in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..federated.mechanism import Release
from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee

if TYPE_CHECKING:
    from .callbacks import Callback

Metrics = Mapping[str, float]
_MEASURED_AT_ONCE = 2  # rounds whose metrics may be in the making before training waits for them


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


def history(reports: Sequence[RoundReport], unprivate_timing: bool = False) -> dict[str, list[Any]]:
    """Rounds as columns, each as long as there are rounds: those of `round_json`, and None where a round has none."""
    rows = [round_json(report, unprivate_timing) for report in reports]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


RELEASED = ("round", "clip", "fraction_within", "epsilon", "delta", "unprivate_seconds")  # no metric has such a name


def finite_or_none(number: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return number if math.isfinite(number) else None


@dataclass(frozen=True, eq=False)
class PendingReport:
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
        self._waiting: deque[PendingReport] = deque()

    def put(self, waiting: PendingReport) -> None:
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

    def oldest(self, otherwise: int) -> int:
        """The round index of the first state that callbacks have not seen yet; `otherwise` if they have seen all."""
        return self._waiting[0].state.round_index if self._waiting else otherwise

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
