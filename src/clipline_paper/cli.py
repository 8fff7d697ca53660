"""`clipline reproduce`: the paper's figures and its table, from our own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clipline.cli import Argument, Command, Option, fail, flags_for, say, tell
from clipline.errors import CliplineError, RunError, SettingError, check_choice, refuse
from clipline.settings import SETTINGS, check
from clipline.tasks import DEFAULT_TASK, better_facts, is_task_file, lower_is_better

from .facts import ENTRIES, FACTS

if TYPE_CHECKING:
    from clipline.tasks import Task

    from .study.protocol import Protocol

WITHOUT_TRAINING = ("fig1", "fig2", "table1")
STUDIES = ("learning-rates", "fig3", "fig4", "fig5", "fig6", "fig7")
_OF_PROTOCOL = ("rounds", "cohort_size", "client_lr", "server_lr", "clip_start", "max_examples", "evaluate_every")
_OF_RUNS = ("device", "precision", "workers")
_GRID, _STUDY, _PLAIN = "Grids (the scale's unless given)", "The study", "fig1, fig2 and table1"


def reproduce(what: str, task: Sequence[str], scale: str, out: Path, seed: int, overwrite: bool, **flags: Any) -> None:
    """Make a figure or a table of the paper again: a picture, and the numbers as CSV.

    Figures 3 to 7 and learning-rates train: --out is a study directory, in which finished runs are kept. The same
    command goes on where it was stopped; more seeds, quantiles or rates add the runs that are new.
    """
    check_choice("what", what, (*WITHOUT_TRAINING, *STUDIES))
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    if what in STUDIES:
        if overwrite:
            raise refuse("overwrite", True, f"left out for {what}, which goes on with what is in --out", "drop it")
        _reproduce_study(what, _tasks(task), scale, out, given)
        return
    if task or given:
        name = sorted({*given, *(["task"] if task else [])})[0]
        raise refuse(name, given.get(name, ",".join(task)), f"left out for {what}, which trains nothing", "drop it")
    _reproduce_plain(what, out, seed, overwrite)


def _reproduce_plain(what: str, out: Path, seed: int, overwrite: bool) -> None:
    from .study import without_training

    if what == "table1":
        without_training.free(out / "table1.csv", overwrite)
        rows = without_training.table1(lambda task: tell(f"accounting {task} ..."))
        say(without_training.table1_text(rows))
        say(str(without_training.write_table1(out, rows, overwrite=overwrite)))
        return
    if what == "fig1":
        files = without_training.figure1(out, overwrite=overwrite)
    else:
        files = without_training.figure2(out, seed=seed, overwrite=overwrite)
        say(without_training.figure2_caption())
    for file in files:
        say(str(file))


def _reproduce_study(what: str, tasks: Sequence[str], scale: str, out: Path, given: dict[str, Any]) -> None:
    from clipline.study import StudyDirectory, StudyProgress, write_report

    from .study.experiments import STAGES
    from .study.recompute import reproduce

    for name in (*_OF_PROTOCOL, *_OF_RUNS):
        if name in given:
            check(name, given[name])
    data, cluster, column = (given.pop(name, None) for name in ("data", "cluster", "user_column"))
    changes = {name: given.pop(name) for name in _OF_RUNS if name in given}
    if column is not None and not any(is_task_file(task) for task in tasks):
        raise refuse("user_column", column, "left out where no task is a file of your own", "drop it")
    asked = [_asked(task, scale, data, column, given) for task in tasks]  # all are checked before the first is run
    failed: list[CliplineError] = []
    names = STAGES.get(what, ("",))
    stages = [", ".join(filter(None, (protocol.task, name))) for protocol, _, _ in asked for name in names]
    for place, (protocol, task, where) in enumerate(asked):
        try:
            reproduced = reproduce(
                what,
                protocol,
                out,
                task=task,
                changes={**changes, "data": where},
                cluster=cluster,
                progress=StudyProgress(what, stages, place * len(names), by_call=True),
            )
        except KeyboardInterrupt:
            kept = len(StudyDirectory(out).ids())
            again = "give the same command again, and none is repeated"
            tell(f"interrupted with {kept} finished runs in {out}: {again}")
            raise
        except CliplineError as error:
            if len(asked) == 1:
                raise
            fail(f"{what}, {protocol.task}: {error}")  # the other tasks go on
            failed.append(error)
            continue
        say(f"{what}, {protocol.task}, scale {scale}:")
        for line in reproduced.findings.summary:
            say(f"  {line}")
        for file in reproduced.files:
            say(str(file))
    if len(failed) < len(asked):
        say(str(write_report([out])))
    if failed:
        raise RunError(f"{what} of {len(failed)} of {len(asked)} tasks did not end, for the reasons above")


def _asked(
    name: str, scale: str, data: str | None, column: str | None, given: dict[str, Any]
) -> tuple[Protocol, Task | None, str | None]:
    """The protocol of a task, the task if it is a file's, and where its data are."""
    from .study.protocol import own_protocol, protocol_for
    from .study.recompute import data_for

    if not is_task_file(name):
        return protocol_for(name, scale, **given), None, data_for(name, data)
    from clipline.tasks import own_task

    # What a figure fixes itself: noise, cohorts of fixed size, and users counted in the data.
    of_figure = {"noise_multiplier": 0.0, "noise_source": "seed", "sampling": "fixed", "evaluate_on": "validation"}
    free = dict.fromkeys(("population_size", "max_epsilon", "count_stddev", "delta", "relation"))
    where: dict[str, Any] = {
        key: value for key, value in (("data", data), ("user_column", column)) if value is not None
    }
    smaller: dict[str, Any] = {key: given[key] for key in ("rounds", "cohort_size") if key in given}
    task = own_task(name, {"seed": 0, **of_figure, **free, **where, **smaller})
    metric = str(task.load(task.settings).metric_name)  # nobody knows it before the file has measured something
    given["own_lower"] = lower_is_better(metric, better_facts(task.better))
    return own_protocol(task.name, metric, task.settings, scale, **given), task, task.settings.data


def _tasks(words: Sequence[str]) -> list[str]:
    """The tasks that --task names: repeated, separated by commas, or `all` six of the paper."""
    names = [name.strip() for word in words for name in word.split(",") if name.strip()] or [DEFAULT_TASK]
    listed = [name for word in names for name in (FACTS if word == "all" else _named(word))]
    return list(dict.fromkeys(listed))


def _named(word: str) -> list[str]:
    return [word if is_task_file(word) else check_choice("task", word, _NAMED)]


_NAMED = (*ENTRIES, "all")


class _Numbers(click.ParamType):  # type: ignore[type-arg]  # no type arguments before click 8.4
    """Numbers separated by commas."""

    name = "X,X,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The numbers, or a refusal."""
        if not isinstance(value, str):
            return value
        try:
            return tuple(float(part) for part in value.split(","))
        except ValueError:
            name = (param.name if param else None) or "value"
            raise SettingError(f"{name}={value!r} must be numbers separated by commas: such as 0.1,0.5,0.9") from None


def _option(name: str, group: str, help: str, **options: Any) -> Option:
    return Option([name], group=group, help=help, **options)


command = Command(
    "reproduce",
    callback=reproduce,
    help=reproduce.__doc__,
    groups=(_STUDY, _GRID, "Computing", _PLAIN, "Options"),
    params=[
        Argument(
            ["what"],
            help="fig1 (the quantile losses), fig2 (the clip finds five quantiles), table1 (users for epsilon 5); "
            "learning-rates, fig3 (clipping without noise), fig4 (the clip while training), fig5 (adaptive clips and "
            "noise), fig6 (fixed clips and noise), fig7 (the median against the best fixed clip).",
        ),
        _option(
            "--task",
            _STUDY,
            f"{', '.join(ENTRIES)}, or all six of the paper, or a Python file of your own (see train); several with "
            "commas or by repeating.",
            multiple=True,
            metavar="T",
            unset=DEFAULT_TASK,
        ),
        _option(
            "--scale",
            _STUDY,
            "smoke (minutes on two cores), small (one GPU) or paper (the paper's own protocol).",
            default="smoke",
            metavar="smoke|small|paper",
            unset="smoke",
        ),
        _option("--data", _STUDY, "Prepared data of the task, or a folder with a store for each.", metavar="DIR"),
        *flags_for(["user_column"], _STUDY),
        _option(
            "--out",
            _STUDY,
            "Folder for pictures, tables and runs.",
            type=click.Path(path_type=Path),
            default=Path("reproduced"),
            unset="reproduced",
            metavar="DIR",
        ),
        _option("--original-splits", _STUDY, "Choose and report on the same users, as the original.", is_flag=True),
        _option("--cluster", _STUDY, "Run on a Ray cluster.", metavar="auto|ADDRESS"),
        _option("--seeds", _GRID, "Seeds of the final comparison (fig7).", type=int, metavar="N"),
        _option("--quantiles", _GRID, "Quantiles to follow.", type=_Numbers()),
        _option("--server-rates", _GRID, "Factors on the server rate where there is clipping.", type=_Numbers()),
        _option("--noises", _GRID, "Noise multipliers z at 100 users a round; 0 among them.", type=_Numbers()),
        _option("--average-over", _GRID, "Last rounds over which a metric is averaged.", type=int, metavar="N"),
        _option("--evaluate-every", _GRID, SETTINGS["evaluate_every"].help, type=int, metavar="N"),
        *flags_for([name for name in _OF_PROTOCOL if name != "evaluate_every"], _GRID),
        *flags_for(_OF_RUNS, "Computing"),
        _option("--seed", _PLAIN, "Seed of the simulated users (fig2).", type=int, default=0, unset="0"),
        _option("--overwrite", _PLAIN, "Replace files that are there.", is_flag=True),
    ],
)
