"""`clipline plan`: what a training would guarantee, or what it takes to guarantee that."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import RunError, SettingError, refuse
from ..settings import SETTINGS, STAND_IN
from .parser import Command, Option, flags_for

if TYPE_CHECKING:
    from ..privacy.planning import Plan

ASKED = (  # the keyword arguments of `clipline.plan` that are settings
    "population_size", "cohort_size", "rounds", "epsilon", "noise_multiplier", "delta", "sampling", "relation",
    "count_stddev",
)  # fmt: skip


def plan(scale: str | None, config: Path | None, plot: Path | None, as_json: bool, **flags: Any) -> None:
    """Find the missing one of epsilon, noise multiplier, cohort size and rounds.

    Give all but one: clipline plan --population-size 1000000 --cohort-size 1000 --rounds 1500 --epsilon 4
    """
    given = {name: value for name, value in flags.items() if value is not None}
    settings = {**(_from_file(config, given, scale) if config else {}), **given}
    click.echo(answer(settings, scale, plot, as_json))


def answer(settings: dict[str, Any], scale: str | None, plot: Path | None, as_json: bool) -> str:
    """The plan as text or JSON, and as a figure if `plot` is given. `settings` are those of `clipline.plan`."""
    from ..privacy.planning import plan

    if "population_size" not in settings:
        flag = SETTINGS["population_size"].flag
        raise SettingError(f"population_size is missing: give {flag}, the number of users in the population")
    if plot is not None and (plot.exists() or plot.suffix != ".png"):
        raise RunError(f"plot={str(plot)!r} must be a new file that ends in .png: give another name")
    with _patience():
        result = plan(**settings, scale=None if scale is None else _parse_scale(scale))
    if plot is not None:
        _draw(result, plot)
    return json.dumps(result.to_json(), allow_nan=False) if as_json else str(result)


def _from_file(config: Path, flags: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """What a file of `clipline train` says of privacy, less what the flags ask for instead."""
    from ..privacy.relations import Relation
    from ..tasks.settings import check_given, merged, read_toml

    file = read_toml(config)
    check_given(file, f"config {str(config)!r}")
    asked = merged(file, flags)
    if "population_size" not in asked and asked.get("data", STAND_IN) != STAND_IN:
        asked["population_size"] = _users_in_store(str(asked["data"]))
        if asked.get("sampling", "poisson") == "poisson":
            asked.setdefault("relation", Relation.ZERO_OUT.value)  # the number of users is read from the data
    chosen = {key: value for key, value in asked.items() if key in ASKED}
    if scale is not None:
        chosen.pop("cohort_size", None)
        chosen.pop("noise_multiplier", None)
    return chosen


def _users_in_store(data: str) -> int:
    """How many users there are in the store that a training would read."""
    from ..data.manifest import MANIFEST, read_manifest

    train = Path(data) / "train"
    return read_manifest(train if (train / MANIFEST).is_file() else data).users


@contextmanager
def _patience() -> Iterator[None]:
    """Say on standard error that a search is still on, after one second and then every two; most end before."""
    done = threading.Event()

    def tell() -> None:
        seconds = 1
        while not done.wait(1 if seconds == 1 else 2):
            print(f"searching, {seconds} s so far ...", file=sys.stderr, flush=True)
            seconds += 2

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


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
    groups=("The training", "The answer"),
    params=[
        *flags_for(ASKED, group="The training"),
        _option(["--config"], type=_path, group="The training", help="The same as TOML; flags override it."),
        _option(
            ["--scale"],
            metavar="TEXT",
            group="The training",
            help='"m=100,z=0.03": find the least multiple of both that reaches epsilon (the paper\'s third step).',
        ),
        _option(["--plot"], type=_path, help="Draw epsilon over rounds to this PNG file."),
        _option(["--json", "as_json"], is_flag=True, help="Print one JSON object."),
    ],
)
