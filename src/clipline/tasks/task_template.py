"""`clipline new-task`: a folder with a task file that runs, for made-up rides or fitted to a table's columns."""

from __future__ import annotations

import csv
import io
import random
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta
from json import dumps
from pathlib import Path
from typing import Any, Literal

from ..data.readers.tables import table_schema
from ..errors import PopulationError, RunError, SettingError, check_whole, nearest, refuse

Kind = Literal["fraction", "whole", "yes-no", "text", "time", "other"]


@dataclass(frozen=True)
class Column:
    """One column of a table, with one value a row: of a list or anything else the kind is other."""

    name: str
    kind: Kind

    @property
    def is_number(self) -> bool:
        """Whether a model can take it as it is."""
        return self.kind in ("fraction", "whole", "yes-no")


def table_columns(path: str | Path) -> list[Column]:
    """The columns of a table in their order, as they are read when they are trained on. No value is looked at."""
    return [Column(str(field.name), _kind(field.type)) for field in table_schema(path)]


def _kind(arrow: Any) -> Kind:
    import pyarrow.types as types

    if types.is_dictionary(arrow):
        return _kind(arrow.value_type)
    kinds: dict[Kind, Sequence[Callable[[Any], bool]]] = {
        "yes-no": [types.is_boolean],
        "whole": [types.is_integer],
        "fraction": [types.is_floating],
        "text": [types.is_string, types.is_large_string],
        "time": [types.is_timestamp, types.is_date],
    }
    return next((kind for kind, tests in kinds.items() if any(test(arrow) for test in tests)), "other")


@dataclass(frozen=True)
class Chosen:
    """The columns of a table, sorted by what becomes of them, with what was said of them."""

    user: str
    label: str
    inputs: Sequence[Column]  # numbers and times
    left_out: Sequence[Column] = ()
    classes: Sequence[str] | int | None = None  # what the label may be; None where it is a number to come near to
    categories: dict[str, Sequence[str]] = field(default_factory=dict)  # of inputs that are text, as far as known
    scales: dict[str, tuple[float, float]] = field(default_factory=dict)  # by column: about its middle and its spread


def task_text(chosen: Chosen, title: str, command: str) -> str:
    """A task file for these columns."""
    settings = _SETTINGS.format(user=_quoted(chosen.user))
    said = f"# {command}\n\n" if command.isprintable() else ""
    parts = [_HEAD.format(title=title, said=said), settings, _columns(chosen), _numbers(chosen), _FEATURES]
    return "\n".join([*parts, _REGRESSION if chosen.classes is None else _CLASSIFICATION])


_HEAD = '''"""{title}

Every part of this file is yours to change; docs/own_model.md of clipline says what it may hold. All rows of one user
are protected together. Scales, lists of values and fillings are written here by hand, from what you know beforehand:
whatever is computed from the users' rows would tell of them, outside the guarantee.
"""

{said}import torch
from torch import nn
'''

_SETTINGS = """# What `clipline train` does unless a flag says otherwise; `clipline train --help` has all names.
SETTINGS = {{
    "user_column": {user},  # whose row it is
    "epsilon": 4.0,  # the promise; how much noise it needs is computed
    "rounds": 50,
    "cohort_size": 60,  # users a round, on average: the more, the less noise on their mean
    "client_lr": 0.1,  # of each user's own steps
    "batch_size": 16,
}}
"""


_COLUMNS = """# How columns become numbers; docs/own_data.md has all options. New tables are read in the same way.
COLUMNS = {{
    "fields": {fields},
{left_out}    "categories": {categories},
    "timestamps": {timestamps},
    # What stands for gaps in numbers: the middle is usual. Without it they are refused, as in a label.
    # Gaps in a column of "categories" count as anything else.
    "fill": {fill},
}}
"""
_LEFT_OUT_TEXT = """    # Left out, as they are text: {names}. List what one may hold under
    # "categories" and add it to "fields": it becomes 0, 1, 2, ..., and one more for anything else.
    # Sentences need a function that makes numbers of them: text=, see docs/own_data.md.
"""
_LEFT_OUT = "    # Left out, as they are neither numbers nor times: {names}.\n"


def _columns(chosen: Chosen) -> str:
    inputs = [column.name for column in chosen.inputs]
    text = [column.name for column in chosen.left_out if column.kind == "text"]
    other = [column.name for column in chosen.left_out if column.kind != "text"]
    left_out = _LEFT_OUT_TEXT.format(names=_quoted(text)[1:-1]) if text else ""
    left_out += _LEFT_OUT.format(names=_quoted(other)[1:-1]) if other else ""
    classes = {chosen.label: chosen.classes} if isinstance(chosen.classes, Sequence) else {}
    since = f"days since {date.today().year}-01-01"
    return _COLUMNS.format(
        fields=_quoted([*inputs, *chosen.categories, chosen.label]),
        left_out=left_out,
        categories=_quoted({**chosen.categories, **classes}),
        timestamps=_quoted({column.name: since for column in chosen.inputs if column.kind == "time"}),
        fill=_quoted({name: round(chosen.scales.get(name, (0.0, 1.0))[0]) for name in inputs}),
    )


def _numbers(chosen: Chosen) -> str:
    lines = [
        "# About the middle and the spread of each column of numbers. They need not be exact: what counts is that most",
        "# values of (value - middle) / spread are between -2 and 2.",
        "NUMBERS = {",
    ]
    for column in chosen.inputs:
        usual = (0.0, 365.0) if column.kind == "time" else (0.0, 1.0)
        lines.append(f"    {_quoted(column.name)}: {chosen.scales.get(column.name, usual)},")
    lines += ["}", 'CATEGORIES = {name: listed for name, listed in COLUMNS["categories"].items() if name != LABEL}', ""]
    label = [f"LABEL = {_quoted(chosen.label)}  # what is predicted"]
    if chosen.classes is None:
        middle, spread = chosen.scales.get(chosen.label, (0.0, 1.0))
        label.append(f"MIDDLE, SPREAD = {middle}, {spread}  # of the label, as for the columns below")
    elif isinstance(chosen.classes, int):
        label.append(f"CLASSES = range({chosen.classes})  # the label is 0, 1, ... below this")
    else:
        other = _quoted("other" if "other" not in chosen.classes else "other values")
        label.append(f'CLASSES = [*COLUMNS["categories"][LABEL], {other}]  # the last is for anything else')
    return "\n".join([*label, "", *lines])


_FEATURES = '''
def features(batch):
    """(examples, inputs): numbers in their scale, those far out drawn in, and 0 or 1 for each category.

    A batch maps the fields to tensors with a row for each example.
    """
    numbers = [torch.asinh((batch[name].float() - middle) / spread) for name, (middle, spread) in NUMBERS.items()]
    parts = [number.unsqueeze(1) for number in numbers]
    for name, listed in CATEGORIES.items():
        codes = torch.arange(len(listed) + 1, device=batch[name].device)
        parts.append((batch[name].unsqueeze(1) == codes).float())
    return torch.cat(parts, dim=1)


def network(outputs):
    """A small network: few parameters bear more noise."""
    inputs = len(NUMBERS) + sum(len(listed) + 1 for listed in CATEGORIES.values())
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))
'''

_REGRESSION = '''
def model():
    """A new model, not trained yet."""
    return network(1)


def predict(model, batch):
    """(examples,) predictions, in the label's own unit; `clipline predict` writes these."""
    return MIDDLE + SPREAD * model(features(batch)).squeeze(1)


def loss(model, batch):
    """(examples,) losses: one for each example trains faster than their mean."""
    wanted = (batch[LABEL].float() - MIDDLE) / SPREAD
    return nn.functional.smooth_l1_loss(model(features(batch)).squeeze(1), wanted, reduction="none")


def metrics(model, batch):
    """What is shown, each averaged over users who do not train. The first is the main one."""
    label = batch[LABEL].float()
    return {
        "absolute_error": (predict(model, batch) - label).abs(),
        "baseline_error": (label - MIDDLE).abs(),  # to compare with: of always saying MIDDLE
    }
'''

_CLASSIFICATION = '''
def model():
    """A new model, not trained yet."""
    return network(len(CLASSES))


def predict(model, batch):
    """(examples, classes): the chance of each class; `clipline predict` writes these, and which is largest."""
    return model(features(batch)).softmax(dim=1)


def loss(model, batch):
    """(examples,) losses: one for each example trains faster than their mean."""
    return nn.functional.cross_entropy(model(features(batch)), batch[LABEL].long(), reduction="none")


def metrics(model, batch):
    """What is shown, each averaged over users who do not train. The first is the main one."""
    label = batch[LABEL].long()
    return {
        "accuracy": (model(features(batch)).argmax(dim=1) == label).float(),
        # To compare with: how many of the examples are of each class, as share_yes; of five classes at most. The
        # largest share is the accuracy of always saying that class.
        **{f"share_{name}": (label == code).float() for code, name in enumerate(CLASSES[:5])},
    }
'''


def _quoted(value: object) -> str:
    """Text, a list or a dict of these as Python has it, on one line; JSON's escapes are Python's."""
    return dumps(value, ensure_ascii=False)


RIDERS = 600
_MINUTES_A_KM = {"city": 4.0, "race": 2.5, "cargo": 5.5}
CHOSEN = Chosen(
    user="rider",
    label="minutes",
    inputs=[Column("start", "time"), Column("km", "fraction"), Column("climb", "whole")],
    categories={"bike": list(_MINUTES_A_KM)},
    scales={"start": (180.0, 180.0), "km": (8.0, 5.0), "climb": (100.0, 60.0), "minutes": (40.0, 20.0)},
)


def made_up_csv() -> str:
    """The same rides each time. One climb in ten is missing, and one ride in ten on a bike that nobody wrote down."""
    rng = random.Random(1)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["rider", "start", "bike", "km", "climb", "minutes"])
    year = datetime(datetime.now().year, 1, 1)
    for rider in range(RIDERS):
        bike = rng.choice(list(_MINUTES_A_KM))
        for _ in range(rng.randint(1, 20)):
            start = year + timedelta(minutes=rng.randrange(525_600))
            km, climb = rng.uniform(1, 16), rng.randrange(200)
            minutes = km * _MINUTES_A_KM[bike] + climb * 0.05 + rng.gauss(0, 2)
            written = "" if rng.random() < 0.1 else bike
            measured = "" if rng.random() < 0.1 else climb
            rows.writerow([f"r{rider:03}", start, written, f"{km:.2f}", measured, f"{max(minutes, 1):.1f}"])
    return text.getvalue()


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
            f"table={str(table)!r} has no column of numbers or times to predict {label!r} from: add some; for text "
            "see examples/text_classification.py"
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
