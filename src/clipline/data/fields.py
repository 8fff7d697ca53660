"""Fields from whatever holds them: arrays of numbers with one row an example, or a sentence that says what to do."""

from __future__ import annotations

import numbers
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError, SettingError
from .column_options import ZERO_UPDATE, ColumnOptions, number_for
from .packed_field import Field, PackedField, entry_places, offsets_of
from .user_ids import is_missing

_NUMBERS = "biufc"
# What the ways out of errors look like in a call; the values are for the caller to choose.
_EXAMPLES = {"timestamps": "hours since 2026-01-01", "lengths": 128, "categories": ["A", "B"], "fill": 0}


class ColumnErrors(PopulationError):
    """Several columns cannot become fields: what is wrong with each, and in `ways` options that take them all."""

    def __init__(self, message: str, hint: str = "", ways: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(message, hint)
        self.ways = dict(ways or {})


def each_field(where: str, names: Iterable[str], make: Callable[[str], Mapping[str, Field]]) -> dict[str, Field]:
    """The fields that `make` makes of each column; if several cannot be made, what is wrong with all of them."""
    fields: dict[str, Field] = {}
    wrong: dict[str, PopulationError] = {}
    for name in names:
        try:
            fields |= make(name)
        except PopulationError as error:
            wrong[name] = error
    if len(wrong) == 1:
        raise next(iter(wrong.values()))
    if wrong:
        ways: dict[str, dict[str, Any]] = {}
        for name, refused in wrong.items():
            option = re.search(rf"({'|'.join(_EXAMPLES)})=", str(refused))
            if option:
                ways.setdefault(option[1], {})[name] = _EXAMPLES[option[1]]
        told = "".join(f"\n- {refused}" for refused in wrong.values())
        raise ColumnErrors(f"{where} has {len(wrong)} columns that cannot become fields:{told}", ways=ways)
    return fields


def fields_of_arrays(fields: Mapping[str, Any], options: ColumnOptions) -> dict[str, Field]:
    """Each field as an array of numbers, its options applied. Values keep the type they have.

    A column of Python objects that are numbers and gaps is read as numbers. Text, dates and other objects are refused
    unless an option says what they become. NaN that is left is for `Population` to refuse.
    """
    options.check_columns(fields)
    check_length_fields(fields, options)

    def made(name: str) -> dict[str, Field]:
        if name in options.lengths:
            arrays = list_fields(name, fields[name], options)
        else:
            arrays = {name: field_array(name, fields[name], options)}
        return {name: options.scaled(name, array) for name, array in arrays.items()}

    return each_field("the call", fields, made)


def list_fields(name: str, rows: Any, options: ColumnOptions) -> dict[str, Field]:
    """Lists of unequal length as a field of the declared width, and the field of their lengths."""
    entries, sizes = entries_of(name, rows)
    array = field_array(name, entries, options) if len(entries) else np.zeros(0, np.int64)
    return packed(name, array, sizes, options)


def field_array(name: str, values: Any, options: ColumnOptions) -> NDArray[Any]:
    """One field as an array of numbers, as `fields_of_arrays` says."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        ragged = "inhomogeneous" in str(error)
        found = "its rows have different shapes" if ragged else type(error).__name__
        way_out = f", or lengths={{{name!r}: 128}} for lists of unequal length" if ragged else ""
        raise PopulationError(
            f"field {name!r} cannot become a NumPy array ({found}): give rows of equal shape, of numbers{way_out}"
        ) from None
    if array.dtype.kind == "T":
        array = array.astype(object)
    if array.dtype.kind == "f" and _is_whole(values):
        array = np.array(values.to_pylist() if hasattr(values, "to_pylist") else values.to_list(), object)
    array = options.applied(name, array)
    if array.dtype.kind == "O":
        array = options.applied(name, _of_objects(name, array, options))
    return numbers_only(name, array)


def _is_whole(values: Any) -> bool:
    """Whether a column of pandas, polars or pyarrow holds whole numbers; with gaps, NumPy makes fractions of them."""
    kind = str(getattr(values, "type", None) or getattr(values, "dtype", None)).lower()
    listed = hasattr(values, "to_pylist") or hasattr(values, "to_list")
    return listed and kind.startswith(("int", "uint", "bool"))


def numbers_only(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The array in this machine's byte order, if it holds numbers that torch knows."""
    if array.dtype.kind in "OUS":
        raise not_numbers(name, "text", array)
    if array.dtype.kind in "mM":
        raise not_numbers(name, str(array.dtype))
    if array.dtype.kind not in _NUMBERS or array.dtype.char in "gG":  # torch has no long double
        raise not_numbers(name, str(array.dtype))
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max(initial=0)) >= 2**63:
        raise PopulationError(f"field {name!r} has whole numbers of 2^63 or more but torch has none: convert it")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def not_numbers(name: str, what: str, texts: NDArray[Any] | None = None) -> PopulationError:
    """The error for a field that holds something else than numbers, with the ways out.

    If most of its `texts` are numbers, the others are mistakes, most likely: it says how many, and where the first is.
    """
    wrong = None if texts is None else places_without_number(texts)
    if wrong == []:
        return PopulationError(
            f"field {name!r} holds numbers written as text: convert it, as with [float(one) for one in {name}]"
        )
    if texts is not None and wrong:
        first = f"row {wrong[0] + 1}"
        return PopulationError(
            f"field {name!r} is text, as {len(wrong)} of {len(texts)} values "
            + (f"is no number ({first})" if len(wrong) == 1 else f"are no numbers (the first in {first})")
            + f": mend the data, or leave such cells empty and fill them with fill={{{name!r}: 0}}"
        )
    if what == "text":
        ways = (
            "or turn it into numbers with categories={column: [values]} or a tokeniser (the text=... or tokenise=... "
            "argument in Python)"
        )
    elif what.startswith(("datetime", "timestamp", "date")):
        ways = f'or turn it into numbers with timestamps={{{name!r}: "hours since 2026-01-01"}}'
    elif what.startswith("lists"):
        ways = f"or cut and fill the lists to one width with lengths={{{name!r}: 128}}"
    else:
        ways = "or turn it into numbers, as with astype('float32')"
    return PopulationError(f"field {name!r} is {what} but a store holds numbers: leave it out of the fields, {ways}")


def places_without_number(texts: NDArray[Any]) -> list[int] | None:
    """The places of texts that are not numbers, if these are fewer than half of all."""
    wrong, gaps = [], 0
    for place, text in enumerate(texts.tolist() if texts.ndim == 1 else ()):
        if is_missing(text) or (isinstance(text, str | bytes) and not text):
            gaps += 1
            continue
        try:
            float(text)
        except (TypeError, ValueError):
            wrong.append(place)
    return wrong if 2 * len(wrong) < texts.size - gaps and texts.ndim == 1 else None


def missing_values(where: str, missing: int, rows: str, whole: bool = False) -> PopulationError:
    """The error for gaps in a column, with the ways out."""
    kept = "" if whole else f', missing="{ZERO_UPDATE}" keeps them'
    return PopulationError(
        f"{where} has {missing} of {rows} values missing (NaN, None or null) but needs all: fill the gaps or leave the "
        f"column out; fill={{column: 0}} or missing=0.0 fills them{kept}"
    )


def _of_objects(name: str, array: NDArray[Any], options: ColumnOptions) -> NDArray[Any]:
    """A column of Python objects as numbers; whole numbers if all are, which a gap without a number for it is not."""
    values = array.reshape(-1).tolist()
    gaps = [is_missing(one) for one in values]
    present = [one for one, gap in zip(values, gaps, strict=True) if not gap]
    if not all(isinstance(one, numbers.Real) for one in present):
        raise not_numbers(name, _what(present), array)
    whole = bool(present) and all(isinstance(one, numbers.Integral) for one in present)
    missing, stand_in = sum(gaps), options.fill_of(name)
    if missing and stand_in is None and (whole or options.missing != ZERO_UPDATE):
        raise missing_values(f"field {name!r}", missing, str(len(values)), whole)
    if missing and stand_in is not None:
        number = number_for(name, stand_in)
        if whole and number != int(number):
            raise SettingError(f"fill of {name!r} is {number} but the column holds whole numbers: give a whole one")
        values = [number if gap else one for one, gap in zip(values, gaps, strict=True)]
        missing = 0
    bools = whole and all(isinstance(one, bool | np.bool_) for one in values)
    dtype = np.bool_ if bools else np.int64 if whole else np.float64
    try:
        numbers_held = [np.nan if gap and missing else one for one, gap in zip(values, gaps, strict=True)]
        return np.array(numbers_held, dtype).reshape(array.shape)
    except (OverflowError, TypeError, ValueError):
        raise not_numbers(name, "object") from None


def _what(present: list[Any]) -> str:
    """What a column of Python objects holds, in words without a value."""
    if all(isinstance(one, str | bytes) for one in present):
        return "text"
    if all(isinstance(one, date | datetime) for one in present):
        return "dates"
    if any(isinstance(one, list | tuple | np.ndarray) for one in present):
        return "lists of unequal length"
    return f"object ({', '.join(sorted({type(one).__name__ for one in present})[:3])})"


# Lists of unequal length: a packed field of one declared width, and a field that says how many entries count. The
# width is never read from the data: else the shape of one user's batch would depend on other users.

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
