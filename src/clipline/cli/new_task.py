"""`clipline new-task`: a folder with a task file that runs, for made-up rides or fitted to a table's columns.

The text of the file stands in assets/: `task.txt`, then `number.txt` or `class.txt` by what is predicted.
"""

from __future__ import annotations

import csv
import math
import random
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from functools import partial
from importlib import resources
from json import dumps
from pathlib import Path
from string import Template
from typing import Any

from ..console import say
from ..errors import PopulationError, RunError, SettingError, check_whole, nearest, refuse, shown
from ..tasks import task_names
from .parser import PATH, Argument, Command, Option

TABLE, PAGE = "rides.csv", "README.md"
_NUMBERS = ("fraction", "whole", "yes-no", "time")
_MOST = 30  # categories that are listed of a column; they hold half of its values, or it holds sentences or names
Classes = Sequence[str | int] | int | None  # what a label may be; None where it is a number to come near to
Lists = dict[str, Sequence[str | int]]  # of a column the categories
Scales = dict[str, tuple[float, float]]  # of a column about its middle and its spread
_UNLISTED = ["value 1", "value 2"]  # of categories that nobody has listed yet


def new_task(
    folder: Path, table: Path | None, user: str | None, label: str | None, classes: str | None, public: Path | None,
    categories: tuple[str, ...], numbers: tuple[str, ...], without: tuple[str, ...],
) -> None:  # fmt: skip
    """Write a commented task file that runs, to change into your own.

    Without a table, also a small made-up one:  clipline new-task rides

    For yours:  clipline new-task shop --table sales.parquet --user customer --label amount --public old_sales.parquet

    Of the table only the names and types of its columns are read, no values. Scales, fills and lists of categories
    come from the public table: it has the same columns, and other rows, which are not private.
    """
    unused(folder)
    if table is None:
        for name, value in locals().copy().items():
            if name not in ("folder", "table") and value:
                raise refuse(name, value, "left out without a table of your own", "give --table FILE, or drop it")
        chosen, data, title = RIDES, folder / TABLE, "How long a ride takes, learned from made-up riders."
    else:
        if user is None or label is None:
            missing, what = ("user", "that says whose row it is") if user is None else ("label", "to predict")
            raise SettingError(f"{missing} is missing: give --{missing} COLUMN, the column {what}")
        if public is not None and public.resolve() == table.resolve():
            raise refuse("public", str(public), "another file than the table", "give rows that nobody has to protect")
        kinds = _kinds(table, user, label, *(_names(given) for given in (categories, numbers, without)))
        chosen, data = _chosen(table, kinds, user, label, _classes(classes), public), table
        title = "What a column of a table will be, learned from the others."
    stem = folder.resolve().name
    file, run = folder / f"{'task' if stem in task_names() or ':' in stem else stem}.py", folder / "run"
    kept = f'"{chosen.user}"' if "," in chosen.user else chosen.user  # whose row it is, beside what is predicted
    commands = [
        _command("train", file, "--data", data, "--out", run),
        _command("predict", run, "--model", file, "--data", data, "--keep", kept, "--out", folder / "predicted.csv"),
    ]
    text = _task_text(chosen, title, commands[0])
    compile(text, file.name, "exec")  # a mistake of ours, should there be one, is seen here and not by whoever trains
    folder.mkdir(parents=True, exist_ok=True)
    if table is None:
        _write_rides(data)
    (folder / PAGE).write_text(_page(chosen, file, commands), encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    guessed = table is not None and public is None
    scales = " and write the middle and spread of your numbers there (it learns little without)" if guessed else ""
    say(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}. Read {file.name}{scales}, then:")
    for line in commands:
        say(f"  {line}")
    if table is not None and chosen.classes is None:
        say(f"{label} is learned as a number. If it is a class, run this for another folder with --classes 2, say.")
    if chosen.texts:
        say(f"Left out, as they are text: {', '.join(chosen.texts)}. --categories NAME takes one in.")
    if unlisted := [name for name, listed in chosen.categories.items() if listed == _UNLISTED]:
        say(f"Write into {file.name} what these may hold, or give --public FILE: {', '.join(unlisted)}.")


def _names(given: Sequence[str]) -> list[str]:
    """Columns of a flag that may be repeated; quotes keep a comma."""
    return [name.strip() for one in given for name in next(csv.reader([one], skipinitialspace=True), [])]


def unused(folder: Path) -> None:
    """Refuse a folder with something in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RunError(f"folder={str(folder)!r} must be new or empty, and it is in use: give another")


def _classes(given: str | None) -> Classes:
    """A number of classes, or their names; quotes keep a comma."""
    if given is None or given.strip().isdigit():
        return None if given is None else int(given)
    return [one for one in _names([given]) if one]


@dataclass(frozen=True)
class Chosen:
    """The columns of a table, sorted by what becomes of them, with what was said of them."""

    user: str
    label: str
    inputs: Sequence[str]  # numbers and times
    times: Sequence[str] = ()  # of the inputs
    texts: Sequence[str] = ()  # left out
    others: Sequence[str] = ()  # left out
    classes: Classes = None
    categories: Lists = field(default_factory=dict)  # of inputs, as far as known
    scales: Scales = field(default_factory=dict)


def column_kinds(path: str | Path) -> dict[str, str]:
    """Of each column of a table whether it is fraction, whole, yes-no, text, time or other. No value is looked at."""
    import pyarrow.types as types

    from ..data.readers.tables import table_schema

    tests = {
        "yes-no": types.is_boolean, "whole": types.is_integer, "fraction": types.is_floating, "text": types.is_string,
        "long text": types.is_large_string, "moment": types.is_timestamp, "time": types.is_date,
    }  # fmt: skip

    def kind(arrow: Any) -> str:
        inner = arrow.value_type if types.is_dictionary(arrow) else arrow
        found = next((name for name, test in tests.items() if test(inner)), "other")
        return {"long text": "text", "moment": "time"}.get(found, found)

    return {str(field.name): kind(field.type) for field in table_schema(path)}


def _kinds(
    table: Path, user: str, label: str, categories: Sequence[str], numbers: Sequence[str], without: Sequence[str]
) -> dict[str, str]:
    """The kind of each column that is used, as `column_kinds` says or the caller: "category" is of the latter alone."""
    kinds = column_kinds(table)
    flags = {"user": [user], "label": [label], "categories": categories, "numbers": numbers, "without": without}
    for name, columns in flags.items():
        for column in columns:
            if column not in kinds:
                raise PopulationError(f"table={str(table)!r} has no {name} column {column!r}: {nearest(column, kinds)}")
            if name not in ("user", "label") and column in (user, label):
                raise refuse(name, column, "another column than the user's and the label", "leave it out")
    for name, columns, allowed in (("categories", categories, ("text", "whole")), ("numbers", numbers, _NUMBERS)):
        for column in columns:
            if kinds[column] not in allowed:
                raise refuse(name, column, f"{' or '.join(allowed)} but is {kinds[column]}", "convert the column")
    asked = {**kinds, **dict.fromkeys(categories, "category")}
    return {name: kind for name, kind in asked.items() if name not in without}


def _chosen(
    table: Path, kinds: dict[str, str], user: str, label: str, classes: Classes, public: Path | None
) -> Chosen:  # fmt: skip
    """The columns of a table, sorted by what becomes of them."""
    if user == label:
        raise refuse("label", label, "another column than the user's", "give the column to predict")
    others = {name: kind for name, kind in kinds.items() if name not in (user, label)}
    known = {name: kind for name, kind in kinds.items() if name not in (user, *_of_kind(kinds, "other"))}
    listed, scales = ({}, {}) if public is None else _public(public, known, label)
    categories = {name: listed.get(name, _UNLISTED) for name in others if kinds[name] == "category" or name in listed}
    inputs = [name for name, kind in others.items() if kind in _NUMBERS]
    if not inputs and not categories:
        raise PopulationError(
            f"table={str(table)!r} has no column of numbers or times to predict {label!r} from: add some; for text "
            "see examples/text_classification.py"
        )
    texts = [name for name in _of_kind(others, "text") if name not in categories]
    of_label = _of_label(label, kinds[label], listed.get(label) if classes is None else classes)
    times, rest = _of_kind(others, "time"), _of_kind(others, "other")
    return Chosen(user, label, inputs, times, texts, rest, of_label, categories, scales)


def _of_kind(kinds: dict[str, str], wanted: str) -> list[str]:
    return [name for name, kind in kinds.items() if kind == wanted]


def _public(path: Path, kinds: dict[str, str], label: str) -> tuple[Lists, Scales]:
    """The most frequent values of text, and middle and spread of numbers, from rows that are not private."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    from ..data.readers.tables import whole_table

    rows, lists, scales = whole_table(path, as_text=_of_kind(kinds, "text")), Lists(), Scales()
    for name, kind in kinds.items():
        if name not in rows.column_names:
            raise PopulationError(f"public={str(path)!r} has no column {name!r}: {nearest(name, rows.column_names)}")
        column = pc.drop_null(rows[name])
        try:
            if kind in ("text", "category"):
                counted = [one for one in pc.value_counts(column).to_pylist() if one["values"] != ""]  # a gap of CSV
                top = sorted(counted, key=lambda one: (-one["counts"], one["values"]))[:_MOST]
                repeated = sum(one["counts"] for one in top if one["counts"] > 1)
                if kind == "category" or name == label or repeated > len(column) / 2:
                    lists[name] = [one["values"] for one in top] or _UNLISTED
                continue
            if kind == "time":
                days = pc.cast(pc.cast(column, pa.timestamp("us")), pa.int64()).to_numpy() / 86_400e6
                values = days - date(date.today().year, 1, 1).toordinal() + date(1970, 1, 1).toordinal()
            else:
                values = pc.cast(column, pa.float64()).to_numpy()
        except pa.ArrowException as error:
            raise PopulationError(
                f"column {name!r} of public={str(path)!r} is not {kind} ({error}): convert it"
            ) from None
        values = values[np.isfinite(values)]
        if len(values):
            low, middle, high = np.quantile(values, [0.16, 0.5, 0.84]).tolist()  # few far out do not move these
            spread = (high - low) / 2 or float(values.std()) or 1.0
            digits = 1 - math.floor(math.log10(spread))
            scales[name] = round(middle, digits) + 0.0, round(spread, digits)  # no -0.0
    return lists, scales


def _of_label(label: str, kind: str, classes: Classes) -> Classes:
    """What the label may be, checked against its type; None where it is a number to come near to."""
    if isinstance(classes, int):
        check_whole("classes", classes, at_least=2, way_out="the label is 0, 1, ... below it")
    if kind == "yes-no":
        return 2
    if kind == "text":
        if classes is None or isinstance(classes, int) or not classes or len(set(classes)) < len(classes):
            said = "is missing" if classes is None else f"{shown(classes)} must be a list without repetitions"
            raise SettingError(f"--classes {said}: the label {label!r} is text", "give --classes yes,no, say")
        return classes
    if kind not in ("fraction", "whole"):
        raise refuse("label", label, "a column of numbers or text", "give another, or convert it")
    if classes is None or (isinstance(classes, int) and kind == "whole"):
        return classes
    if kind == "whole" and not isinstance(classes, int) and all(str(one).lstrip("-").isdigit() for one in classes):
        return [int(one) for one in classes]
    way_out = "give their number for a label of 0, 1, 2, ..., or a list such as 1,2,3; leave it out to predict a number"
    raise refuse("classes", classes, f"left out or whole numbers, as the label {label!r} is {kind}", way_out)


def _task_text(chosen: Chosen, title: str, command: str) -> str:
    """A task file for these columns."""
    inputs, classes = chosen.inputs, chosen.classes
    left_out = ""
    if chosen.texts:
        left_out = f"""    # Left out, as they are text: {_quoted(chosen.texts)[1:-1]}. List what one may hold under
    # "categories" and add it to "fields": it becomes 0, 1, 2, ..., and one more for anything else.
    # Sentences need a function that makes numbers of them: text=, see docs/howto/own_data.md.
"""
    if chosen.others:
        left_out += f"    # Left out, as they are neither numbers nor times: {_quoted(chosen.others)[1:-1]}.\n"
    label = [f"LABEL = {_quoted(chosen.label)}  # what is predicted"]
    if classes is None:
        middle, spread = chosen.scales.get(chosen.label, (0.0, 1.0))
        label.append(f"MIDDLE, SPREAD = {middle}, {spread}  # of the label, as for the columns below")
    elif isinstance(classes, int):
        label.append(
            f"CLASSES = range({classes})  # the label is 0, 1, ... below this; if it is 1, 2, 3: --classes 1,2,3"
        )
    else:
        other = _quoted("other" if "other" not in classes else "other values")
        label.append(f'CLASSES = [*COLUMNS["categories"][LABEL], {other}]  # the last is for anything else')
    usual = {**dict.fromkeys(inputs, (0.0, 1.0)), **dict.fromkeys(chosen.times, (0.0, 365.0))}
    listed = {chosen.label: classes} if isinstance(classes, Sequence) else {}
    return _asset("task").substitute(
        title=title,
        said=f"# {command}\n\n" if command.isprintable() else "",
        user=_quoted(chosen.user),
        fields=_quoted([*inputs, *chosen.categories, chosen.label]),
        left_out=left_out,
        categories=_quoted({**chosen.categories, **listed}),
        timestamps=_quoted(dict.fromkeys(chosen.times, f"days since {date.today().year}-01-01")),
        fill=_quoted({name: chosen.scales.get(name, (0.0, 1.0))[0] for name in inputs}),
        label="\n".join(label),
        numbers="".join(f"    {_quoted(name)}: {chosen.scales.get(name, usual[name])},\n" for name in inputs),
    ) + _asset("number" if classes is None else "class").substitute()  # fmt: skip


def _asset(name: str) -> Template:
    return Template(resources.files(__package__).joinpath("assets", f"{name}.txt").read_text(encoding="utf-8"))


def _quoted(value: object) -> str:
    """Text, a list or a dict of these as Python has it, on one line; JSON's escapes are Python's."""
    return dumps(value, ensure_ascii=False)


_MINUTES_A_KM = {"city": 4.0, "race": 2.5, "cargo": 5.5}
RIDES = Chosen(
    "rider", "minutes", ["start", "km", "climb"], ["start"],
    categories={"bike": list(_MINUTES_A_KM)},
    scales={"start": (180.0, 180.0), "km": (8.0, 5.0), "climb": (100.0, 60.0), "minutes": (40.0, 20.0)},
)  # fmt: skip


def _write_rides(path: Path) -> None:
    """The same rides each time. One climb in ten is missing, and one ride in ten on a bike that nobody wrote down."""
    rng, year = random.Random(1), datetime(datetime.now().year, 1, 1)
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["rider", "start", "bike", "km", "climb", "minutes"])
        for rider in range(600):
            bike = rng.choice(list(_MINUTES_A_KM))
            for _ in range(rng.randint(1, 20)):
                start = year + timedelta(minutes=rng.randrange(525_600))
                km, climb = rng.uniform(1, 16), rng.randrange(200)
                minutes = km * _MINUTES_A_KM[bike] + climb * 0.05 + rng.gauss(0, 2)
                written = "" if rng.random() < 0.1 else bike
                measured = "" if rng.random() < 0.1 else climb
                rows.writerow([f"r{rider:03}", start, written, f"{km:.2f}", measured, f"{max(minutes, 1):.1f}"])


def _command(name: str, *words: str | Path) -> str:
    return shlex.join(["clipline", name, *map(str, words)])


def _page(chosen: Chosen, file: Path, commands: Sequence[str]) -> str:
    what = "a number" if chosen.classes is None else "a class"
    plan = _command("plan", "--model", file, "--population-size", "USERS", "--epsilon", "4")
    return f"""# {file.name}: {what} a row, `{chosen.label}`; the rows of one `{chosen.user}` are protected together
    {commands[0]}
    {commands[1]}
Before that, `{plan}` says how many users a round it takes.
`clipline tune` finds rates, noise and cohort on data that are not private; clipline's own_model.md has the rest.
"""


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
            ["--public"], type=PATH, metavar="FILE",
            help="Rows that are not private, with the same columns: scales, fills and lists of values come from here.",
        ),
        _of_table(["--categories"], metavar="A,B", multiple=True, help="Columns of text or codes that are categories."),
        _of_table(["--numbers"], metavar="A,B", multiple=True, help="Columns that must be numbers or times."),
        _of_table(["--without"], metavar="A,B", multiple=True, help="Columns to leave out."),
        _of_table(
            ["--classes"], metavar="N|A,B,...", unset="the label is a number to come near to",
            help="What the label may be: this many classes 0, 1, ..., or these words or whole numbers.",
        ),
    ],
    groups=("A table of your own", "Options"),
)  # fmt: skip
