"""Lists of unequal length as a packed field of one declared width, and a field that says how many entries count.

The width is declared and never read from the data: else the shape of one user's batch would depend on other users.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError, SettingError
from .column_options import ColumnOptions
from .packed_field import Field, PackedField, entry_places, offsets_of

_LENGTH = "_length"


def length_field(name: str) -> str:
    """The name of the field with the lengths of `name`."""
    return name + _LENGTH


def check_length_fields(names: Iterable[str], options: ColumnOptions) -> None:
    """Refuse a column that has the name of a field of lengths: one of the two would be lost."""
    known = set(names)
    for column in options.lengths:
        if length_field(column) in known:
            raise PopulationError(
                f"column {length_field(column)!r} has the name of the field that lengths={{{column!r}: ...}} adds: "
                "rename it or leave it out"
            )


def without_lengths(names: Iterable[str], options: Mapping[str, Any]) -> list[str]:
    """The names that are columns of a table, less the fields of lengths that were added to them."""
    added = {length_field(column) for column in options.get("lengths") or ()}
    return [name for name in names if name not in added]


def packed(name: str, entries: NDArray[Any], sizes: NDArray[np.int64], options: ColumnOptions) -> dict[str, Field]:
    """`name` (rows, width, ...) and its length field (rows,) int32, from entries end to end and the size of each row.

    A list that is longer than the declared width loses its end, and its length is the width. A shorter one is filled
    with the pad when it is read; its type must be able to hold the pad. Entries are copied.
    """
    width, kept = options.lengths[name], np.minimum(sizes, options.lengths[name])
    pad = np.array(options.pad).astype(entries.dtype)
    if pad != options.pad:
        raise SettingError(f"pad={options.pad} cannot stand in {name!r}, which is {entries.dtype}: give another pad")
    values = entries[entry_places(np.cumsum(sizes) - sizes, kept)]
    return {name: PackedField(values, offsets_of(kept), width, pad), length_field(name): kept.astype(np.int32)}


def entries_of(name: str, rows: Any) -> tuple[Any, NDArray[np.int64]]:
    """All entries of some lists end to end, as an array or a list, and the size of each: from what holds lists."""
    if isinstance(rows, np.ndarray) and rows.dtype.kind != "O" and rows.ndim >= 2:
        return rows.reshape(-1, *rows.shape[2:]), np.full(len(rows), rows.shape[1], np.int64)
    for method in ("to_pylist", "to_list", "tolist"):  # columns of pyarrow, of polars and pandas; arrays and tensors
        if hasattr(rows, method):
            rows = getattr(rows, method)()
            break
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise PopulationError(
            f"field {name!r} is of type {type(rows).__name__} but lengths need lists: give a list each"
        )
    plain = [_entries(name, row) for row in rows]
    sizes = np.fromiter(map(len, plain), np.int64, len(plain))
    return [entry for row in plain for entry in row], sizes


def _entries(name: str, row: Any) -> Sequence[Any]:
    if hasattr(row, "tolist"):  # an array or a tensor
        row = row.tolist()
    if not isinstance(row, Sequence) or isinstance(row, str | bytes):
        what = "a gap" if row is None else type(row).__name__
        raise PopulationError(
            f"field {name!r} holds {what} where lengths need a list: give each row a list, perhaps empty"
        )
    return row
