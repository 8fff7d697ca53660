"""The card in a model's file, read as if a stranger had written it: checked entry by entry, or refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.column_options import ColumnOptions
from ..errors import CliplineError, RunError, check_number, check_whole
from ..privacy.guarantee import Guarantee
from ..training.storage.model_card import guarantee_from

_DTYPE = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)")
_MOST_AXES = 32
_LONGEST = 300  # letters of what is wrong: an entry may be of any length


@dataclass(frozen=True)
class CheckedCard:
    """What `load` goes by; `entries` is the whole card."""

    guarantee: Guarantee
    layers: str
    metrics: dict[str, float | None]
    task: dict[str, Any]
    entries: dict[str, Any]


def checked_card(text: str, file: Path) -> CheckedCard:
    """The card of a file; RunError, which names the first entry that cannot be, without quoting it."""
    try:
        entries = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise RunError(f"{str(file)!r} has a damaged card (no JSON): save the model again") from None
    try:
        card = _mapping("the card", entries)
        fields = _mapping("fields", card.get("fields", {}))
        for name, field in fields.items():
            _check_field(f"fields[{name[:80]!r}]", field)
        ColumnOptions.of(_mapping("columns", card.get("columns", {})))
        task = _mapping("task", card.get("task", {}))
        if not isinstance(task.get("name", ""), str):
            raise ValueError("the name of the task is no text")
        layers = _mapping("model", card.get("model")).get("layers")
        if not isinstance(layers, str):
            raise ValueError("the layers of the model are no text")
        guarantee = guarantee_from(_mapping("guarantee", card.get("guarantee")))
        return CheckedCard(guarantee, layers, _metrics(card.get("metrics")), task, card)
    except (CliplineError, ValueError) as error:
        said = str(error) if len(str(error)) <= _LONGEST else f"{str(error)[:_LONGEST]}..."
        raise RunError(f"{str(file)!r} has a damaged card ({said}): save the model again") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _mapping(name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {'missing' if value is None else f'{type(value).__name__} and no object'}")
    return value


def _metrics(value: object) -> dict[str, float | None]:
    way_out = "measure it again"
    return {
        name: None if number is None else check_number(f"metrics[{name[:80]!r}]", _plain(number), way_out=way_out)
        for name, number in _mapping("metrics", value).items()
    }


def _check_field(name: str, field: object) -> None:
    entry = _mapping(name, field)
    if not isinstance(dtype := entry.get("dtype"), str) or not _DTYPE.fullmatch(dtype):
        raise ValueError(f"the dtype of {name} is none of NumPy's numbers")
    shape = entry.get("shape")
    if not isinstance(shape, list) or len(shape) > _MOST_AXES:
        raise ValueError(f"the shape of {name} is no list of at most {_MOST_AXES}")
    for axis in shape:
        check_whole(f"an axis of {name}", _plain(axis), at_least=0, way_out="prepare the data again")


def _plain(number: object) -> object:
    """What may be shown in a message: a number, or else the name of its type, whatever it holds."""
    return number if isinstance(number, int | float) and not isinstance(number, bool) else type(number).__name__


def described(card: Mapping[str, Any]) -> ColumnOptions:
    """The column options of the training's population."""
    return ColumnOptions.of(card.get("columns", {}))
