"""Makes runs and their records: a group side by side as one program, or one run after the other."""

from __future__ import annotations

import math
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine.choose import SMALL_MODEL
from ..engine.stacked.probe import CannotStack
from ..engine.workers.single import SingleProcess
from ..errors import first_line
from ..federated.backend import CohortRequest, LocalTrainer
from ..federated.clipping import UserUpdates
from ..federated.round import TrainState
from ..settings import LARGEST_CLIP
from ..tasks.task import LoadedTask, Task
from ..tasks.train_settings import TrainSettings
from ..training.callbacks import Callback, Measuring
from ..training.evaluation import Evaluate
from ..training.loop import Run, drive
from ..training.model_card import where_it_ran
from ..training.result import Metrics, RoundReport
from ..training.run_files import finite_or_none
from ..training.side_by_side import SharedNoiseWarning, run_together
from ..training.training import Training
from .record import QUANTILES, Outcome, RunRecord, RunSpec

if TYPE_CHECKING:
    from ..training.result import TrainResult

_NOT_FINITE = "clipline_not_finite"  # a metric of ours while a run is on its way; it is in no record


@dataclass(frozen=True)
class PlannedRun:
    """A run to make, with its identity."""

    spec: RunSpec
    id: str
    parts: Mapping[str, Any]


class Recorder(Measuring):
    """Measures one run and hands its record to `add` when it has ended.

    Rounds are measured as the spec says, and the last one always. A model with a number that is not finite, a metric
    that is not, or a clip that has run away to its limit ends the run as diverged. Epsilon is computed once, at the
    end.
    """

    reads_guarantee = False

    def __init__(
        self,
        planned: PlannedRun,
        loaded: LoadedTask,
        add: Callable[[RunRecord], None],
        *,
        facts: Mapping[str, Any],
        on_round: Callable[[str], None] = lambda run: None,
        unprivate_quantiles: Callable[[], Mapping[int, list[float | None]]] | None = None,
    ) -> None:
        self.stop_requested = False
        self._planned, self._add, self._facts, self._after_round = planned, add, facts, on_round
        self._unprivate_quantiles = unprivate_quantiles
        self._evaluate = Evaluate(_finite_too(loaded), every=1)
        self._diverged = False

    def on_start(self, training: Training, state: TrainState) -> None:
        """Get ready to measure."""
        self._training, self._begun = training, time.perf_counter()
        self._evaluate.on_start(training, state)

    def measure(self, state: TrainState, *, last: bool) -> Future[Metrics] | None:
        """Metrics of this state, if it is the turn of this round."""
        spec = self._planned.spec
        in_window = state.round_index > spec.settings.rounds - spec.evaluate_last
        due = last or in_window or state.round_index % spec.settings.measured_every == 0
        return self._evaluate.measure(state, last=True) if due else None

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Notice a run that has diverged: no later round can mend it."""
        # An infinite clip is none at all; one at the limit has been driven there.
        lost_clip = math.isnan(report.clip) or LARGEST_CLIP <= report.clip < math.inf
        if lost_clip or any(not math.isfinite(value) for value in report.metrics.values()):
            self._diverged = self.stop_requested = True
        self._after_round(self._planned.id)

    def on_end(self, result: TrainResult) -> None:
        """Hand the record on; nothing of a run that was interrupted."""
        if any(not math.isfinite(value) for value in result.metrics.values()):
            self._diverged = True
        if result.stopped == "interrupted" and not self._diverged:
            return
        outcome: Outcome = "diverged" if self._diverged else "budget" if result.stopped == "budget" else "finished"
        self._add(
            RunRecord(
                id=self._planned.id,
                identity=self._planned.parts,
                outcome=outcome,
                rounds=self._columns(result),
                final={name: _number(result.metrics.get(name)) for name in self._measured(result)},
                guarantee=self._guarantee(result),
                circumstances={  # none of it should decide a number
                    **{name: value for name, value in where_it_ran(self._training).items() if name != "engine"},
                    "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    **self._facts,
                    "unprivate_seconds": round(time.perf_counter() - self._begun, 3),
                },
            )
        )

    def close(self) -> None:
        """End the measuring."""
        self._evaluate.close()

    def _guarantee(self, result: TrainResult) -> dict[str, Any]:
        """Epsilon and delta of the model with all that they rest on, and in words."""
        guarantee, training, in_words = result.guarantee, self._training, str(result.guarantee)
        open_quantiles = self._unprivate_quantiles is not None
        if open_quantiles:
            in_words = f"not private: true quantiles of the update norms are recorded (the model alone: {in_words})"
        mechanism = training.algorithm.mechanism
        return {
            "in_words": in_words,
            "private": guarantee.private and not open_quantiles,
            "sound": guarantee.sound,
            "epsilon": finite_or_none(guarantee.epsilon),
            "delta": guarantee.delta,
            "sampling": guarantee.sampler,
            "relation": str(guarantee.relation),
            "accountant": guarantee.accountant,
            "rounds": guarantee.rounds,
            "population_size": training.privacy.population_size or len(training.population),
            "cohort_size": training.cohort_size,
            "noise_multiplier": float(training.noise_multiplier),
            "delta_noise_multiplier": finite_or_none(float(mechanism.delta_noise_multiplier)),
            "count_stddev": mechanism.count_stddev,
        }

    def _measured(self, result: TrainResult) -> list[str]:
        """The names of the metrics, in order. A model that is not finite was not measured by the task."""
        names = dict.fromkeys(name for report in result.reports for name in report.metrics)
        return [name for name in {**names, **dict.fromkeys(result.metrics)} if name != _NOT_FINITE]

    def _columns(self, result: TrainResult) -> dict[str, list[Any]]:
        reports = result.reports
        columns: dict[str, list[Any]] = {
            "round": [report.round_index for report in reports],
            "clip": [finite_or_none(report.clip) for report in reports],
            "fraction_within": [report.fraction_within for report in reports],
        }
        for name in self._measured(result):
            columns[name] = [_number(report.metrics.get(name)) for report in reports]
            if reports:  # a run that stops early is measured once more at its end
                columns[name][-1] = _number(result.metrics.get(name))
        if self._unprivate_quantiles is not None:
            of_rounds, nobody = self._unprivate_quantiles(), [None] * len(QUANTILES)
            for place, quantile in enumerate(QUANTILES):
                name = f"unprivate_quantile_{quantile:g}"
                columns[name] = [of_rounds.get(report.round_index, nobody)[place] for report in reports]
        return columns


def _finite_too(loaded: LoadedTask) -> Callable[[torch.nn.Module], Metrics]:
    """The task's metrics; NaN and nothing else if a parameter is not finite, which a task need not put up with."""

    def evaluate(model: torch.nn.Module) -> Metrics:
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return {**loaded.evaluate(model), _NOT_FINITE: 0.0} if finite else {_NOT_FINITE: math.nan}

    return evaluate


def _number(value: float | None) -> float | None:
    return None if value is None else finite_or_none(value)


class UnprivateNorms:
    """Stands before a trainer once it is called with one, and writes down quantiles of the norms of the updates."""

    def __init__(self) -> None:
        self._rounds: dict[int, dict[int, list[float | None]]] = {}  # run -> round -> quantiles

    def __call__(self, trainer: LocalTrainer) -> UnprivateNorms:
        """The same with a trainer, whose blocks it hands on."""
        self._trainer = trainer
        return self

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[UserUpdates, NDArray[np.int64]]]:
        """The blocks of the trainer, unchanged."""
        norms: list[list[NDArray[np.float64]]] = [[] for _ in requests]
        for updates, owners in self._trainer.train(requests):
            values = updates.norms().detach().to("cpu", torch.float64, copy=True).numpy()
            for index in np.unique(owners):
                norms[index].append(values[owners == index])
            yield updates, owners
        for request, blocks in zip(requests, norms, strict=True):
            of_round = unprivate_quantiles_of(np.concatenate(blocks) if blocks else np.empty(0))
            self._rounds.setdefault(request.run, {})[request.round_index] = of_round

    def of_run(self, number: int) -> dict[int, list[float | None]]:
        """For each round of this run a number for each of `QUANTILES`; see `unprivate_quantiles_of`."""
        return self._rounds.get(number, {})


def unprivate_quantiles_of(norms: NDArray[np.float64]) -> list[float | None]:
    """For each of `QUANTILES` the smallest norm that at least this share of the norms do not exceed.

    A norm that is not finite counts as infinite. None where nobody came, and in the place of infinity.
    """
    if not len(norms):
        return [None] * len(QUANTILES)
    finite = np.nan_to_num(norms, nan=math.inf, posinf=math.inf)
    values = np.quantile(finite, QUANTILES, method="inverted_cdf")
    return [float(value) if math.isfinite(value) else None for value in values]


# What decides which users, which examples and which model: runs that agree in these share one `LoadedTask`.
OF_DATA = (
    *("task", "data", "user_column", "classes", "population_size", "test_users", "evaluate_on"),
    *("augment", "group_count", "padding_in_loss"),
)
# What else runs side by side must have in common.
_OF_SHAPE = (
    *("batch_size", "client_epochs", "max_examples", "device", "engine", "precision"),
    *("compiled_steps", "workers"),
)

_CPU_USERS, _GPU_USERS = 512, 2048  # users a round of all runs of a group: more gain nothing
_MOST = 32  # runs in a group: all are lost together when a process is killed
_FREE_SHARE = 0.3  # of the GPU's free memory for what every run has of its own
_BYTES_A_PARAMETER = 64  # of a run: parameters, momentum, noise and sums in float64, a model to measure with


def data_key(settings: TrainSettings) -> tuple[Any, ...]:
    """Equal for settings that share their data and model."""
    return tuple(getattr(settings, name) for name in OF_DATA)


def shape_key(spec: RunSpec) -> tuple[Any, ...]:
    """Equal for specs that may run side by side."""
    settings = tuple(getattr(spec.settings, name) for name in _OF_SHAPE)
    return (*data_key(spec.settings), *settings, spec.unprivate_quantiles)


def group_size(settings: TrainSettings, loaded: LoadedTask) -> int:
    """How many runs like this one to make side by side: 1 where it gains nothing."""
    model = loaded.make(settings.seed)
    dim = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    device = settings.compute().resolved(dim, settings.cohort_size).device
    assert isinstance(device, torch.device)
    if settings.engine == "one-by-one" or (device.type == "cpu" and dim >= SMALL_MODEL and settings.engine == "auto"):
        return 1
    if device.type == "cpu":
        return max(1, min(_MOST, _CPU_USERS // settings.cohort_size))
    free, _ = torch.cuda.mem_get_info(device)
    fitting = int(_FREE_SHARE * free / (_BYTES_A_PARAMETER * dim))
    return max(1, min(_MOST, _GPU_USERS // settings.cohort_size, fitting))


@dataclass(frozen=True)
class Failure:
    """A run that ended with an error and has no record."""

    run: PlannedRun
    error: str  # in a line
    trace: str


def run_group(
    task: Task,
    loaded: LoadedTask,
    group: Sequence[PlannedRun],
    add: Callable[[RunRecord], None],
    on_round: Callable[[str], None] = lambda run: None,
) -> list[Failure]:
    """Make these runs, which share a shape, and hand each record to `add` as soon as there is one.

    If a group fails as a whole, its halves are tried, so that one bad run, or too little memory, stops no other; a run
    that fails alone is given back as a failure. KeyboardInterrupt passes through, and so does an error of `add`: a
    record that cannot be written is lost, and so would be the next.
    """
    done, lost = set[str](), list[BaseException]()

    def added(record: RunRecord) -> None:
        try:
            add(record)
        except Exception as error:  # a full disk, say
            lost.append(error)
            raise
        done.add(record.id)

    used = task.data_used(group[0].spec.settings)
    facts = {"data": used.kind, "data_source": used.source, "measured_on": used.measured_on, "side_by_side": len(group)}
    recorder = partial(Recorder, loaded=loaded, add=added, facts=facts, on_round=on_round)
    try:
        with warnings.catch_warnings():
            # Runs of a study share seeds on purpose, to be compared: each guarantee is that of its run alone.
            warnings.simplefilter("ignore", SharedNoiseWarning)
            _run(task, loaded, group, recorder)
    except Exception as error:
        if lost:  # training the others again would not help
            raise
        left = [run for run in group if run.id not in done]
        if len(group) == 1:
            first = first_line(error)
            trace = "".join(traceback.format_exception(error))
            return [Failure(run, f"{type(error).__name__}: {first}", trace) for run in left]
    else:
        left = [run for run in group if run.id not in done]
        assert not left, "a run that ends without an error gives its record"
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(left) // 2
    halves = [half for half in (left[:middle], left[middle:]) if half]
    return [failure for half in halves for failure in run_group(task, loaded, half, add, on_round)]


def _run(task: Task, loaded: LoadedTask, group: Sequence[PlannedRun], recorder: Callable[..., Recorder]) -> None:
    if len(group) > 1:
        with suppress(CannotStack):
            _run_together(task, loaded, group, recorder)
            return
    for run in group:
        if not run.spec.unprivate_quantiles:
            task.training(run.spec.settings, loaded).run([recorder(run)])
            continue
        norms = UnprivateNorms()
        training = task.training(replace(run.spec.settings, workers=1), loaded)
        watching = recorder(run, unprivate_quantiles=partial(norms.of_run, 0))
        drive([Run(training, [watching])], SingleProcess(norms(training.trainer)))


def _run_together(
    task: Task, loaded: LoadedTask, group: Sequence[PlannedRun], recorder: Callable[..., Recorder]
) -> None:
    norms = UnprivateNorms() if group[0].spec.unprivate_quantiles else None
    trainings: list[Training] = []
    callbacks: list[list[Callback]] = []
    for number, run in enumerate(group):
        # One stack for all is made below: none for each. Watching needs all updates in one process.
        workers = 1 if norms else run.spec.settings.workers
        training = task.training(replace(run.spec.settings, engine="one-by-one", workers=workers), loaded)
        if trainings:  # one copy of the examples on a GPU, not one a run
            training.problem.examples = trainings[0].problem.examples
        trainings.append(training)
        callbacks.append([recorder(run, unprivate_quantiles=partial(norms.of_run, number) if norms else None)])
    run_together(trainings, callbacks, unprivate_watch=norms)


class LocalExecutor:
    """Makes one group at a time, in this process. The task's data are loaded once for all that share them."""

    def __init__(self, task: Task, add: Callable[[RunRecord], None], on_round: Callable[[str], None]) -> None:
        self.task, self.add, self._on_round = task, add, on_round
        self._group: Sequence[PlannedRun] = ()
        self._loaded: tuple[Any, LoadedTask] | None = None

    def free_slots(self) -> int:
        """One, unless it is taken."""
        return 0 if self._group else 1

    def most(self, settings: TrainSettings) -> int:
        """What fits the memory of the device and still gains speed."""
        return group_size(settings, self.load(settings))

    def start(self, group: Sequence[PlannedRun]) -> None:
        """Remember it: it is made in `wait`."""
        self._group = group

    def wait(self) -> list[tuple[Sequence[PlannedRun], list[Failure]]]:
        """Make the group."""
        group, self._group = self._group, ()
        settings = group[0].spec.settings
        loaded = self.load(settings)
        with _threads_for(loaded, settings):
            return [(group, run_group(self.task, loaded, group, self.add, self._on_round))]

    def close(self) -> None:
        """Nothing is left over: what was not made has no record."""

    def load(self, settings: TrainSettings) -> LoadedTask:
        """The task with its data in place."""
        key = data_key(settings)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # before the next is loaded: there need not be memory for both
            settings.compute().check_device()
            self._loaded = key, self.task.load(settings)
        return self._loaded[1]


@contextmanager
def _threads_for(loaded: LoadedTask, settings: TrainSettings) -> Iterator[None]:
    """One thread for a small model, whose operations are too short to share; as before on leaving."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in loaded.make(settings.seed).parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
