"""What is told of a round, the guarantees that are told with it, and the queue that hands it on in order."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..federated.mechanism import Release
from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger

if TYPE_CHECKING:
    from .callbacks import Callback
    from .training import Training

Metrics = Mapping[str, float]
_MEASURED_AT_ONCE = 2  # rounds whose metrics may be in the making before training waits for them
_ACCOUNTED = 100  # rounds of a run that are accounted at least, at equal distances


@dataclass(frozen=True, eq=False)
class RoundReport:
    """What may be shown and stored of one round: released numbers, and metrics on users outside the population."""

    round_index: int
    clip: float  # that clipped in this round
    fraction_within: float | None  # noisy
    metrics: Metrics  # empty where this round was not evaluated
    unprivate_seconds: float  # how long the round took, which depends on which users were drawn
    account_now: Callable[[], Guarantee] = field(repr=False)
    accounted: bool = True  # beside training; see `GuaranteesAhead` for those that are not

    @cached_property
    def guarantee(self) -> Guarantee:
        """Of all rounds so far. Where it was not `accounted` it is now, which may take longer than a round."""
        return self.account_now()


def round_json(report: RoundReport, unprivate_timing: bool = False) -> dict[str, Any]:
    """One round as a line of metrics.jsonl; epsilon is null where there is no guarantee, and left out if not accounted.

    How long the round took is left out unless asked for: it tells whether a user with much data took part.
    """
    seconds = {"unprivate_seconds": round(report.unprivate_seconds, 6)} if unprivate_timing else {}
    guarantee = report.guarantee if report.accounted else None
    spent = {} if guarantee is None else {"epsilon": finite_or_none(guarantee.epsilon), "delta": guarantee.delta}
    numbers = round_numbers(report)
    first = {name: numbers.pop(name) for name in ("round", "clip", "fraction_within")}
    return {**first, **spent, **seconds, **numbers}


def round_numbers(report: RoundReport) -> dict[str, Any]:
    """The same without a guarantee, which need not be accounted for this: what tells how a training goes."""
    return {
        "round": report.round_index,
        "clip": finite_or_none(report.clip),
        "fraction_within": report.fraction_within,
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


class GuaranteesAhead:
    """Guarantees of a run's rounds, accounted in a thread beside training.

    To account for a round may take longer than the round. So in a run of 200 rounds or more this is done after every
    hundredth part of them, after the last, and for rounds that were measured. What a round releases is known before it:
    all are the same event.
    """

    def __init__(self, training: Training, until: int) -> None:
        """`until`: how many rounds the budget allows."""
        self._training, self._until = training, until
        self._step = max(1, training.rounds // _ACCOUNTED)
        self._pending: dict[int, tuple[Ledger, PendingGuarantee]] = {}  # by the number of rounds
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clipline-accounting")

    def begin(self, state: TrainState) -> None:
        """Begin with the next two after this state."""
        first = self._next(state.round_index + 1)
        for rounds in (first, self._next(first + 1)):
            if rounds not in self._pending:
                ledger = state.ledger.add(self._training.algorithm.event, rounds - state.round_index)
                self._pending[rounds] = ledger, PendingGuarantee(self._training.accounting(ledger), self._thread)

    def of(self, state: TrainState, *, begin: bool) -> PendingGuarantee:
        """That of the rounds up to this state; if it has not been begun it is now, or when it is asked for."""
        ledger, found = self._pending.pop(state.round_index, (None, None))
        if found is not None and ledger == state.ledger:  # the rounds were charged as was foreseen
            return found
        return PendingGuarantee(self._training.accounting(state.ledger), self._thread if begin else None)

    def includes(self, state: TrainState) -> bool:
        """Whether the rounds up to this state are accounted in any case."""
        return self._next(state.round_index) == state.round_index

    def close(self) -> None:
        """End the thread; what it has not begun is accounted on demand."""
        self._thread.shutdown(cancel_futures=True)

    def _next(self, rounds: int) -> int:
        return min(self._until, math.ceil(rounds / self._step) * self._step)


class PendingGuarantee:
    """A guarantee that is accounted in a thread, if one is given, or on demand."""

    def __init__(self, account: Callable[[], Guarantee], thread: ThreadPoolExecutor | None = None) -> None:
        self._account = account
        self._begun = None if thread is None else thread.submit(account)

    def __call__(self) -> Guarantee:
        """The guarantee."""
        if self._begun is None or self._begun.cancelled():  # the run ended before its turn came, say
            return self._account()
        return self._begun.result()

    def done(self) -> bool:
        """Whether there is nothing to wait for: it is there, or nobody has begun with it."""
        return self._begun is None or self._begun.done()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """For pickle: without the thread."""
        return PendingGuarantee, (self._account,)


@dataclass(frozen=True, eq=False)
class PendingReport:
    """A round whose release or metrics may still be computed."""

    state: TrainState  # after the round
    release: Release
    clip: float
    unprivate_seconds: float
    metrics: Sequence[Future[Metrics]]
    account_now: PendingGuarantee
    accounted: bool


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
            # Of a round that is not measured nothing is waited for: whoever stops a run by it, stops it in that round.
            measured = not first.metrics or (all(one.done() for one in first.metrics) and first.account_now.done())
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
        told = (one.unprivate_seconds, one.account_now, one.accounted)
        report = RoundReport(round_index, one.clip, fraction, metrics, *told)
        self.done.append(report)
        for callback in self._callbacks:
            callback.on_round(report, one.state)
