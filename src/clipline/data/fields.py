"""Fields from whatever holds them: arrays of numbers with one row an example, or a sentence that says what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError, SettingError
from .chunks import FieldChunk, Text
from .column_options import ZERO_UPDATE, ColumnOptions
from .packed_field import Field, PackedField, entry_places, offsets_of
from .user_ids import is_missing, is_text, listed

_NUMBERS = "biufc"
DEEPEST = 32  # nested lists; no version of NumPy allows fewer axes
_WAYS_WHOLE = (
    "fill the gaps, drop the rows (of a label) or leave the column out; fill={column: 0} or missing=0 fills them"
)
_WAYS_TEXT = "fill the gaps, drop the rows, or give categories={column: [values]}, where a gap is anything else"
_WAYS = f'{_WAYS_WHOLE}, missing="zero-update" keeps them'
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
    """One field as an array of numbers, as `fields_of_arrays` says. Text and objects become a column of Arrow first."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        ragged = "inhomogeneous" in str(error)
        found = "its rows have different shapes" if ragged else type(error).__name__
        way_out = f", or lengths={{{name!r}: 128}} for lists of unequal length" if ragged else ""
        raise PopulationError(
            f"field {name!r} cannot become a NumPy array ({found}): give rows of equal shape, of numbers{way_out}"
        ) from None
    # With gaps NumPy makes fractions of whole numbers, of which the library that holds them knows better.
    kind = str(getattr(values, "type", None) or getattr(values, "dtype", None)).lower()
    whole = array.dtype.kind == "f" and kind.startswith(("int", "uint", "bool"))
    if array.dtype.kind not in "OUST" and not whole:
        return numbers_only(name, options.applied(name, array))
    import pyarrow as pa

    try:
        column = pa.array(listed(values if whole else array), from_pandas=True)
    except UnicodeError:
        raise half_letters("the data", name) from None
    except (pa.ArrowException, OverflowError):
        has_text = any(isinstance(one, str) for one in array.flat)
        raise not_numbers(name, "object", array if has_text else None) from None
    return numbers_only(name, np.array(arrow_array("the data", name, column, None, options, 0)))


def numbers_only(name: str, array: NDArray[Any]) -> NDArray[Any]:
    """The array in this machine's byte order, if it holds numbers that torch knows."""
    if array.dtype.kind in "OUS":
        raise not_numbers(name, "text", array)
    if array.dtype.kind not in _NUMBERS or array.dtype.char in "gG":  # torch has no long double
        raise not_numbers(name, str(array.dtype))
    if array.dtype.kind == "u" and array.dtype.itemsize == 8 and int(array.max(initial=0)) >= 2**63:
        raise PopulationError(f"field {name!r} has whole numbers of 2^63 or more but torch has none: convert it")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def half_letters(where: str, name: str) -> PopulationError:
    """The error for text that UTF-8 cannot hold."""
    return PopulationError(
        f"{where} has a lone surrogate, half a letter of UTF-16, in the text of {name!r}: mend it, as with "
        'text.encode("utf-8", "replace").decode()'
    )


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
    else:
        ways = "or turn it into numbers, as with astype('float32')"
    return PopulationError(f"field {name!r} is {what} but must be numbers: leave it out of the fields, {ways}")


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
    rows = listed(rows)
    if not isinstance(rows, Sequence) or isinstance(rows, str | bytes):
        raise PopulationError(
            f"field {name!r} is of type {type(rows).__name__} but lengths need lists: give a list each"
        )
    plain = [_listed(name, row) for row in rows]
    sizes = np.fromiter(map(len, plain), np.int64, len(plain))
    return [entry for row in plain for entry in row], sizes


def _listed(name: str, row: Any) -> Sequence[Any]:
    row = listed(row)
    if not isinstance(row, Sequence) or isinstance(row, str | bytes):
        what = "a gap" if row is None else type(row).__name__
        raise PopulationError(
            f"field {name!r} holds {what} where lengths need a list: give each row a list, perhaps empty"
        )
    return row


# Columns of Arrow, which most tables pass through, as user ids and as fields.


def arrow_chunk(
    where: str, rows: Any, user_column: str, names: list[str], text: Text | None, options: ColumnOptions, before: int
) -> FieldChunk:
    """A `validated` batch as a chunk. `where` it is from and how many rows came `before` are for errors."""
    ids = arrow_ids(where, user_column, rows.column(user_column), before)
    return ids, arrow_fields(where, rows, names, text, options, before)


def validated(rows: Any, names: Sequence[str]) -> Any:
    """These columns of an Arrow batch or table, validated in full: a damaged list would take values of other users."""
    chosen = rows.select(list(names))
    chosen.validate(full=True)
    return chosen


def arrow_fields(
    where: str, rows: Any, names: Sequence[str], text: Text | None, options: ColumnOptions, before: int
) -> dict[str, Field]:
    """Columns of a batch as fields, all options applied; a column with a declared length gives two."""

    def made(name: str) -> dict[str, Field]:
        column = rows.column(name)
        if name in options.lengths:
            arrays = _packed(where, name, _plain(column), text, options, before)
        else:
            arrays = {name: arrow_array(where, name, column, text, options, before)}
        return {name: options.scaled(name, array) for name, array in arrays.items()}

    return each_field(where, names, made)


def _packed(
    where: str, name: str, column: Any, text: Text | None, options: ColumnOptions, before: int
) -> dict[str, Field]:
    """Lists of unequal length, or texts that `text` turns into such lists."""
    if column.null_count:
        raise _gap(where, name, column, before, "give each row a list, perhaps empty, or leave the column out")
    if is_text(column.type) and text is not None:
        return list_fields(name, list(text(column.to_pylist())), options)
    if not _is_list(column.type):
        way_out = (
            "give text=, the function that makes numbers of texts" if is_text(column.type) else "leave its length out"
        )
        raise PopulationError(f"{where} has {name!r} as {column.type} but lengths are for lists: {way_out}")
    entries = _entries(where, name, column, options, before)
    return packed(name, entries, column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64), options)


def arrow_ids(where: str, name: str, column: Any, before: int) -> Any:
    """The user column, an array of Arrow: whole numbers or text. UUIDs become text, and bytes have to be text."""
    import pyarrow as pa

    column = _plain(column)
    if column.null_count:
        raise _gap(where, name, column, before, "drop the rows without a user, or give each the id of its user")
    if str(column.type) in ("extension<arrow.uuid>", "uuid"):
        return pa.array([str(one) for one in column.to_pylist()])
    kind = column.type
    if not (is_text(kind) or _is_binary(kind) or _is_number(kind)):
        raise PopulationError(
            f"{where} has {name!r} as {kind} but users are whole numbers, text or UUIDs: convert it to text"
        )
    return column


def arrow_array(
    where: str, name: str, column: Any, text: Text | None, options: ColumnOptions, before: int
) -> NDArray[Any]:
    """One column of a batch as an array (rows, ...), its options applied; lists give further axes."""
    import pyarrow as pa

    column = _plain(column)
    if pa.types.is_null(column.type):  # nothing but gaps, as in a table of one row
        column = column.cast(_type_of_gaps(name, options))
    kind = column.type
    if _is_list(kind):
        if column.null_count:
            raise _gap(where, name, column, before, "fill the gaps or leave the column out")
        return _lists(where, name, column, options, before)
    if name in options.categories and (is_text(kind) or _is_number(kind)):
        codes = column.to_numpy(zero_copy_only=False)
        # With a gap, whole numbers would come as fractions, and all of them be taken for gaps.
        return options.applied(name, codes if not column.null_count else np.array(column.to_pylist(), object))
    if is_text(kind) and name in options.timestamps:
        column = _dates(where, name, column)
        kind = column.type
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        if name not in options.timestamps:
            raise PopulationError(
                f"{where} has {name!r} as {kind}: turn it into numbers or leave it out; "
                f'timestamps={{{name!r}: "hours since 2026-01-01"}} counts'
            )
        if column.null_count and options.fill_of(name) is None and options.missing != ZERO_UPDATE:
            raise _gap(where, name, column, before, _WAYS)
        return options.applied(name, np.asarray(column.to_numpy(zero_copy_only=False)).astype("M8[us]"))
    if column.null_count:
        column = _filled(where, name, column, options, before)
    if is_text(kind):
        if text is None:
            raise not_numbers(name, "text", column.to_numpy(zero_copy_only=False))
        return np.asarray(text(column.to_pylist()))
    if not _is_number(kind):
        how = ", as with .dt.total_seconds()," if pa.types.is_duration(kind) else ""
        raise PopulationError(f"{where} has {name!r} as {kind}: turn it into numbers{how} or leave it out")
    return options.applied(name, np.asarray(column.to_numpy(zero_copy_only=False)))


def _dates(where: str, name: str, column: Any) -> Any:
    """Dates that were read as text, as pandas reads those of a CSV file; times with a zone as UTC."""
    import pyarrow as pa

    text = column.cast(pa.large_string())  # views of text have no cast to times
    for unit, zone in (("us", None), ("us", "UTC"), ("ns", None), ("ns", "UTC")):
        try:
            return text.cast(pa.timestamp(unit, zone))
        except pa.ArrowInvalid:
            continue
    raise PopulationError(
        f"{where} has {name!r} as text but timestamps need dates: write them as 2026-01-31 or 2026-01-31 12:30:00, all "
        "with a zone or all without"
    )


def _lists(where: str, name: str, column: Any, options: ColumnOptions, before: int) -> NDArray[Any]:
    kind, depth = column.type, 0
    while _is_list(kind):
        kind, depth = kind.value_type, depth + 1
    if depth >= DEEPEST:
        raise PopulationError(f"{where} has {name!r} as lists more than {DEEPEST} deep: flatten them")
    inner = _entries(where, name, column, options, before)
    widths = np.unique(column.value_lengths().to_numpy(zero_copy_only=False))
    if len(widths) > 1:
        inside = name in options.lengths  # a width was given, to the lists around these
        way_out = "pad those inside lists yourself" if inside else f"give them one width with lengths={{{name!r}: 128}}"
        raise PopulationError(
            f"{where} has lists of {widths[0]} to {widths[-1]} entries in {name!r}: {way_out}, or leave the column out"
        )
    width = int(widths[0]) if len(widths) else 0
    return inner.reshape(len(column), width, *inner.shape[1:])


def _entries(where: str, name: str, column: Any, options: ColumnOptions, before: int) -> NDArray[Any]:
    """All entries of a column of lists, end to end; a gap among them is refused by the row of its list."""
    entries = column.flatten()
    fractions = options.missing == ZERO_UPDATE and str(entries.type) in ("halffloat", "float", "double")
    if entries.null_count and name not in options.categories and options.fill_of(name) is None and not fractions:
        ends = np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))
        first = int(np.flatnonzero(entries.is_null().to_numpy(zero_copy_only=False))[0])
        row = before + int(np.searchsorted(ends, first, side="right")) + 1
        raise PopulationError(
            f"{where} has a list without a value in {name!r}, row {row} ({entries.null_count} missing up to row "
            f"{before + len(column)}): {_WAYS}"
        )
    return arrow_array(where, name, entries, None, options, before)


def _plain(column: Any) -> Any:
    """One array of plain values: chunks joined, categories decoded."""
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _filled(where: str, name: str, column: Any, options: ColumnOptions, before: int) -> Any:
    """The column without nulls, if the options say what stands for them; NaN where a user may add nothing."""
    import pyarrow as pa

    stand_in, fractions = options.fill_of(name), pa.types.is_floating(column.type)
    if stand_in is None and options.missing == ZERO_UPDATE and fractions:
        return column  # as NumPy, its nulls are NaN
    if stand_in is None:
        ways = _WAYS if fractions else _WAYS_TEXT if is_text(column.type) else _WAYS_WHOLE
        raise _gap(where, name, column, before, ways)
    try:
        if is_text(column.type) != isinstance(stand_in, str):
            raise TypeError
        return column.fill_null(pa.scalar(stand_in).cast(column.type))  # which refuses 0.5 among whole numbers
    except (pa.ArrowException, TypeError, ValueError):
        raise SettingError(f"{stand_in!r} cannot fill {name!r}, which is {column.type}: give another fill") from None


def _type_of_gaps(name: str, options: ColumnOptions) -> Any:
    """What a column without a single value would hold, as its options have it."""
    import pyarrow as pa

    if name in options.categories:
        return pa.string()
    if name in options.timestamps:
        return pa.timestamp("us")
    stand_in = options.fill_of(name)
    return pa.float64() if stand_in is None else pa.scalar(stand_in).type


def _gap(where: str, name: str, column: Any, before: int, ways: str) -> PopulationError:
    rows = np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))
    return PopulationError(
        f"{where} has no value for {name!r} in row {before + int(rows[0]) + 1} ({len(rows)} missing up to row "
        f"{before + len(column)}): {ways}"
    )


def _is_list(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_binary(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
