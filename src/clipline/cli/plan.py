"""`clipline plan`: what a training would guarantee, or what it takes to guarantee that, in a blink."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SettingError, nearest
from .planner import answer

_KEYS = ("users", "cohort", "rounds", "epsilon", "noise_multiplier", "delta", "sampling", "count_stddev", "relation")


def plan(
    users: Annotated[int | None, typer.Option(help="Users in the population, N: a number declared beforehand.")] = None,
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
    flags: dict[str, Any] = {
        "users": users, "cohort": cohort, "rounds": rounds, "epsilon": epsilon, "noise_multiplier": noise_multiplier,
        "delta": delta, "sampling": sampling, "count_stddev": count_stddev, "relation": relation,
    }  # fmt: skip
    given = {name: value for name, value in flags.items() if value is not None}
    settings = {**(_from_file(config, given, scale) if config else {}), **given}
    typer.echo(answer(settings, scale, plot, as_json))


def _from_file(config: Path, flags: dict[str, Any], scale: str | None) -> dict[str, Any]:
    """What a file of `clipline train` says of privacy, less what the flags ask for instead."""
    from dataclasses import fields

    from ..data.task_stores import STAND_IN
    from ..privacy.relations import Relation
    from ..tasks.settings import TrainSettings, read_toml

    known = [*(field.name for field in fields(TrainSettings)), "relation"]
    file = read_toml(config)
    for key in file:
        if key not in known:
            raise SettingError(f"config {str(config)!r} has the unknown key {key!r}: {nearest(key, known)}")
    chosen = {key: value for key, value in file.items() if key in _KEYS}
    if "population_size" in file:
        chosen["users"] = file["population_size"]
    elif file.get("data", STAND_IN) != STAND_IN and {**file, **flags}.get("sampling", "poisson") == "poisson":
        chosen.setdefault("relation", Relation.ZERO_OUT.value)  # that training reads the number of users from its data
    if "epsilon" in flags:
        chosen.pop("noise_multiplier", None)
    if "noise_multiplier" in flags:
        chosen.pop("epsilon", None)
    if scale is not None:
        chosen.pop("cohort", None)
        chosen.pop("noise_multiplier", None)
    return chosen
