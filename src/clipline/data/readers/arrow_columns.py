"""Columns of Arrow, which most tables pass through, as user ids and as fields with their options applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError, SettingError
from ..chunks import FieldChunk, Text
from ..column_options import ZERO_UPDATE, ColumnOptions
from ..fields import each_field, list_fields, not_numbers, packed
from ..packed_field import Field
from ..user_ids import is_text

DEEPEST = 32  # nested lists; no version of NumPy allows fewer axes
_WAYS_WHOLE = (
    "fill the gaps, drop the rows (of a label) or leave the column out; fill={column: 0} or missing=0 fills them"
)
_WAYS = f'{_WAYS_WHOLE}, missing="zero-update" keeps them'


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
        raise _gap(where, name, column, before, _WAYS if fractions else _WAYS_WHOLE)
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
