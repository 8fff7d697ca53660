"""Several runs in one program: their users train side by side, as more places of the same stack or stacks."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..engine.one_by_one import OneByOne
from ..engine.parallel.forked import ForkedBackend
from ..engine.parallel.jobs import Errand, SumsOf, sums_here
from ..engine.parallel.torchrun import TorchrunBackend
from ..engine.stacked.block import Visit
from ..engine.stacked.trainer import Stacked
from ..engine.working_model import WorkingModel
from ..errors import SettingError, refuse
from ..federated.clipping import ClippedSum, clip_factors
from ..federated.round import TrainState
from ..federated.sampling import Cohort
from .interrupt import CtrlC
from .reports import RoundReport
from .training import Training, TrainResult

ObserveRun = Callable[[int, RoundReport, TrainState], None]


def run_together(trainings: Sequence[Training], *, observe: ObserveRun | None = None) -> list[TrainResult]:
    """Run all of these at once; each result is what that training's own `run()` would give, up to rounding.

    They must have in common what makes a stack: population, architecture, loss, batches, device and precision. Learning
    rates, noise, clip, quantile, seed, sampling, cohort size and number of rounds may differ.
    `observe(number, report, state)` is called for every round of every run, by one run at a time. Ctrl-C stops all.

    The users of all runs are shared among as many processes as the training with most `workers` has; what is said of
    workers in docs/workers.md holds for these. Noise is drawn and models move in this process alone.
    """
    if not trainings:
        return []
    first = trainings[0].plain
    for number, training in enumerate(trainings):
        _check_alike(first, training.plain, number)
    _warn_of_shared_noise(trainings)
    cohorts = sum(training.algorithm.mechanism.cohort_size for training in trainings)
    hands = _SideBySide(Stacked(first, cohorts), [training.plain for training in trainings])
    size, sums_of, at_work = _processes(hands, trainings)
    table = _Table(sums_of, len(trainings))
    looking = threading.Lock()

    def run(number: int, ctrl_c: CtrlC) -> TrainResult:
        def look(report: RoundReport, state: TrainState) -> None:
            if observe is not None:
                with looking:
                    observe(number, report, state)

        try:
            seated = trainings[number].with_workforce(_Seat(table, number, size))
            return seated.run(observe=None if observe is None else look, ctrl_c=ctrl_c)
        finally:
            table.leave()

    with CtrlC() as ctrl_c, at_work, ThreadPoolExecutor(len(trainings), thread_name_prefix="clipline-run") as threads:
        runs = [threads.submit(run, number, ctrl_c) for number in range(len(trainings))]
        return [one.result() for one in runs]


class SharedNoiseWarning(UserWarning):
    """Two private runs have the same seed, and so the same noise: who sees both can subtract it."""


def _warn_of_shared_noise(trainings: Sequence[Training]) -> None:
    seeds = Counter(
        training.plain.streams.seed
        for training in trainings
        if training.noise_multiplier > 0 and training.plain.streams.noise_source == "seed"
    )
    shared = [seed for seed, count in seeds.items() if count > 1]
    if shared:
        warnings.warn(
            f"{seeds[shared[0]]} private runs have the seed {shared[0]} and so the same noise, which the difference of "
            "their models leaves out: their guarantees hold one at a time only; give each a seed of its own",
            SharedNoiseWarning,
            stacklevel=3,
        )


def _check_alike(first: OneByOne, other: OneByOne, number: int) -> None:
    same = {
        "population": first.examples.population is other.examples.population,
        "model": first.flat.named_shapes == other.flat.named_shapes,
        "loss": first.loss == other.loss,
        "local": replace(first.local, lr=1.0) == replace(other.local, lr=1.0),
        "device": first.device == other.device,
        "precision": first.precision == other.precision,
        "row_fields": first.row_fields == other.row_fields,
        "what is not trained in the model": first.flat.same_apart_from_training(other.flat),
    }
    for name, alike in same.items():
        if not alike:
            raise SettingError(
                f"{name} of training {number} differs from that of training 0, and runs side by side must share it: "
                "give all trainings the same object, or run this one alone"
            )


def _processes(hands: _SideBySide, trainings: Sequence[Training]) -> tuple[int, SumsOf, AbstractContextManager[None]]:
    """How many there are, by which the sums are made, and their time at work."""
    forces = [training.algorithm.workforce for training in trainings]
    if any(isinstance(force, TorchrunBackend) for force in forces):
        raise refuse("workers", "torchrun", "a number where runs train side by side", "start without torchrun")
    size = max(force.size for force in forces)
    if size == 1:
        return 1, partial(sums_here, hands), nullcontext()
    plain = trainings[0].plain
    steps_of = partial(plain.local.steps_of, plain.examples.population)
    forked = ForkedBackend(hands, steps_of, size, runs=len(trainings))
    return size, forked.sums, forked.at_work()


@dataclass(frozen=True, eq=False)
class _SideBySide:
    """The hands of several runs: a user of any of them is one more place in the stack."""

    engine: Stacked
    plains: Sequence[OneByOne]

    @property
    def flat(self) -> WorkingModel:
        """That of the stack."""
        return self.engine.flat

    def add_up(self, errands: Sequence[Errand], totals: Tensor) -> None:
        """All errands at once, each user's update clipped and added as his run wants it."""
        totals.zero_()
        dim = totals.shape[1] - 1
        clips = torch.tensor([errand.clip for errand in errands], dtype=torch.float64, device=totals.device)
        for updates, owners in self.engine.train_together([self._visit(errand) for errand in errands]):
            run = torch.from_numpy(owners).to(totals.device)
            scale, within = clip_factors(updates.norms(), clips[run])
            updates.add_to_runs(totals[:, :dim], scale, run)
            totals[:, dim].index_add_(0, run, within.double() - 0.5)

    def _visit(self, errand: Errand) -> Visit:
        plain = self.plains[errand.run]
        return Visit(errand.params, errand.users, errand.round_index, plain.streams, plain.local.lr)


@dataclass(frozen=True, eq=False)
class _Seat:
    """The workforce of one run: its rounds wait until all other runs have one too."""

    table: _Table
    number: int
    size: int  # processes, which all runs share

    def at_work(self) -> AbstractContextManager[None]:
        """Nothing to prepare: the processes are there for all runs."""
        return nullcontext()

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Nothing: all runs share one stack."""

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits: PRIVATE."""
        total = self.table.ask(Errand(self.number, params, cohort.users, round_index, clip))
        return ClippedSum(total, clip, cohort.sampling)


class _Table:
    """Where runs meet: once every run that is still on has a round to train, one thread has all of them trained.

    It is the same thread every time: what torch compiles and records depends on settings of the thread.
    """

    def __init__(self, sums_of: SumsOf, runs: int) -> None:
        self._sums_of = sums_of
        self._runs = runs
        self._changed = threading.Condition()
        self._asked: list[Errand] = []
        self._answers: dict[int, Tensor | BaseException] = {}
        self._trainer = ThreadPoolExecutor(1, thread_name_prefix="clipline-stack")

    def ask(self, errand: Errand) -> Tensor:
        """The sum for this run's round, (dim + 1,) float64, when all are trained: PRIVATE.

        It may lie where that of the next round will.
        """
        with self._changed:
            self._asked.append(errand)
            self._serve_if_all_have_asked()
            self._changed.wait_for(lambda: errand.run in self._answers)
            answer = self._answers.pop(errand.run)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def leave(self) -> None:
        """A run is over: the others need not wait for it."""
        with self._changed:
            self._runs -= 1
            self._serve_if_all_have_asked()
            if self._runs == 0:
                self._trainer.shutdown()

    def _serve_if_all_have_asked(self) -> None:
        if not self._asked or len(self._asked) < self._runs:
            return
        errands, self._asked = sorted(self._asked, key=lambda errand: errand.run), []
        runs = [errand.run for errand in errands]
        try:
            self._answers.update(zip(runs, self._trainer.submit(self._sums_of, errands).result(), strict=True))
        except BaseException as error:  # every run must hear of it, or it would wait for ever
            self._answers.update(dict.fromkeys(runs, error))
        self._changed.notify_all()
