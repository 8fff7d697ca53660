"""The text of a task file: what a table's columns become, a small model, its loss and its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from json import dumps

from .table_columns import Column


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


def _columns(chosen: Chosen) -> str:
    names = [column.name for column in chosen.inputs]
    named = [*names, *chosen.categories, chosen.label]
    lines = ["# How columns become numbers; docs/own_data.md has all options. New tables are read in the same way."]
    lines += ["COLUMNS = {", f'    "fields": {_list(named)},']
    if text := [column.name for column in chosen.left_out if column.kind == "text"]:
        lines += [
            f"    # Left out, as they are text: {', '.join(map(_quoted, text))}. List what one may hold under",
            '    # "categories" and add it to "fields": it becomes 0, 1, 2, ..., and one more for anything else.',
            "    # Sentences need a function that makes numbers of them: text=, see docs/own_data.md.",
        ]
    if other := [column.name for column in chosen.left_out if column.kind != "text"]:
        lines += [f"    # Left out, as they are neither numbers nor times: {', '.join(map(_quoted, other))}."]
    categories = dict(chosen.categories)
    if isinstance(chosen.classes, Sequence):
        categories[chosen.label] = chosen.classes
    listed = ", ".join(f"{_quoted(name)}: {_list(values)}" for name, values in categories.items())
    lines += [f'    "categories": {{{listed}}},']
    times = [column.name for column in chosen.inputs if column.kind == "time"]
    since = f"days since {date.today().year}-01-01"
    counted = ", ".join(f'{_quoted(name)}: "{since}"' for name in times)
    lines += [f'    "timestamps": {{{counted}}},']
    fill = ", ".join(f"{_quoted(name)}: {round(chosen.scales.get(name, (0.0, 1.0))[0])}" for name in names)
    lines += [
        "    # What stands for gaps in numbers: the middle is usual. Without it they are refused, as in a label.",
        '    # Gaps in a column of "categories" count as anything else.',
    ]
    lines += [f'    "fill": {{{fill}}},', "}", ""]
    return "\n".join(lines)


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


def _quoted(text: str) -> str:
    """A string of Python, on one line; JSON's escapes are Python's."""
    return dumps(text, ensure_ascii=False)


def _list(values: Sequence[str]) -> str:
    return "[" + ", ".join(map(_quoted, values)) + "]"
