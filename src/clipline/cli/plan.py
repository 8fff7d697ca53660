"""`clipline plan`: what a training would guarantee, what it takes to guarantee that, and whether it can work."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..console import say, spinner
from ..errors import RunError, SettingError, check_choice, refuse
from ..settings import SETTINGS, STAND_IN
from ..tasks import is_task_file, task_entry, task_names
from .parser import Command, Option, flags_for

if TYPE_CHECKING:
    from ..privacy.feasibility import NoiseTable
    from ..privacy.planning import Plan

ASKED = (  # the keyword arguments of `clipline.plan` that are settings
    "population_size", "cohort_size", "rounds", "epsilon", "noise_multiplier", "delta", "sampling", "relation",
    "count_stddev", "noise", "bands",
)  # fmt: skip


def plan(
    scale: str | None,
    config: Path | None,
    plot: Path | None,
    as_json: bool,
    explain: bool,
    parameters: int | None,
    model: str | None,
    **flags: Any,
) -> None:
    """Find the missing one of epsilon, noise multiplier, cohort size and rounds, or a table of them.

    Users and epsilon alone give a table, and all but one give a plan:

    clipline plan --users 20000 --epsilon 3

    clipline plan --users 1000000 --cohort 1000 --rounds 1500 --epsilon 4

    With --parameters P or --model FILE.py either says whether such a model can be trained, and what would help.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    settings = {**(_from_file(config, given, scale) if config else {}), **given}
    if model is not None:
        if parameters is not None:
            raise refuse("parameters", parameters, f"left out with model={model!r}, whose are counted", "drop one")
        settings["parameters"] = _parameters_of(model)
    elif parameters is not None:
        settings["parameters"] = parameters
    text = answer(settings, scale, plot, as_json, explain)
    if as_json:
        print(text)
    else:
        say(text)


def answer(settings: dict[str, Any], scale: str | None, plot: Path | None, as_json: bool, explain: bool = False) -> str:
    """The plan or the table as text or JSON, and as a figure if `plot` is given. `settings` are those of `plan`."""
    from ..privacy.planning import plan, plan_table

    if "population_size" not in settings:
        flag = SETTINGS["population_size"].flag
        raise SettingError(f"population_size is missing: give {flag}, the number of users in the population")
    if plot is not None and (plot.exists() or plot.suffix != ".png"):
        raise RunError(f"plot={str(plot)!r} must be a new file that ends in .png: give another name")
    missing = [name for name in ("cohort_size", "rounds") if name not in settings]
    if missing and scale is None and "epsilon" in settings and "noise_multiplier" not in settings:
        if plot is not None:
            flags = " and ".join(SETTINGS[name].flag for name in missing)
            raise refuse("plot", str(plot), "left out where a table is asked for", f"give {flags} for one plan")
        with spinner("searching", quiet=True):
            table = plan_table(**settings)
        return _shown(table, as_json, explain)
    with spinner("searching", quiet=True):
        result = plan(**settings, scale=None if scale is None else _parse_scale(scale))
    if plot is not None:
        _draw(result, plot)
    return _shown(result, as_json, explain)


def _shown(result: Plan | NoiseTable, as_json: bool, explain: bool) -> str:
    if as_json:
        return json.dumps(result.to_json(), allow_nan=False)
    from ..privacy.planning import Plan
    from .plan_text import plan_text, table_text

    return plan_text(result, explain) if isinstance(result, Plan) else table_text(result, explain)


def _parameters_of(model: str) -> Any:
    """How many parameters a task trains; of a file the shape of each, so that adapters can be counted."""
    if not is_task_file(model):
        return task_entry(check_choice("model", model, task_names())).parameters
    from ..tasks.task_file import own_model

    module, personal = own_model(model)
    tensors = dict(module.named_parameters())
    # What stays with its user is not released, and gets no noise.
    trained = [tuple(one.shape) for name, one in tensors.items() if one.requires_grad and name not in personal]
    if not trained:
        raise refuse("model", model, "one with a parameter to train", "let some parameters require a gradient")
    if len(trained) < len(tensors):  # partly frozen, such as adapters: no adapters on these
        from ..privacy.feasibility import count_parameters

        return count_parameters(trained)
    return trained


def _from_file(config: Path, flags: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """What a file of `clipline train` says of privacy, less what the flags ask for instead."""
    from ..privacy.relations import Relation
    from ..tasks.train_settings import check_given, merged, read_toml

    file = read_toml(config)
    check_given(file, f"config {str(config)!r}")
    asked = merged(file, flags)
    if "population_size" not in asked and asked.get("data", STAND_IN) != STAND_IN:
        asked["population_size"] = _users_in_store(str(asked["data"]), own=is_task_file(asked.get("task")))
        if asked.get("sampling", "poisson") == "poisson":
            asked.setdefault("relation", Relation.ZERO_OUT.value)  # the number of users is read from the data
    chosen = {key: value for key, value in asked.items() if key in ASKED}
    if scale is not None:
        chosen.pop("cohort_size", None)
        chosen.pop("noise_multiplier", None)
    return chosen


def _users_in_store(data: str, *, own: bool) -> int:
    """How many users a training would draw from: all of a store, or of one's `own` task those it does not test on."""
    from ..data.manifest import MANIFEST, read_manifest

    train = Path(data) / "train"
    if (train / MANIFEST).is_file():
        return read_manifest(train).users
    if Path(data).is_file():
        flag = SETTINGS["population_size"].flag
        raise SettingError(f"population_size is missing, and plan counts no users in the table {data!r}: give {flag}")
    if own:
        from ..tasks.task_file import users_of_store

        return users_of_store(data)
    return read_manifest(data).users


def _parse_scale(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"\s*m\s*=\s*(\d+)\s*,\s*z\s*=\s*([0-9.eE+-]+)\s*", text)
    try:
        if match:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    raise refuse("scale", text, "of the form m=100,z=0.03", "give the cohort size and the noise of the trial")


def _draw(result: Plan, path: Path) -> None:
    from ..plotting import new_figure, save_figure

    figure, (axis,) = new_figure(1, 1, width=7.5, height=4.2)
    axis.plot([rounds for rounds, _ in result.curve], [epsilon for _, epsilon in result.curve])
    axis.set(xlabel="rounds", ylabel=f"epsilon at delta {result.guarantee.delta_text}", ylim=(0, None), xlim=(0, None))
    axis.set_title(str(result.guarantee), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)


_path = click.Path(path_type=Path)
_option = partial(Option, group="The answer")
command = Command(
    "plan",
    callback=plan,
    help=plan.__doc__,
    groups=("The training", "The model", "The answer"),
    example="clipline plan --users 20000 --epsilon 3",
    params=[
        *flags_for(ASKED, group="The training", also={"population_size": "--users", "cohort_size": "--cohort"}),
        _option(["--config"], type=_path, group="The training", help="The same as TOML; flags override it."),
        _option(
            ["--scale"], metavar="TEXT", group="The training",
            help='"m=100,z=0.03": find the least multiple of both that reaches epsilon (the paper\'s third step).',
        ),
        _option(
            ["--parameters"], type=int, metavar="P", group="The model",
            help="How many are trained: says whether the noise lets them, and what would help.",
        ),
        _option(
            ["--model"], metavar="FILE.py|TASK", group="The model",
            help="Count them: of model() in a file (see docs/howto/own_model.md), or of a task.",
        ),
        _option(["--explain"], is_flag=True, help="A line of explanation below every line."),
        _option(["--plot"], type=_path, help="Draw epsilon over rounds to this PNG file."),
        _option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ],
)  # fmt: skip
