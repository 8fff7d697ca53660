"""`clipline new-task`: a commented task file to begin with, for made-up data or a table of one's own."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ..console import say
from .parser import PATH, Argument, Command, Option


def new_task(folder: Path, table: Path | None, user: str | None, label: str | None, classes: str | None) -> None:
    """Write a commented task file that runs, to change into your own.

    Without a table, also a small made-up one:  clipline new-task rides

    For yours:  clipline new-task shop --table sales.parquet --user customer --label amount

    Of the table only the names and types of its columns are read, no values.
    """
    from ..tasks.task_template import new_task

    commands = new_task(folder, table, user, label, _classes(classes))
    scales = (
        "" if table is None else " and write the middle and spread of your numbers there (it learns little without)"
    )
    say(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}. Read task.py{scales}, then:")
    for line in commands:
        say(f"  {line}")
    if table is not None and classes is None:
        say(f"{label} is learned as a number. If it is a class, make the file again with --classes 2, say.")


def _classes(given: str | None) -> Sequence[str] | int | None:
    """A number of classes, or their names; quotes keep a comma."""
    if given is None or given.strip().isdigit():
        return None if given is None else int(given)
    return [one.strip() for one in next(csv.reader([given], skipinitialspace=True), []) if one.strip()]


_of_table = partial(Option, group="A table of your own")
command = Command(
    "new-task",
    new_task,
    [
        Argument(["folder"], type=PATH, metavar="DIR", help="The folder to write, new or empty."),
        _of_table(["--table"], type=PATH, metavar="FILE", help="Parquet, CSV, JSONL or NPZ, a row an example."),
        _of_table(["--user-column", "--user", "user"], metavar="COLUMN", help="The column that says whose row it is."),
        _of_table(["--label"], metavar="COLUMN", help="The column to predict."),
        _of_table(
            ["--classes"], metavar="N|A,B,...", unset="the label is a number to come near to",
            help="What the label may be: this many classes 0, 1, ..., or these words.",
        ),
    ],
    groups=("A table of your own", "Options"),
)  # fmt: skip
