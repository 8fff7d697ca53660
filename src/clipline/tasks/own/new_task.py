"""`clipline new-task`: a folder with a task file that runs, for made-up rides or fitted to a table's columns."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ...errors import PopulationError, RunError, SettingError, check_whole, nearest, refuse
from .made_up_table import CHOSEN, made_up_csv
from .table_columns import Column, table_columns
from .task_text import Chosen, task_text

FILE, TABLE, PAGE = "task.py", "rides.csv", "README.md"


def new_task(
    folder: Path,
    table: Path | None = None,
    user: str | None = None,
    label: str | None = None,
    classes: Sequence[str] | int | None = None,
) -> list[str]:
    """Write a task into a folder that is new or empty; the commands that train it and predict with it.

    With a `table` the file is fitted to its columns: `user` says whose row it is, `label` is what to predict, and
    `classes` what that may be, where it is no number to come near to. Of the table only header and types are read.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"folder={str(folder)!r} must be new or empty, and it is in use: give another")
    if table is None:
        for name, value in (("user", user), ("label", label), ("classes", classes)):
            if value is not None:
                raise refuse(name, value, "left out without a table of your own", "give --table FILE, or drop it")
        chosen, data, title = CHOSEN, folder / TABLE, "How long a ride takes, learned from made-up riders."
    else:
        if user is None or label is None:
            missing = "user" if user is None else "label"
            raise SettingError(f"{missing} is missing: give --{missing} COLUMN, {_MEANS[missing]}")
        chosen, data = _chosen(table, user, label, classes), table
        title = "What a column of a table will be, learned from the others."
    file, run = folder / FILE, folder / "run"
    kept = f'"{chosen.user}"' if "," in chosen.user else chosen.user  # whose row it is, beside what is predicted
    commands = [
        _command("train", file, "--data", data, "--out", run),
        _command("predict", run, "--model", file, "--data", data, "--keep", kept, "--out", folder / "predicted.csv"),
    ]
    text = task_text(chosen, title, commands[0])
    compile(text, FILE, "exec")  # a mistake of ours, should there be one, is seen here and not by whoever trains
    folder.mkdir(parents=True, exist_ok=True)
    if table is None:
        data.write_text(made_up_csv(), encoding="utf-8")
    (folder / PAGE).write_text(_page(chosen, file, commands), encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    return commands


_MEANS = {"user": "the column that says whose row it is", "label": "the column to predict"}


def _chosen(table: Path, user: str, label: str, classes: Sequence[str] | int | None) -> Chosen:
    """The columns of a table, sorted by what becomes of them."""
    columns = {column.name: column for column in table_columns(table)}
    for name, column in (("user", user), ("label", label)):
        if column not in columns:
            raise PopulationError(f"table={str(table)!r} has no {name} column {column!r}: {nearest(column, columns)}")
    if user == label:
        raise refuse("label", label, "another column than the user's", "give the column to predict")
    others = [column for name, column in columns.items() if name not in (user, label)]
    inputs = [column for column in others if column.is_number or column.kind == "time"]
    if not inputs:
        raise PopulationError(
            f"table={str(table)!r} has no column of numbers or times to predict {label!r} from: add some (those with "
            "a decimal comma are read as text: write them with a point); for text see examples/text_classification.py"
        )
    return Chosen(user, label, inputs, [one for one in others if one not in inputs], _classes(columns[label], classes))


def _classes(label: Column, classes: Sequence[str] | int | None) -> Sequence[str] | int | None:
    """What the label may be, checked against its type; None where it is a number to come near to."""
    if isinstance(classes, int):
        check_whole("classes", classes, at_least=2, way_out="the label is 0, 1, ... below it")
    if label.kind == "yes-no":
        return 2
    if label.kind == "text":
        if classes is None or isinstance(classes, int) or not classes or len(set(classes)) < len(classes):
            limit = f"a list of what the label {label.name!r} may be, as it is text"
            raise refuse("classes", classes, limit, "give --classes yes,no, say")
        return classes
    if not label.is_number:
        raise refuse("label", label.name, "a column of numbers or text", "give another, or convert it")
    if classes is not None and (not isinstance(classes, int) or label.kind != "whole"):
        way_out = "give their number for a label of 0, 1, 2, ...; leave it out to predict a number"
        raise refuse("classes", classes, f"left out or a number, as the label {label.name!r} is {label.kind}", way_out)
    return classes


def _command(name: str, *words: str | Path) -> str:
    return shlex.join(["clipline", name, *map(str, words)])


def _page(chosen: Chosen, file: Path, commands: Sequence[str]) -> str:
    what = "a number" if chosen.classes is None else "a class"
    plan = _command("plan", "--model", file, "--population-size", "USERS", "--epsilon", "4")
    return f"""# {FILE}: {what} for each row, `{chosen.label}`; all rows of one `{chosen.user}` are protected together
    {commands[0]}
    {commands[1]}
Before that, `{plan}` says how many users a round it takes.
`clipline tune` finds rates, noise and cohort on data that are not private; clipline's docs/own_model.md has the rest.
"""
