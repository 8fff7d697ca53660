"""Several runs in one program: their users train side by side, as more places of the same stack."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import SettingError
from .blocks import Visit
from .clipping import ClippedSum, clip_factors
from .interrupt import CtrlC
from .one_by_one import OneByOne
from .reports import RoundReport
from .round import TrainState
from .sampling import Cohort
from .stacked import Stacked
from .training import Training, TrainResult

ObserveRun = Callable[[int, RoundReport, TrainState], None]


def run_together(trainings: Sequence[Training], *, observe: ObserveRun | None = None) -> list[TrainResult]:
    """Run all of these at once; each result is what that training's own `run()` would give, up to rounding.

    They must have in common what makes a stack: population, architecture, loss, batches, device and precision. Learning
    rates, noise, clip, quantile, seed, sampling, cohort size and number of rounds may differ.
    `observe(number, report, state)` is called for every round of every run, by one run at a time. Ctrl-C stops all.
    """
    if not trainings:
        return []
    first = trainings[0].plain
    for number, training in enumerate(trainings):
        _check_alike(first, training.plain, number)
    _warn_of_shared_noise(trainings)
    cohorts = sum(training.algorithm.mechanism.cohort_size for training in trainings)
    table = _Table(Stacked(first, cohorts), len(trainings))
    looking = threading.Lock()

    def run(number: int, ctrl_c: CtrlC) -> TrainResult:
        def look(report: RoundReport, state: TrainState) -> None:
            if observe is not None:
                with looking:
                    observe(number, report, state)

        seat = _Seat(table, number, trainings[number].plain)
        try:
            seated = trainings[number].with_workforce(seat)
            return seated.run(observe=None if observe is None else look, ctrl_c=ctrl_c)
        finally:
            table.leave()

    with CtrlC() as ctrl_c, ThreadPoolExecutor(len(trainings), thread_name_prefix="clipline-run") as threads:
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


@dataclass(frozen=True, eq=False)
class _Request:
    visit: Visit
    cohort: Cohort
    clip: float


@dataclass(frozen=True, eq=False)
class _Seat:
    """The workforce of one run: its rounds wait until all other runs have one too."""

    table: _Table
    number: int
    plain: OneByOne

    @property
    def size(self) -> int:
        """One process."""
        return 1

    def at_work(self) -> AbstractContextManager[None]:
        """Nothing to prepare."""
        return nullcontext()

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Nothing: all runs share one stack."""

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits: PRIVATE."""
        visit = Visit(params, cohort.users, round_index, self.plain.streams, self.plain.local.lr)
        return self.table.ask(self.number, _Request(visit, cohort, clip))


class _Table:
    """Where runs meet: once every run that is still on has a round to train, one thread trains all of them.

    It is the same thread every time: what torch compiles and records depends on settings of the thread.
    """

    def __init__(self, engine: Stacked, runs: int) -> None:
        self._engine = engine
        self._runs = runs
        self._changed = threading.Condition()
        self._asked: dict[int, _Request] = {}
        self._answers: dict[int, ClippedSum | BaseException] = {}
        self._trainer = ThreadPoolExecutor(1, thread_name_prefix="clipline-stack")

    def ask(self, number: int, request: _Request) -> ClippedSum:
        """The sum for this run's round, when all are trained."""
        with self._changed:
            self._asked[number] = request
            self._serve_if_all_have_asked()
            self._changed.wait_for(lambda: number in self._answers)
            answer = self._answers.pop(number)
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
        numbers, requests = list(self._asked), list(self._asked.values())
        self._asked = {}
        try:
            self._answers.update(zip(numbers, self._trainer.submit(self._train, requests).result(), strict=True))
        except BaseException as error:  # every run must hear of it, or it would wait for ever
            self._answers.update(dict.fromkeys(numbers, error))
        self._changed.notify_all()

    def _train(self, requests: Sequence[_Request]) -> list[ClippedSum]:
        params = requests[0].visit.params
        dim = len(params)
        totals = torch.zeros(len(requests), dim + 1, dtype=torch.float64, device=params.device)
        clips = torch.tensor([request.clip for request in requests], dtype=torch.float64, device=params.device)
        for updates, owners in self._engine.train_together([request.visit for request in requests]):
            run = torch.from_numpy(owners).to(params.device)
            scale, within = clip_factors(updates.norms(), clips[run])
            bits = within.double() - 0.5
            updates.add_to_runs(totals[:, :dim], scale, run)
            totals[:, dim].index_add_(0, run, bits)
        return [
            ClippedSum(total, request.clip, request.cohort.sampling)
            for total, request in zip(totals, requests, strict=True)
        ]
