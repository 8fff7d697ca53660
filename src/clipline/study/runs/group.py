"""Makes a group of runs of one shape: side by side as one program, or one after the other where that cannot be."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...engine.choose import SMALL_MODEL
from ...engine.stacked.probe import CannotStack
from ...engine.workers.single import SingleProcess
from ...tasks.settings import TrainSettings
from ...tasks.task import LoadedTask, Task
from ...training.callbacks import Callback
from ...training.loop import Run, drive
from ...training.side_by_side import SharedNoiseWarning, run_together
from ...training.training import Training
from .record import RunRecord, RunSpec
from .recording import PlannedRun, Recorder
from .unprivate_norms import UnprivateNorms

# What decides which users, which examples and which model: runs that agree in these share one `LoadedTask`.
OF_DATA = (
    *("task", "data", "user_column", "classes", "population_size", "test_users", "evaluate_on"),
    *("augment", "group_count", "padding_in_loss"),
)
# What else runs side by side must have in common.
_OF_SHAPE = (
    "batch_size",
    "client_epochs",
    "max_examples",
    "device",
    "engine",
    "precision",
    "compiled_steps",
    "stored_programs",
    "workers",
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
        with _quietly():
            _run(task, loaded, group, recorder)
    except Exception as error:
        if lost:  # training the others again would not help
            raise
        left = [run for run in group if run.id not in done]
        if len(group) == 1:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
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
    if len(group) == 1:
        _run_alone(task, loaded, group[0], recorder)
        return
    try:
        _run_together(task, loaded, group, recorder)
    except CannotStack:
        for run in group:
            _run_alone(task, loaded, run, recorder)


def _run_together(
    task: Task, loaded: LoadedTask, group: Sequence[PlannedRun], recorder: Callable[..., Recorder]
) -> None:
    watched, watch = _watching(group[0].spec)
    trainings: list[Training] = []
    for run in group:
        # One stack for all is made below: none for each. Watching needs all updates in one process.
        workers = 1 if watch else run.spec.settings.workers
        settings = replace(run.spec.settings, engine="one-by-one", workers=workers)
        training = task.training(settings, loaded)
        if trainings:  # one copy of the examples on a GPU, not one a run
            training.problem.examples = trainings[0].problem.examples
        trainings.append(training)
    callbacks: list[list[Callback]] = [
        [recorder(run, unprivate_quantiles=partial(_of_run, watched, number) if watch else None)]
        for number, run in enumerate(group)
    ]
    run_together(trainings, callbacks, unprivate_watch=watch)


def _run_alone(task: Task, loaded: LoadedTask, run: PlannedRun, recorder: Callable[..., Recorder]) -> None:
    watched, watch = _watching(run.spec)
    if watch is None:
        task.training(run.spec.settings, loaded).run([recorder(run)])
        return
    training = task.training(replace(run.spec.settings, workers=1), loaded)
    callbacks = [recorder(run, unprivate_quantiles=partial(_of_run, watched, 0))]
    drive([Run(training, callbacks)], SingleProcess(watch(training.trainer)))


def _watching(spec: RunSpec) -> tuple[list[UnprivateNorms], Callable[..., UnprivateNorms] | None]:
    """A place for what watches the updates, and what puts it there; None if nothing is to be watched."""
    watched: list[UnprivateNorms] = []

    def watch(trainer: Any) -> UnprivateNorms:
        watched[:] = [UnprivateNorms(trainer)]
        return watched[0]

    return watched, watch if spec.unprivate_quantiles else None


def _of_run(watched: list[UnprivateNorms], number: int) -> dict[int, list[float | None]]:
    return watched[0].of_run(number)


@contextmanager
def _quietly() -> Iterator[None]:
    """Runs of a study share seeds on purpose, to be compared: each guarantee is that of its run alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SharedNoiseWarning)
        yield
