"""`clipline plan`: what a training would guarantee, or what it takes to guarantee that, in a blink."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import RunError, SettingError, nearest, refuse

_KEYS = ("users", "cohort", "rounds", "epsilon", "noise_multiplier", "delta", "sampling", "count_stddev", "relation")


def plan(
    users: Annotated[int | None, typer.Option(help="Users in the population, N.")] = None,
    cohort: Annotated[int | None, typer.Option(help="Users a round, M (expected number under Poisson).")] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds, T.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="The epsilon to stay within.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Noise z of a whole round.")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta.", show_default="N^-1.1")] = None,
    sampling: Annotated[str | None, typer.Option(help="poisson or fixed.", show_default="poisson")] = None,
    relation: Annotated[
        str | None,
        typer.Option(
            help="add-or-remove, replace-one, zero-out; or paper, to reproduce its table (not a guarantee).",
            show_default="add-or-remove for poisson, replace-one for fixed",
        ),
    ] = None,
    count_stddev: Annotated[
        float | None, typer.Option(help="Noise on the count, in users.", show_default="cohort / 20")
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(help='"m=100,z=0.03": the least multiple of both that reaches epsilon (the paper\'s third step).'),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Settings of a training as TOML; flags override it.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw epsilon over rounds to this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find the missing one of epsilon, noise multiplier, cohort and rounds.

    Give all but one: clipline plan --users 1000000 --cohort 1000 --rounds 1500 --epsilon 4
    """
    from ..privacy.planning import plan as find

    flags: dict[str, Any] = {
        "users": users, "cohort": cohort, "rounds": rounds, "epsilon": epsilon, "noise_multiplier": noise_multiplier,
        "delta": delta, "sampling": sampling, "count_stddev": count_stddev, "relation": relation,
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    settings = {**(_from_file(config, given, scale) if config else {}), **given}
    if "users" not in settings:
        raise SettingError("users is missing: give --users, the number of users in the population")
    if plot is not None and (plot.exists() or plot.suffix != ".png"):
        raise RunError(f"plot={str(plot)!r} must be a new file that ends in .png: give another name")
    with _patience():
        result = find(**settings, scale=None if scale is None else _parse_scale(scale))
    if plot is not None:
        _draw(result, plot)
    typer.echo(json.dumps(result.to_json(), allow_nan=False) if as_json else str(result))


@contextmanager
def _patience() -> Iterator[None]:
    """Say on standard error that a search is still on, every two seconds from the first on; most end before."""
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


def _from_file(config: Path, flags: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """What a file of `clipline train` says of privacy, less what the flags ask for instead."""
    from dataclasses import fields

    from ..tasks.settings import TrainSettings, read_toml

    known = [*(field.name for field in fields(TrainSettings)), "relation"]
    file = read_toml(config)
    for key in file:
        if key not in known:
            raise SettingError(f"config {str(config)!r} has the unknown key {key!r}: {nearest(key, known)}")
    chosen = {key: value for key, value in file.items() if key in _KEYS}
    if "epsilon" in flags:
        chosen.pop("noise_multiplier", None)
    if "noise_multiplier" in flags:
        chosen.pop("epsilon", None)
    if scale is not None:
        chosen.pop("cohort", None)
        chosen.pop("noise_multiplier", None)
    return chosen


def _parse_scale(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"\s*m\s*=\s*(\d+)\s*,\s*z\s*=\s*([0-9.eE+-]+)\s*", text)
    try:
        if match:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    raise refuse("scale", text, "of the form m=100,z=0.03", "give the cohort and noise that the trial bore")


def _draw(result: Any, path: Path) -> None:
    from ..plotting import new_figure, save_figure

    figure, (axis,) = new_figure(1, 1, width=7.5, height=4.2)
    axis.plot([rounds for rounds, _ in result.curve], [epsilon for _, epsilon in result.curve])
    axis.set(xlabel="rounds", ylabel=f"epsilon at delta {result.guarantee.delta_text}", ylim=(0, None), xlim=(0, None))
    axis.set_title(str(result.guarantee), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
