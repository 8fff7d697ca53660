"""The one loop over rounds: of a single run, and of several side by side."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..engine.core.precision import tf32_switched
from ..engine.core.problem import Problem
from ..engine.gpu.kernels.noise import DeviceNoise
from ..engine.isolation.guard import enough_resources, users_own
from ..engine.prefetch import Prefetch, draws_on_device
from ..errors import CliplineError, failed, refuse
from ..federated.backend import Backend, CohortRequest
from ..federated.clipping import ClippedSum
from ..federated.discrete_mechanism import DiscreteMechanism
from ..federated.draws import Draws, NoiseNow, PlainDraws, WholeNoise
from ..federated.mechanism import Release
from ..federated.round import Algorithm, TrainState
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger
from .callbacks import Callback
from .curves import quantile_of
from .diagnosis import Known, best_and_last, diagnose
from .model_card import about_training
from .result import Metrics, RoundReport, Stopped, TrainResult, round_numbers

if TYPE_CHECKING:
    from .training import Training

Result = TypeVar("Result")
_MEASURED_AT_ONCE = 2  # rounds whose metrics may be in the making before training waits for them
_ACCOUNTED = 100  # rounds of a run that are accounted at least, at equal distances


def drive(runs: Sequence[Run], backend: Backend) -> list[TrainResult]:
    """Run all of these to their end, round by round: one `backend.sums` trains the next round of every run.

    An error of one run, as of its callbacks, is raised once the others have ended; an error of the training at once.
    """
    going, errors = list(runs), list[Exception]()

    def tried(run: Run, step: Callable[[], Result]) -> Result | None:
        try:
            return step()
        except Exception as error:
            going.remove(run)
            errors.append(error)
            return None

    with ExitStack() as closing:
        for run in runs:
            closing.enter_context(run)
        with ExitStack() as working:
            with enough_resources():
                working.enter_context(backend.running())
            while wanted := [(run, one) for run in list(going) if (one := tried(run, run.begin_round)) is not None]:
                totals = _summed(backend, wanted)
                for (run, _), total in zip(wanted, totals, strict=True):
                    tried(run, partial(run.end_round, total))
        results = [tried(run, run.result) for run in list(going)]
        for error in errors:
            raise error
        return [result for result in results if result is not None]


def _summed(backend: Backend, wanted: Sequence[tuple[Run, CohortRequest]]) -> Sequence[ClippedSum]:
    """The sums that these runs want. An error of a user's training, where it is to be shown, says what failed."""
    try:
        with enough_resources():
            return backend.sums([request for _, request in wanted])
    except CliplineError:
        raise
    except Exception as error:
        problem, round_index = wanted[0][0].problem, wanted[0][1].round_index
        if problem.on_error != "raise" or not users_own(error):
            raise
        way_out = "mend the loss or this user's data; with on_error='zero' such a user adds nothing"
        what = f"the training of a user in round {round_index}"
        raise failed(what, error, problem.population.fields, way_out) from error


def one_round(algorithm: Algorithm, state: TrainState, draws: Draws, backend: Backend) -> tuple[TrainState, Release]:
    """A single round, for those who write a loop of their own. Within `backend.running()`."""
    going = algorithm.round(state, draws)
    (total,) = backend.sums([next(going)])
    try:
        going.send(total)
    except StopIteration as end:
        after: tuple[TrainState, Release] = end.value
        return after
    raise AssertionError("a round asks for one sum")


def released_rounds(training: Training, rounds: int) -> Iterator[tuple[TrainState, Release]]:
    """The state after each of so many rounds, and what it released: a run without callbacks and files."""
    state, draws = training.init(), draws_of(training, rounds)
    try:
        with training.backend.running():
            for _ in range(rounds):
                state, release = one_round(training.algorithm, state, draws, training.backend)
                yield state, release
    finally:
        draws.close()


def draws_of(training: Training, until: int, *, again: bool = False) -> Draws:
    """Cohort and noise of the rounds below `until`, drawn ahead unless that is switched off.

    From the system under a new key, unless it is the same run `again`: noise of another run must not be drawn twice.
    """
    if not again:
        training.key.renew()
    sampler, problem = training.algorithm.sampler, training.problem
    streams, dim, fast = problem.runs[0].streams, problem.model.dim, problem.fast
    if isinstance(training.algorithm.mechanism, DiscreteMechanism):
        return PlainDraws(sampler, streams, dim, problem.device, WholeNoise)
    on_device = draws_on_device(problem)
    if not fast.prefetch:
        return PlainDraws(sampler, streams, dim, problem.device, DeviceNoise if on_device else NoiseNow)
    return Prefetch(sampler, streams, dim, problem.device, until, on_device=on_device)


def _checked(callbacks: Sequence[Callback]) -> list[Callback]:
    """The callbacks, each of which must be one, and there once."""
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise refuse("callbacks", callbacks, "a list of callbacks", "give [Progress()], say")
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            raise refuse(
                f"callbacks[{number}]", callback, "a Callback object", "give Progress(), or derive from Callback"
            )
        if any(callback is other for other in callbacks[:number]):
            raise refuse(f"callbacks[{number}]", callback, "another object than those before it", "give it once")
    return list(callbacks)


class Run:
    """A run in progress. `number` is its index among those that train side by side; `again`: it has been resumed."""

    def __init__(
        self,
        training: Training,
        callbacks: Sequence[Callback],
        state: TrainState | None = None,
        number: int = 0,
        *,
        again: bool = False,
    ) -> None:
        training.check_idle()
        self._training, self._number = training, number
        # Those that write the ledger come first: a round is on record before anything else is done with it.
        self._callbacks = sorted(_checked(callbacks), key=lambda callback: not hasattr(callback, "charged"))
        self._state = training.init() if state is None else _gone_on(state, training)
        goes_on = self._state.noise is not None or training.privacy.noise_source == "system"
        if goes_on and sum(hasattr(one, "charged") for one in self._callbacks) > 1:
            way_out = "give one, and copy the folder when the run has ended"
            raise refuse("callbacks", "two run directories", "one, as both could go on with the same noise", way_out)
        if self._state.round_index > training.rounds:
            limit = f"at most the {training.rounds} rounds of the training"
            raise refuse("state.round_index", self._state.round_index, limit, "raise rounds")
        if training.personal is not None:
            training.personal.begin(self._state.round_index)
        # Every round is the same event, so it is known at once how many the budget allows.
        self._until = self._state.round_index + training.affordable(self._state)
        self._draws = draws_of(training, self._until, again=again)
        self._reports = ReportQueue(self._callbacks)
        self._stopped: Stopped = "finished"
        self._round: Generator[CohortRequest, ClippedSum, tuple[TrainState, Release]] | None = None
        self._request: CohortRequest | None = None
        self._begun = 0.0
        self._failed_waiting: Exception | None = None
        self._guarantees = GuaranteesAhead(training, self._until)
        self._waits_for_metrics = any(getattr(callback, "waits_for_metrics", False) for callback in self._callbacks)
        self._reads_guarantee = any(callback.reads_guarantee for callback in self._callbacks)

    def __enter__(self) -> Run:
        with ExitStack() as on_error:
            self._training.at_work = True
            on_error.callback(self._ended)
            on_error.callback(self._guarantees.close)
            on_error.callback(self._draws.close)
            # What measures begins first: if it refuses, no run directory has been made.
            measuring = [callback for callback in self._callbacks if hasattr(callback, "measure")]
            known = known_of(self._training, self._callbacks)
            for group in (measuring, [callback for callback in self._callbacks if callback not in measuring]):
                for callback in group:
                    callback.on_start(self._training, self._state)
                    on_error.callback(callback.close)
                for callback in self._callbacks if group is measuring else ():
                    if hasattr(callback, "check_metrics"):
                        callback.check_metrics(measuring, known)
            on_error.enter_context(self._training.problem.notices.heard_by(self._waits))
            # For the whole run: each block would switch them by itself, and metrics meanwhile come out by chance.
            on_error.enter_context(tf32_switched(self._training.problem.precision))
            self._closing = on_error.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def _ended(self) -> None:
        """The key of this run is held no more: only its run directory can go on with it."""
        self._training.at_work = False
        self._training.key.renew()

    @property
    def problem(self) -> Problem:
        """What is trained."""
        return self._training.problem

    def begin_round(self) -> CohortRequest | None:
        """What the next round wants summed; None if none comes."""
        if self._state.round_index >= self._training.rounds:
            return None
        if self._state.round_index >= self._until:
            self._stopped = "budget"
            return None
        if stopping := [callback for callback in self._callbacks if getattr(callback, "stop_requested", False)]:
            early = all(getattr(callback, "stop_reason", "") == "early" for callback in stopping)
            self._stopped = "early" if early else "interrupted"
            return None
        self._begun = time.perf_counter()
        if self._reads_guarantee:
            self._guarantees.begin(self._state)
        self._round = self._training.algorithm.round(self._state, self._draws)
        wanted, store = next(self._round), self._training.personal
        personal = None if store is None else store.request(wanted.round_index, wanted.cohort.users)
        self._request = replace(wanted, run=self._number, personal=personal)
        return self._request

    def end_round(self, total: ClippedSum) -> None:
        """Go on with the sum; hand out the reports that are ready."""
        assert self._round is not None
        assert self._request is not None
        if self._failed_waiting is not None:
            raise self._failed_waiting
        try:
            self._round.send(total)
        except StopIteration as end:
            state, release = end.value
        store, asked = self._training.personal, self._request
        if store is not None and asked.personal is not None:  # users keep what they trained; nothing else sees it
            store.add(asked.round_index, asked.cohort.users, asked.personal)
        clip, self._round, self._request, self._state = asked.clip, None, None, state
        for callback in self._callbacks:  # on record before anything else is done with it, whatever fails later
            callback.on_release(state)
        metrics = self._measured(last=state.round_index == self._until)
        seconds = time.perf_counter() - self._begun
        accounted = bool(metrics) or self._guarantees.includes(state)
        account = self._guarantees.of(state, begin=accounted and self._reads_guarantee)
        self._reports.put(PendingReport(state, release, clip, seconds, metrics, account, accounted))
        if self._waits_for_metrics:  # nor is the next round begun before callbacks have seen this one
            self._reports.flush()
        if store is not None:
            store.forget(before=self._reports.oldest(state.round_index))

    def result(self) -> TrainResult:
        """The trained model and its guarantee, once no round comes any more."""
        self._reports.flush()
        reports = tuple(self._reports.done)
        metrics = reports[-1].metrics if reports else {}
        if not metrics:
            metrics = {name: value for future in self._measured(last=True) for name, value in future.result().items()}
        training, state = self._training, self._state
        written = [callback.charged for callback in self._callbacks if hasattr(callback, "charged")]
        charged = max([state.ledger, *written], key=lambda ledger: ledger.rounds)  # a resumed run may have spent more
        if reports:  # a run that was stopped has them for its last round too, as one that finished has
            last = replace(reports[-1], metrics=metrics, accounted=True, account_now=training.accounting(charged))
            reports = (*reports[:-1], last)
        kept = next((one for callback in self._callbacks if (one := getattr(callback, "kept", None)) is not None), None)
        before = next((one for callback in self._callbacks if (one := getattr(callback, "rounds_before", None))), ())
        rounds = [*before, *map(round_numbers, reports)]
        known = replace(
            known_of(training, self._callbacks),
            ended=self._stopped != "interrupted",
            done=state.round_index,
            kept=None if kept is None or kept.rounds == state.round_index else kept.rounds,
        )
        result = TrainResult(
            training.model_at(state) if kept is None else training.problem.model.export(kept.params),
            state,
            training.guarantee_of(charged),
            metrics if kept is None else kept.metrics,
            reports,
            self._stopped,
            about_training(training),
            findings=diagnose(rounds, known),
            best=best_and_last(rounds, known),
            model_rounds=state.round_index if kept is None else kept.rounds,
            released_names=tuple(training.problem.model.named_shapes),
        )
        for callback in self._callbacks:
            callback.on_end(result)
        return result

    def _waits(self, reason: str | None) -> None:
        """Tell the callbacks why training waits, for the compiler say; None when it goes on.

        This is called while users train, and an error of a callback is none of theirs: `end_round` raises it.
        """
        try:
            for callback in self._callbacks:
                callback.on_wait(reason)
        except Exception as error:
            self._failed_waiting = error

    def _measured(self, last: bool) -> list[Future[Metrics]]:
        """What callbacks measure of the state, begun in the background."""
        measuring = [callback.measure for callback in self._callbacks if hasattr(callback, "measure")]
        begun = [future for measure in measuring if (future := measure(self._state, last=last)) is not None]
        # Where training draws from torch's global generator, a metric would draw from it at the same time.
        if self._waits_for_metrics or self._training.problem.draws_globally:
            wait(begun)
        return begun


def known_of(training: Training, callbacks: Sequence[Callback]) -> Known:
    """What is public about a training, to judge its rounds by; callbacks know the main metric and the facts."""
    directories = [callback for callback in callbacks if hasattr(callback, "facts")]  # what files say goes first
    metrics = (getattr(callback, "metric", None) for callback in directories or callbacks)
    return Known(
        target=quantile_of(training),
        cohort_size=training.cohort_size,
        count_stddev=training.algorithm.mechanism.count_stddev,
        noise_norm=training.noise_norm,
        metric=next((name for name in metrics if isinstance(name, str)), None),
        facts=next((facts for callback in callbacks if (facts := getattr(callback, "facts", None))), None),
    )


def _gone_on(state: TrainState, training: Training) -> TrainState:
    """The state to go on from, whose ledger has the statistics of the training at least.

    Banded noise goes on too, but not for a second time from one state, unless it is the same again: rounds that shared
    their earlier noise with others would cost more than the ledger says. Then, and in a state of another training,
    whose groups or users may be others, it begins anew. From a seed it cannot: what is drawn would be drawn again.
    """
    mechanism, noise, seeded = training.algorithm.mechanism, state.noise, training.privacy.noise_source == "seed"
    if noise is None or noise.made_by is not mechanism or (noise.spent and not seeded):
        noise = mechanism.begin(state.round_index)
        if noise is not None and seeded and state.round_index:
            raise refuse(
                "state", f"of round {state.round_index} of another training",
                "one of this training where banded noise comes from a seed: two noises of the same draws hide nothing",
                "go on with the training that made it, resume its run directory, or take noise_source='system'",
            )  # fmt: skip
    elif noise.spent:
        noise = noise.again()
    ledger = state.ledger.with_statistics(training.preprocessing.events)
    return state if ledger == state.ledger and noise is state.noise else replace(state, ledger=ledger, noise=noise)


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
                ledger = state.ledger.add(self._training.algorithm.next_event(state), rounds - state.round_index)
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
