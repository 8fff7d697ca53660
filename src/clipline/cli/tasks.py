"""`clipline tasks`: every task by name, with what the paper prints of it, at once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..tasks.facts import FACTS, TaskFacts

_COLUMNS = ("name", "parameters", "users", "rounds", "client_lr", "server_lr", "clip_min", "clip_max", "data")


def tasks(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False) -> None:
    """List the tasks: what `clipline train NAME` trains, and on which data.

    A stand-in is a generated population in the original's place; its users are counted in the last column.
    """
    if as_json:
        keys = (*_COLUMNS, "stand_in_users")
        typer.echo(json.dumps([{key: getattr(facts, key) for key in keys} for facts in FACTS.values()]))
    else:
        typer.echo(table())


def table() -> str:
    """One line a task under one line of names, in columns."""
    rows = [list(_COLUMNS), *(_cells(facts) for facts in FACTS.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    numbers = range(1, len(_COLUMNS) - 1)  # flush right
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cells(facts: TaskFacts) -> list[str]:
    data = f"{facts.data}, {facts.stand_in_users:,} users" if facts.data == "stand-in" else facts.data
    return [
        facts.name,
        f"{facts.parameters:,}",
        f"{facts.users:,}",
        f"{facts.rounds:,}",
        f"{facts.client_lr:.3g}",
        f"{facts.server_lr:.3g}",
        "-" if facts.clip_min is None else f"{facts.clip_min:g}",
        "-" if facts.clip_max is None else f"{facts.clip_max:g}",
        data,
    ]
