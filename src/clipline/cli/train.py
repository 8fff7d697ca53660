"""`clipline train`: a task by name, privately, with a clip nobody chose."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ..errors import SettingError
from ..tasks import DEFAULT_TASK, TASK_NAMES, task_named

if TYPE_CHECKING:
    from ..federated.round import TrainState
    from ..tasks.settings import TrainSettings
    from ..tasks.task import Task
    from ..training.directory_lock import DirectoryLock
    from ..training.reports import RoundReport

_WHAT = "What to train"
_PRIVACY = "Privacy"
_RUN = "The run"
# What limits each other is set together: a cohort that is too large for some users may be right for others.
_JOINT = ("data", "users", "test_users", "population_size", "cohort")


def train(
    task: Annotated[
        str | None, typer.Argument(help=f"The task: {', '.join(TASK_NAMES)}.", show_default=DEFAULT_TASK)
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Settings as TOML; flags override it.", rich_help_panel=_RUN)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of training.", rich_help_panel=_WHAT)] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder made by clipline data prepare TASK, or stand-in, to generate users.",
            show_default="what is in CLIPLINE_DATA or clipline-data, else stand-in",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    users: Annotated[int | None, typer.Option(help="Users in a generated population.", rich_help_panel=_WHAT)] = None,
    classes: Annotated[
        int | None, typer.Option(help="Classes in a generated population.", rich_help_panel=_WHAT)
    ] = None,
    test_users: Annotated[
        int | None, typer.Option(help="Users to measure on, outside a generated population.", rich_help_panel=_WHAT)
    ] = None,
    evaluate_on: Annotated[
        str | None,
        typer.Option(
            help="validation or test (disjoint halves of the test users), or original (all of them).",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    client_lr: Annotated[float | None, typer.Option(help="Learning rate of users.", rich_help_panel=_WHAT)] = None,
    server_lr: Annotated[float | None, typer.Option(help="Learning rate of the server.", rich_help_panel=_WHAT)] = None,
    cohort: Annotated[
        int | None, typer.Option(help="Users a round (expected number under Poisson).", rich_help_panel=_PRIVACY)
    ] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson or fixed.", rich_help_panel=_PRIVACY)] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            help="quantile (adapts by itself), fixed (the task's value), a number, or none.", rich_help_panel=_PRIVACY
        ),
    ] = None,
    quantile: Annotated[
        float | None, typer.Option(help="Which quantile of the update norms to track.", rich_help_panel=_PRIVACY)
    ] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option(
            help="Noise z of a whole round; 0 is not private. Instead of --epsilon.", rich_help_panel=_PRIVACY
        ),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(help="Epsilon to spend on all rounds; the noise follows.", rich_help_panel=_PRIVACY),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta; (number of users)^-1.1 if left out.", rich_help_panel=_PRIVACY)
    ] = None,
    population_size: Annotated[
        int | None,
        typer.Option(
            help="Declare how many users there are, a public number that is not read from the data: the rate and delta "
            "follow from it, and the guarantee is for add-or-remove.",
            show_default="--users where they are generated; none with --data DIR, and the guarantee is for zero-out",
            rich_help_panel=_PRIVACY,
        ),
    ] = None,
    max_epsilon: Annotated[
        float | None, typer.Option(help="Stop before the round that would pass this.", rich_help_panel=_PRIVACY)
    ] = None,
    noise_source: Annotated[
        str | None,
        typer.Option(
            help="seed (replayable; keep the seed secret) or system (for a model that leaves the house).",
            rich_help_panel=_PRIVACY,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of all randomness.", show_default="drawn, and stored", rich_help_panel=_RUN)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory, new or empty.", show_default="runs/...", rich_help_panel=_RUN)
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with an interrupted run directory.", rich_help_panel=_RUN)
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_RUN)] = None,
    engine: Annotated[
        str | None, typer.Option(help="auto, one-by-one or stacked (many users at once).", rich_help_panel=_RUN)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="float32, tf32 or bf16, of local training alone.", rich_help_panel=_RUN)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the users among them; torchrun brings more machines.",
            show_default="one a core; 1 with a GPU",
            rich_help_panel=_RUN,
        ),
    ] = None,
    unprivate_timing: Annotated[
        bool | None,
        typer.Option(
            "--unprivate-timing",
            help="Store how long each round took, which tells who took part.",
            show_default=False,
            rich_help_panel=_RUN,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="End with one JSON object on standard output.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Train a task with user-level differential privacy.

    Without arguments: handwriting of 40,000 drawn writers at epsilon 4, the clip tracking the median update norm.
    """
    flags = {
        "rounds": rounds, "data": data, "users": users, "classes": classes, "test_users": test_users,
        "evaluate_on": evaluate_on,
        "client_lr": client_lr, "server_lr": server_lr, "cohort": cohort, "sampling": sampling,
        "clip": _clip(clip), "quantile": quantile,
        "noise_multiplier": noise_multiplier, "epsilon": epsilon, "delta": delta, "max_epsilon": max_epsilon,
        "population_size": population_size, "noise_source": noise_source, "seed": seed, "device": device,
        "engine": engine, "precision": precision, "workers": workers, "unprivate_timing": unprivate_timing,
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    if noise_multiplier is not None and epsilon is not None:
        raise SettingError(
            f"{noise_multiplier=} and {epsilon=} are both given but one follows from the other: drop one"
        )
    if resume is None:
        run(*resolve(task, config, given), out, None, as_json)
        return
    if given.keys() - {"data", "workers"} or task or config or out:
        raise SettingError(
            f"resume={str(resume)!r} must stand alone (or with data or workers), its settings are stored: drop the rest"
        )
    with _locked(resume) as lock:  # before its settings are read
        run(*resolve(None, resume / "settings.toml", given), None, resume, as_json, lock)


def resolve(task: str | None, config: Path | None, flags: dict[str, Any]) -> tuple[Task, TrainSettings]:
    """The task and its settings: defaults of the task, data at the default place, then the file, then the flags."""
    from ..data.task_stores import find_store
    from ..engine.parallel.torchrun import from_rank_0
    from ..tasks.settings import read_toml

    file = {} if config is None else read_toml(config)
    chosen = task_named(task or file.get("task", DEFAULT_TASK))
    # Two runs that were not told otherwise must not share their noise.
    seed = {"seed": from_rank_0(secrets.randbits(62))}
    joint: dict[str, Any] = {key: file.pop(key) for key in _JOINT if key in file}
    if "data" in flags:
        of_data = ("users", "test_users", *(("population_size",) if "data" in joint else ()))
        joint = {key: value for key, value in joint.items() if key not in of_data}  # other data have other users
    elif "data" not in joint and (found := find_store(chosen.name)) is not None:
        joint["data"] = str(found)
    settings = chosen.settings.overridden({**seed, **file, "task": chosen.name}, f"config {str(config)!r}")
    return chosen, settings.overridden({**joint, **flags}, "the command line")


def _locked(path: Path) -> AbstractContextManager[DirectoryLock | None]:
    """The lock on a run directory; none on torchrun's ranks above 0, which write nothing."""
    from ..engine.parallel.torchrun import torchrun_rank
    from ..training.directory_lock import DirectoryLock

    mine = torchrun_rank()
    return DirectoryLock(path) if mine is None or mine.leads else nullcontext()


def run(
    task: Task,
    settings: TrainSettings,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    lock: DirectoryLock | None = None,
) -> None:
    """Load, check, make the directory, train, and say what came of it. `lock` is that on `resume`, if it is taken."""
    import torch

    from ..data.task_stores import data_used
    from ..engine.choose import SMALL_MODEL
    from ..engine.parallel.torchrun import agree, from_rank_0, torchrun_rank
    from ..training.run_directory import RunDirectory, check_free
    from .progress import TrainProgress
    from .summary import summary, summary_json

    mine = torchrun_rank()
    if mine is not None:
        agree({**asdict(settings), "seed": "" if settings.seed == from_rank_0(settings.seed) else "another one"})
    if mine is not None and not mine.leads:
        task.training(settings).serve()
        _leave()
    path = resume or out or Path("runs") / time.strftime(f"{task.name}-%Y%m%d-%H%M%S")
    if resume is None:
        check_free(path)
    used = data_used(task.name, task.data, task.title.format(users=f"{settings.users:,}"), settings.data)
    print(f"preparing {used.title} ...", file=sys.stderr, flush=True)
    training = task.training(settings)
    if training.algorithm.clients.flat.dim < SMALL_MODEL:
        torch.set_num_threads(1)
    workers = training.algorithm.workforce.size
    by = f" by {workers} workers" if workers > 1 else ""
    print(f"training {settings.rounds} rounds{by} for {training.planned}", file=sys.stderr, flush=True)
    if resume is None:
        directory, state = RunDirectory(path, settings, training), None
    else:
        directory, state = RunDirectory.reopen(path, settings, training, lock)
    progress = TrainProgress(settings.rounds, task.metric_name, 0 if state is None else state.round_index)

    def observe(report: RoundReport, after: TrainState) -> None:
        directory.write_round(report, after)
        progress.show(report, after)

    with directory:
        with progress:
            result = directory.charged(training.run(observe=observe, state=state), training)
        directory.finish(result, task.metric_name, used.kind, used.measured_on)
    if as_json:
        print(json.dumps(summary_json(task, settings, used, result, path)))
    else:
        print(summary(task, settings, used, result, path))


def _leave() -> NoReturn:
    """End a rank above 0, which has nothing left to do or write. As Python ends, torch's threads may still abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _clip(text: str | None) -> str | float | None:
    """A number where it reads as one, else the word."""
    try:
        return text if text is None else float(text)
    except ValueError:
        return text
