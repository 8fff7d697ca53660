"""`clipline train`: a task by name, or a Python file with a model and a loss, trained with user-level privacy."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ..errors import SettingError
from ..settings import GROUPS, RUN, SETTINGS
from ..tasks import DEFAULT_TASK, TASK_NAMES, task_named
from .parser import Argument, Command, Option, flags_for

if TYPE_CHECKING:
    from ..federated.round import TrainState
    from ..tasks.settings import TrainSettings
    from ..tasks.task import Task
    from ..training.directory_lock import DirectoryLock
    from ..training.reports import RoundReport

_OF_DATA = ("population_size", "test_users")  # what a file says of its own data


def train(
    task: str | None, config: Path | None, out: Path | None, resume: Path | None, as_json: bool, **flags: Any
) -> None:
    """Train a task with user-level differential privacy.

    Without arguments: handwriting of 40,000 drawn writers at epsilon 4, the clip tracking the median update norm.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if resume is None:
        run(*resolve(task, config, given), out, None, as_json)
        return
    if given.keys() - {"data", "workers"} or task or config or out:
        raise SettingError(
            f"resume={str(resume)!r} must stand alone (or with data or workers), its settings are stored: drop the rest"
        )
    with _locked(resume) as lock:  # before its settings are read
        run(*resolve(None, resume / "settings.toml", given, same_data=True), None, resume, as_json, lock)


def resolve(
    task: str | None, config: Path | None, flags: dict[str, Any], *, same_data: bool = False
) -> tuple[Task, TrainSettings]:
    """The task and its settings: defaults of the task, data at the default place, then the file, then the flags.

    Flags that name other data drop what the file says of its own, unless they are the `same_data` at another place.
    """
    from ..engine.parallel.torchrun import from_rank_0
    from ..tasks.own_task import is_task_file, own_task
    from ..tasks.settings import check_given, merged, read_toml
    from ..tasks.stores import find_store

    file = {} if config is None else read_toml(config)
    check_given(file, f"config {str(config)!r}")
    name = task or file.get("task", DEFAULT_TASK)
    # Two runs that were not told otherwise must not share their noise.
    seed = {"seed": from_rank_0(secrets.randbits(62))}
    if is_task_file(name):
        chosen = own_task(name, {**seed, **merged(file, flags)})
        return chosen, chosen.settings
    chosen = task_named(name)
    if "data" in flags and not same_data:
        for name in _OF_DATA if "data" in file else ("test_users",):
            file.pop(name, None)
    elif "data" not in flags and "data" not in file and (found := find_store(chosen.name)) is not None:
        file["data"] = str(found)
    settings = {**seed, **merged(file, flags), "task": chosen.name}
    return chosen, chosen.settings.overridden(settings, "the command line")


def _locked(path: Path) -> AbstractContextManager[DirectoryLock | None]:
    """The lock on a run directory; none on torchrun's ranks above 0, which write nothing."""
    from ..engine.parallel.torchrun import place
    from ..training.directory_lock import DirectoryLock

    rank = place()
    return DirectoryLock(path) if rank is None or rank.leads else nullcontext()


def run(
    task: Task,
    settings: TrainSettings,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    lock: DirectoryLock | None = None,
) -> None:
    """Load, check, make the directory, train, and print what came of it. `lock` is that on `resume`, if it is taken."""
    import torch

    from ..engine.choose import SMALL_MODEL
    from ..engine.parallel.torchrun import agree, from_rank_0, place
    from ..training.run_directory import RunDirectory, check_free
    from .progress import TrainProgress
    from .summary import summary, summary_json

    rank = place()
    if rank is not None:
        agree({**asdict(settings), "seed": "" if settings.seed == from_rank_0(settings.seed) else "another one"})
    if rank is not None and not rank.leads:
        task.training(settings).serve()
        _leave()
    path = resume or out or Path("runs") / time.strftime(f"{task.name}-%Y%m%d-%H%M%S")
    if resume is None:
        check_free(path)
    used = task.data_used(settings)
    print(f"preparing {used.title} ...", file=sys.stderr, flush=True)
    settings.compute().check_device()
    loaded = task.load(settings)
    metric_name = loaded.metric_name or task.metric_name
    training = task.training(settings, loaded)
    if training.algorithm.clients.flat.dim < SMALL_MODEL:
        torch.set_num_threads(1)
    workers = training.algorithm.workforce.size
    by = f" by {workers} workers" if workers > 1 else ""
    print(f"training {settings.rounds} rounds{by} for {training.planned}", file=sys.stderr, flush=True)
    if resume is None:
        directory, state = RunDirectory(path, settings, training), None
    else:
        directory, state = RunDirectory.reopen(path, settings, training, lock)
    progress = TrainProgress(settings.rounds, metric_name, 0 if state is None else state.round_index)

    def observe(report: RoundReport, after: TrainState) -> None:
        directory.write_round(report, after)
        progress.show(report, after)

    with directory:
        with progress:
            result = directory.charged(training.run(observe=observe, state=state), training)
        directory.finish(result, metric_name, used.kind, used.measured_on)
    if as_json:
        counted = not settings.stored or settings.population_size is None
        users = len(training.population) if counted else None
        print(json.dumps(summary_json(task, settings, used, result, metric_name, users, path)))
    else:
        print(summary(settings, used, result, metric_name, path))


def _leave() -> NoReturn:
    """End a rank above 0, which has nothing left to do or write. As Python ends, torch's threads may still abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_TASKS = (
    f"{', '.join(TASK_NAMES)}; or a Python file of your own with model() and loss(model, batch), trained on --data.  "
    f"[default: {DEFAULT_TASK}]"
)
_path = click.Path(path_type=Path)
_option = partial(Option, group=RUN)
command = Command(
    "train",
    callback=train,
    help=train.__doc__,
    groups=GROUPS,
    params=[
        Argument(["task"], required=False, help=_TASKS),
        *flags_for(name for name in SETTINGS if name != "task"),
        _option(["--config"], type=_path, help="Settings as TOML; flags override it."),
        _option(["--out"], type=_path, unset="runs/...", help="Run directory, new or empty."),
        _option(["--resume"], type=_path, help="Go on with an interrupted run directory."),
        _option(["--json", "as_json"], is_flag=True, help="End with one JSON object on standard output."),
    ],
)
