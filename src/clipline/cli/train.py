"""`clipline train`: a task by name, or a Python file with a model and a loss, trained with user-level privacy."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import console
from ..errors import CliplineError, RunError, SettingError, nearest, refuse
from ..metric_direction import better_facts, lower_is_better
from ..settings import GROUPS, RUN, SETTINGS
from ..tasks import DEFAULT_TASK, file_and_name, is_task_file, task_named, task_names
from .parser import PATH, Argument, Command, Option, flags_for

if TYPE_CHECKING:
    from ..data.task_stores import DataUsed
    from ..federated.round import TrainState
    from ..privacy.guarantee import Guarantee
    from ..tasks.task import Task
    from ..tasks.train_settings import TrainSettings
    from ..training.durable import DirectoryLock
    from ..training.evaluation import EarlyStopping, EvaluateModel
    from ..training.result import TrainResult
    from ..training.training import Training

_WHERE_DATA_ARE = ("data", "user_column", "test_users", "evaluate_on")  # no model depends on these
_OF_DATA = ("population_size", "test_users")  # what a file says of its own data


def train(
    task: str | None,
    config: Path | None,
    model: str | None,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    tensorboard: bool,
    no_report: bool,
    **flags: Any,
) -> int:
    """Train a task with user-level differential privacy.

    Without arguments: handwriting of 40,000 drawn writers at epsilon 4, the clip tracking the median update norm.
    Ctrl-C or SIGTERM ends after the round, with exit code 130; --resume goes on.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if model is not None:
        if task is not None or not is_task_file(model):
            raise refuse("model", model, "the file FILE.py of a task, in the place of TASK", "give one of the two")
        task = model
    if resume is None:
        if task is None and config is not None:
            _refuse_unnamed(config, str(config), f"--config {shlex.quote(str(config))}")
        return run(*resolve(task, config, given), out, None, as_json, tensorboard=tensorboard, report=not no_report)
    if given.keys() - {"data", "workers"} or config or out:
        raise SettingError(
            f"resume={str(resume)!r} must stand alone (or with the task's file, data or workers), its settings are "
            "stored: drop the rest"
        )
    with _locked(resume) as lock:  # before its settings are read
        _check_named(task, resume, " --tensorboard" * tensorboard + " --no-report" * no_report)
        chosen = resolve(task, resume / "settings.toml", given, same_data=True)
        return run(*chosen, None, resume, as_json, lock, tensorboard=tensorboard, report=not no_report)


def _check_named(task: str | None, run: Path, flags: str) -> None:
    """Refuse to run a Python file because a run directory names it: whoever wrote the directory chose that name.

    The checksum beside it proves nothing either, as the same hand wrote it. A file that is named may lie elsewhere now,
    or be named from another folder: that its code is the same is checked with the checkpoint.
    """
    from ..tasks.train_settings import read_toml

    settings = read_toml(run / "settings.toml")
    if "local" in settings:  # as a `Training` writes it
        raise RunError(
            f"resume={str(run)!r} was made by a program, which has its model and data: go on there, with "
            f"training.resume({str(run)!r})"
        )
    stored = str(settings.get("task", DEFAULT_TASK))
    if task is not None and _file_name(task) != _file_name(stored):
        raise refuse("task", task, f"{stored!r}, which the run in {str(run)!r} was made with", "give that")
    if task is None:
        _refuse_unnamed(run / "settings.toml", str(run), f"--resume {shlex.quote(str(run))}{flags}")


def _refuse_unnamed(settings: Path, where: str, flags: str) -> None:
    """Refuse to run a Python file that only these settings name: whoever wrote them chose that name."""
    from ..tasks.train_settings import read_toml

    stored = str(read_toml(settings).get("task", DEFAULT_TASK))
    if is_task_file(stored):
        raise RunError(
            f"the model of {where!r} is defined in the file {stored[:200]!r}, and no code is run that you have not "
            f"named: read that file, then clipline train {shlex.quote(stored[:200])} {flags}"
        )


def _file_name(task: str) -> str:
    """A task without the folder of its file: `some/rides.py:wide` is rides.py:wide."""
    if not is_task_file(task):
        return task
    path, name = file_and_name(task)
    return ":".join([Path(path).name, *([name] if name else [])])


def resolve(
    task: str | None, config: Path | None, flags: dict[str, Any], *, same_data: bool = False
) -> tuple[Task, TrainSettings]:
    """The task and its settings: defaults of the task, data at the default place, then the file, then the flags.

    Flags that name other data drop what the file says of its own, unless they are the `same_data` at another place.
    """
    from ..data.task_stores import find_store
    from ..engine.workers.torchrun import from_rank_0
    from ..tasks.task_file import own_task
    from ..tasks.train_settings import check_given, merged, read_toml

    file = {} if config is None else read_toml(config)
    check_given(file, f"config {str(config)!r}")
    name = task or file.get("task", DEFAULT_TASK)
    given = merged(file, flags)
    if "seed" not in given and given.get("noise_source") == "seed":
        hint = "give --seed 7, or leave --noise-source out"
        raise SettingError("seed is missing, from which noise_source='seed' draws", hint)
    # Without a seed the noise is the system's, and what is drawn here decides the initial model alone.
    drawn = {} if "seed" in given else {"seed": from_rank_0(secrets.randbits(31)), "noise_source": "system"}
    if is_task_file(name):
        chosen = own_task(name, {**drawn, **given})
        return chosen, chosen.settings
    chosen = task_named(name)
    if "data" in flags and not same_data:
        for name in _OF_DATA if "data" in file else ("test_users",):
            file.pop(name, None)
    elif "data" not in flags and "data" not in file and (found := find_store(chosen.name)) is not None:
        file["data"] = str(found)
    settings = {**drawn, **merged(file, flags), "task": chosen.name}
    return chosen, chosen.settings.overridden(settings, "the command line")


def _locked(path: Path) -> AbstractContextManager[DirectoryLock | None]:
    """The lock on a run directory; none on torchrun's ranks above 0, which write nothing."""
    from ..engine.workers.torchrun import torchrun_rank
    from ..training.durable import DirectoryLock

    rank = torchrun_rank()
    return DirectoryLock(path) if rank is None or rank.leads else nullcontext()


def run(
    task: Task,
    settings: TrainSettings,
    out: Path | None,
    resume: Path | None,
    as_json: bool,
    lock: DirectoryLock | None = None,
    *,
    tensorboard: bool = False,
    report: bool = False,
) -> int:
    """Load, check, make the directory, train, and print what came of it. `lock` is that on `resume`, if it is taken.

    Gives the exit code: 130 where Ctrl-C left rounds undone, so that `train && predict` stops there.
    """
    import torch

    from ..engine.choose import SMALL_MODEL
    from ..engine.workers.torchrun import agree, from_rank_0, torchrun_rank
    from ..training.callbacks import Callback, StopOnInterrupt, TensorBoard
    from ..training.evaluation import Evaluate
    from ..training.progress import Progress
    from ..training.run_directory import RunDirectory, check_free
    from ..trust.verify import seal

    rank = torchrun_rank()
    if rank is not None:
        agree({**asdict(settings), "seed": "" if settings.seed == from_rank_0(settings.seed) else "another one"})
    if rank is not None and not rank.leads:
        task.training(settings).serve()
        _leave()
    path = resume or out or Path("runs") / time.strftime(f"{task.name}-%Y%m%d-%H%M%S")
    if resume is None:
        check_free(path, "out")
    boards = [TensorBoard(path, unprivate_timing=settings.unprivate_timing)] if tensorboard else []
    used = task.data_used(settings)
    settings.compute().check_device()
    with console.spinner(f"preparing {used.title}"):
        loaded = task.load(settings)
    metric = loaded.metric_name or task.metric_name
    training = task.training(settings, loaded)
    if training.dim < SMALL_MODEL:
        torch.set_num_threads(1)
    users = len(training.population) if not settings.stored or settings.population_size is None else None  # public
    on = "" if users is None else f" on {users:,} users"
    by = f" by {training.workers} workers" if training.workers > 1 else ""
    announced = (
        f"training {settings.rounds} rounds{on}{by} for {training.planned}\n"
        f"run directory {path}; follow it with  clipline report --live {path}"
    )

    class Announce(Callback):
        """Says what begins, once nothing has refused it."""

        def on_start(self, training: Training, state: TrainState) -> None:
            console.tell(announced)
            if done := state.round_index:
                charged = max(state.ledger, directory.charged, key=lambda ledger: ledger.rounds)
                spent = f"; what was released so far spent epsilon {training.guarantee_of(charged).epsilon_text}"
                was = spent if training.planned.private else ""
                anew = (
                    "" if settings.early_stopping is None else "; the best is sought among the rounds after the resume"
                )
                console.tell(f"going on after {done} of {settings.rounds} rounds{was}{anew}")

    facts = _facts(task, settings, used, metric, loaded.baseline)
    directory = RunDirectory(
        path,
        facts=facts,
        metric=metric,
        checkpoint_every=settings.measured_every,
        unprivate_timing=settings.unprivate_timing,
        settings=settings.to_toml(),
        same=_must_be_same(task, settings),
        task=_code_of(task, settings),
        lock=lock,
    )
    measuring = Evaluate(loaded.evaluate, every=settings.measured_every)
    if settings.early_stopping not in (None, metric):
        _check_early_stopping(str(settings.early_stopping), loaded.evaluate, training)
    stopping = [] if settings.early_stopping is None else [_early_stopping(settings.early_stopping, task)]
    callbacks = [directory, Announce(), measuring, *stopping, Progress(metric), *boards, StopOnInterrupt()]
    result = training.run(callbacks) if resume is None else training.resume(path, callbacks)
    page = _write_report(path) if report else None
    sealed = None if result.stopped == "interrupted" else seal(path)
    if as_json:
        print(json.dumps({**_summary_json(task, settings, used, result, metric, users, path, page), "seal": sealed}))
    else:
        flags = " --tensorboard" * tensorboard + " --no-report" * (not report)
        console.say(_summary(settings, used, result, metric, path, page, training.planned, flags, sealed))
    return 130 if result.stopped == "interrupted" else 0


def _summary(
    settings: TrainSettings, used: DataUsed, result: TrainResult, metric_name: str, path: Path, report: Path | None,
    planned: Guarantee, flags: str, sealed: str | None,
) -> str:  # fmt: skip
    """Warnings, then what to quote: result, data, guarantee, clip, files, and last the path of the report.

    Of an interrupted run also what was `planned`, which holds whatever made somebody stop, and how to go on, with the
    `flags` that no file stores.
    """
    from ..training.diagnosis import LAST

    own, promise, best = is_task_file(settings.task), result.guarantee, result.best
    warned = [str(finding) for finding in result.findings]
    if promise.private and _seed_guessable(settings):
        warned.append(f"not private: cohorts and noise come from seed {settings.seed}, which is easily guessed")
    part = "" if settings.evaluate_on in (None, "original") else f" ({settings.evaluate_on})"
    rows = [("result", f"{metric_name} {result.metrics[metric_name]:.4f} on {used.measured_on}{part}")]
    if best is not None and best.best != best.last:
        after = f"after {best.best_rounds} rounds, last {best.last:.4f} after {best.last_rounds}"
        rows.append(("best", f"{best.metric} {best.best:.4f} {after}"))
    if result.has_average:
        of_last = result.metrics.get(LAST + metric_name)
        rows.append(("saved", result.saved + ("" if of_last is None else f"; the last one has {of_last:.4f}")))
    beside = [
        f"{name} {value:.4f}" for name, value in result.metrics.items()
        if name not in (metric_name, "loss") and not name.startswith(LAST)
    ]  # fmt: skip
    rows += [("beside it", ", ".join(beside))] if beside else []  # such as what would do without a model
    if used.kind == "stand-in":
        rows.append(("data", "a stand-in, generated; not comparable with results on the original data set"))
    elif used.source is not None:
        alike = used.kind == "original" or own  # a task of one's own has no original
        other = "" if alike else "; not comparable with results on the original data set"
        rows.append(("data", f"{used.kind}, {used.source}{other}"))
    rows.append(("guarantee", str(promise)))
    if sealed is not None:
        rows.append(("seal", f"{sealed} (note it elsewhere, for clipline verify --seal)"))
    if promise.private and settings.noise_source == "seed":
        rows.append(("seed", "cohorts and noise come from it: keep it secret, or leave --seed out"))
    clip = "none" if settings.clip == "none" else f"{settings.controller().init().clip:.3g} -> {_last_clip(result):.3g}"
    tracked = f", tracking quantile {settings.quantile:g} of the update norms" if settings.clip == "quantile" else ""
    rows.append(("clip", clip + tracked))
    if result.stopped == "budget":
        rows.append(("stopped", f"after {promise.rounds} rounds: the next one would have passed the budget"))
    if result.stopped == "early":
        done = f"after {result.state.round_index} of {settings.rounds} rounds, all of which are charged"
        rows.append(("stopped", f"early {done}; the model is that after {result.model_rounds}"))
    if result.stopped == "interrupted":
        named = f"{shlex.quote(settings.task)} " if own else ""  # no code runs that is not named
        rows.append(("resume", f"clipline train {named}--resume {path}{_moved_data(settings, path)}{flags}"))
        if promise.private and planned.epsilon > promise.epsilon:
            rows.append(("planned", f"{planned}; quote this if you stopped because of what you saw"))
    rows.append(("files", f"in {path}: {', '.join(sorted(file.name for file in path.iterdir()))}"))
    rows += [] if report is None else [("report", str(report))]
    return "\n".join([*(f"warning: {text}" for text in warned), console.aligned(rows)])


def _moved_data(settings: TrainSettings, path: Path) -> str:
    """The flag that names the data, where these lie elsewhere than the run directory says."""
    from ..tasks.train_settings import read_toml

    stored = read_toml(path / "settings.toml").get("data")
    return "" if settings.data is None or settings.data == stored else f" --data {shlex.quote(settings.data)}"


def _last_clip(result: TrainResult) -> float:
    """The clip of the last round, as metrics.jsonl and the report have it; before the first, that of the first."""
    return result.reports[-1].clip if result.reports else result.state.clip.clip


def _summary_json(
    task: Task,
    settings: TrainSettings,
    used: DataUsed,
    result: TrainResult,
    metric_name: str,
    users: int | None,
    path: Path,
    report: Path | None = None,
) -> dict[str, Any]:
    """The same for programs; epsilon is null where there is no guarantee, `users` where their number is private.

    The seed is told only where it makes the epsilon void: what programs print is kept in logs, and other runs may have
    the same one. It stands in the run directory.
    """
    from ..training.run_files import finite_or_none

    guarantee = result.guarantee
    return {
        "task": task.name,
        "data": used.kind,
        "data_source": used.source,
        "measured_on": used.measured_on,
        "evaluate_on": settings.evaluate_on,
        "metric": result.metrics[metric_name],
        "metric_name": metric_name,
        "metrics": {name: finite_or_none(value) for name, value in result.metrics.items()},
        "epsilon": finite_or_none(guarantee.epsilon),
        "delta": guarantee.delta,
        "relation": str(guarantee.relation),
        "sampler": guarantee.sampler,
        "accountant": guarantee.accountant,
        "private": guarantee.private and not _seed_guessable(settings),
        "guarantee": str(guarantee),
        "rounds": guarantee.rounds,
        "clip": finite_or_none(_last_clip(result)),
        "stopped": result.stopped,
        "findings": [asdict(finding) for finding in result.findings],
        "best": None if result.best is None else asdict(result.best),
        "model_rounds": result.model_rounds,
        "saved": result.saved,
        "users": users,
        "population_size": settings.population_size,
        "cohort_size": settings.cohort_size,
        "seed": settings.seed if not guarantee.private or _seed_guessable(settings) else None,
        "run_dir": str(path),
        "report": None if report is None else str(report),
    }


def _seed_guessable(settings: TrainSettings) -> bool:
    """Whether the noise comes from a seed that somebody may try."""
    from ..random.streams import GUESSABLE

    return settings.noise_source == "seed" and settings.seed < GUESSABLE


def _facts(task: Task, settings: TrainSettings, used: DataUsed, metric: str, baseline: float | None) -> dict[str, str]:
    """What the run is about, as it is stored beside it."""
    facts = {"task": task.name, "data": used.kind, "measured_on": used.measured_on}
    facts |= better_facts(task.better)
    said = None if baseline is None else f"{baseline:.6g}"
    known = {"data_source": used.source, "data_checksum": used.checksum, "metric": metric, "baseline": said}
    return facts | {name: value for name, value in known.items() if value is not None}


def _early_stopping(metric: str, task: Task) -> EarlyStopping:
    """Stops by this metric, in the direction that the task says, and gives the best model."""
    from ..training.evaluation import EarlyStopping

    lower = lower_is_better(metric, better_facts(task.better))
    return EarlyStopping(metric, mode="min" if lower else "max", restore_best=True)


def _check_early_stopping(metric: str, evaluate: EvaluateModel, training: Training) -> None:
    """Refuse a metric that the task does not measure: the initial model is measured to know the names."""
    import torch

    from ..engine.isolation.generators import preserve_generators, preserve_torch_generators

    model = training.problem.model.evaluated(training.init().params).eval()
    with torch.no_grad(), preserve_generators(), preserve_torch_generators(training.device):
        names = list(evaluate(model))
    if metric not in names:
        raise refuse("early_stopping", metric, f"one of {', '.join(names)}", nearest(metric, names))


def _write_report(path: Path) -> Path | None:
    """The run's report.html; the training stands even where it cannot be written."""
    from ..study.report import write_report

    try:
        return write_report([path])
    except (CliplineError, OSError) as error:
        console.tell(f"warning: no report was written: {error}")
        return None


def _must_be_same(task: Task, settings: TrainSettings) -> dict[str, Any]:
    """What a resumed run must agree in, beyond what the training itself knows: options of the task and its code."""
    free = ("workers", "data", "unprivate_timing", "seed")
    chosen = {name: value for name, value in asdict(settings).items() if name not in free}
    name = _file_name(settings.task)
    return {**chosen, "task": name, f"code of {name.partition(':')[0]}": task.code}


def _code_of(task: Task, settings: TrainSettings) -> dict[str, Any]:
    """Where the model's code is, for `clipline.load`: a task's name and its options, or a file and its checksum."""
    kept = [name for name in SETTINGS if SETTINGS[name].some_tasks and name not in _WHERE_DATA_ARE]
    options = {name: value for name in kept if (value := getattr(settings, name)) is not None}
    return {"name": settings.task, "code": task.code, "options": options}


def _leave() -> NoReturn:
    """End a rank above 0, which has nothing left to do or write. As Python ends, torch's threads may still abort it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


_TASKS = (
    f"{', '.join(task_names())}; or a Python file of your own with model() and loss(model, batch), trained on --data: "
    f"FILE.py, or FILE.py:name for one of several in it; clipline new-task writes one.  [default: {DEFAULT_TASK}]"
)
_option = partial(Option, group=RUN)
command = Command(
    "train",
    train,
    [
        Argument(["task"], required=False, help=_TASKS),
        *flags_for((name for name in SETTINGS if name != "task"), also={"population_size": "--users"}),
        _option(["--config"], type=PATH, help="Settings as TOML; flags override it."),
        _option(["--model"], metavar="FILE.py", help="The same as TASK; a file that only --config names is not run."),
        _option(["--out"], type=PATH, unset="runs/...", help="Run directory, new or empty."),
        _option(["--resume"], type=PATH, help="Go on with an interrupted run directory."),
        _option(["--tensorboard"], is_flag=True, help="Write TensorBoard's event files into the run directory too."),
        _option(["--no-report"], is_flag=True, help="Do not write report.html at the end."),
        _option(["--json", "as_json"], is_flag=True, help="End with one JSON object on standard output."),
    ],
    groups=GROUPS,
    first=(
        "data", "user_column", "population_size", "epsilon", "rounds", "cohort_size", "client_lr", "seed", "config",
        "out", "resume",
    ),
)  # fmt: skip
