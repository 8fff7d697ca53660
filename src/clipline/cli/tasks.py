"""`clipline tasks`: every task by name, with what the paper prints of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..console import say
from ..tasks import TaskEntry, task_entries
from .parser import Command, Option

_COLUMNS = ("name", "parameters", "users", "rounds", "client_lr", "server_lr", "data")
_MORE = ("clip_min", "clip_max", "stand_in_users")  # in the JSON alone: the table fits 80 columns


def tasks(as_json: bool) -> None:
    """List the tasks: what `clipline train NAME` trains, and on which data.

    present: prepared data were found in CLIPLINE_DATA or clipline-data. stand-in: nothing was found, and a generated
    population takes the original's place. missing: something was found that cannot be used. embedded: needs no data.
    """
    from ..data.task_stores import data_state

    entries = task_entries()
    states = {name: data_state(name, entry.data) for name, entry in entries.items()}
    if as_json:
        keys = (*_COLUMNS, *_MORE)
        rows = [{key: getattr(entry, key) for key in keys} for entry in entries.values()]
        print(json.dumps([{**row, **states[row["name"]]} for row in rows]))
    else:
        say(table(entries, states))


def table(entries: Mapping[str, TaskEntry], states: Mapping[str, Mapping[str, Any]]) -> str:
    """One line a task under one line of names, in columns."""
    rows = [list(_COLUMNS), *(_cells(entry, states[name]) for name, entry in entries.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<", *">" * (len(_COLUMNS) - 2), "<"]  # numbers are flush right
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in rows
    )


def state_in_words(state: Mapping[str, Any], stand_in_users: int) -> str:
    """What is there for a task, in a few words."""
    if state["data"] == "present":
        return f"present, {state['store_users']:,} users, {state['origin']}, {state['folder']}"
    if state["data"] == "missing":
        return f"missing: {state['problem']}"
    return f"{stand_in_users:,} stand-ins" if state["data"] == "stand-in" else str(state["data"])


def _cells(facts: TaskEntry, state: Mapping[str, Any]) -> list[str]:
    numbers = f"{facts.parameters:,}", f"{facts.users:,}", f"{facts.rounds:,}"
    rates = f"{facts.client_lr:.3g}", f"{facts.server_lr:.3g}"
    return [facts.name, *numbers, *rates, state_in_words(state, facts.stand_in_users)]


command = Command("tasks", tasks, [Option(["--json", "as_json"], is_flag=True, help="Print one JSON list.")])
