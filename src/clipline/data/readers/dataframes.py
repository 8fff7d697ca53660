"""Dataframes with a user column, of pandas, polars, pyarrow or Hugging Face, and torch datasets, as one chunk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError, nearest
from ..chunks import FieldChunk, Text, columns_of, short
from ..column_options import NO_OPTIONS, ColumnOptions
from ..fields import arrow_fields, arrow_ids, check_length_fields, numbers_only, validated, without_lengths
from ..packed_field import Field, PackedField
from ..user_ids import ids_array

_WAY_OUT = "give a DataFrame of pandas or polars, or a Table of pyarrow"


def read_dataframe(
    frame: Any,
    user_column: str,
    *,
    fields: Sequence[str] | None = None,
    text: Text | None = None,
    options: ColumnOptions = NO_OPTIONS,
) -> FieldChunk:
    """All rows of a dataframe, by the rules of `read_table`, copied. The index of a pandas dataframe is not a column.

    Neither pandas nor polars is imported here: a caller who has one of their dataframes has done so. NaN in pandas
    means a missing value.
    """
    pandas = _is_pandas(frame)
    if pandas and user_column not in frame.columns and user_column in frame.index.names:
        raise PopulationError(f"user column {user_column!r} is the index but must be a column: give df.reset_index()")
    columns = columns_of("dataframe", column_names(frame), user_column, fields)
    options.check_columns(columns)
    check_length_fields(columns, options)
    table = _arrow_table(frame, columns if pandas else [user_column, *columns])
    # pandas holds UUIDs and other objects that Arrow does not know.
    ids = frame[user_column] if pandas else arrow_ids("dataframe", user_column, table.column(user_column), 0)
    ids = ids_array(f"user column {user_column!r}", ids)
    if ids.dtype.kind not in "iuUS":
        raise PopulationError(
            f"user column {user_column!r} is {ids.dtype} but must hold whole numbers or text: convert it, as with "
            "astype('int64') or astype(str)"
        )
    return ids, _arrays(table, columns, text, options)


def read_rows(
    frame: Any, *, fields: Sequence[str] | None = None, options: ColumnOptions = NO_OPTIONS
) -> dict[str, Field]:
    """All rows of a dataframe that has no users, by the rules of `read_dataframe`."""
    names = column_names(frame)
    for name in fields or ():
        if name not in names:
            raise PopulationError(f"dataframe has no column {name!r}: {nearest(name, map(str, names))}")
    columns = names if fields is None else list(fields)
    options.check_columns(columns)
    check_length_fields(columns, options)
    return _arrays(_arrow_table(frame, columns), columns, None, options)


def read_fields(
    frame: Any, fields: Iterable[str], *, text: Text | None = None, options: ColumnOptions = NO_OPTIONS
) -> dict[str, NDArray[Any]]:
    """Those of the fields that a dataframe has, without users, lists padded; at least one has to be there."""
    names = column_names(frame)
    wanted = without_lengths(fields, options.entries())
    present = [name for name in wanted if name in names]
    if not present:
        raise PopulationError(f"dataframe has none of the fields: {nearest(wanted[0], map(str, names))}")
    fields = _arrays(_arrow_table(frame, present), present, text, options)
    return {name: np.asarray(field) for name, field in fields.items()}


def read_column(frame: Any, name: str) -> list[Any]:
    """One column of a dataframe as Python values."""
    names = column_names(frame)
    if name not in names:
        raise PopulationError(f"dataframe has no column {name!r}: {nearest(name, map(str, names))}")
    values: list[Any] = _arrow_table(frame, [name]).column(name).to_pylist()
    return values


def read_dataset(
    dataset: Any, user_ids: Any, fields: Sequence[str], ragged: Container[str]
) -> tuple[Any, dict[str, Any]]:
    """Ids and fields of a torch `Dataset`. Its items are tuples, dicts or single values, of tensors or numbers.

    Fields in `ragged` stay lists, one an item.
    """
    if is_dataframe(dataset):
        raise PopulationError("dataset is a dataframe but must be a torch Dataset: use Population.from_dataframe")
    if hasattr(dataset, "dataset") and hasattr(dataset, "batch_size"):
        raise PopulationError(
            "dataset is a DataLoader but must be a torch Dataset, as clipline makes the batches itself: give "
            "from_dataset(loader.dataset, user_ids)"
        )
    try:
        items = [dataset[place] for place in range(len(dataset))]
    except TypeError:
        raise PopulationError(
            f"dataset is of type {type(dataset).__name__} but must have a length and items by number: "
            "give a torch Dataset, not an iterable one"
        ) from None
    if not items:
        raise PopulationError("dataset has 0 items but needs at least 1: give examples")
    if not isinstance(items[0], Mapping):
        rows = [item if isinstance(item, tuple | list) else (item,) for item in items]
        if {len(row) for row in rows} != {len(fields)}:
            raise PopulationError(
                f"fields={list(fields)} are {len(fields)} but items have {len(rows[0])} entries: "
                "name each in fields=..."
            )
        items = [dict(zip(fields, row, strict=True)) for row in rows]
    names = list(items[0])
    if any(item.keys() != items[0].keys() for item in items):
        raise PopulationError("items have different keys but need the same: give every example the same fields")
    if isinstance(user_ids, str):
        if user_ids not in names:
            raise PopulationError(f"items have no key {user_ids!r} for the user: {nearest(user_ids, names)}")
        names.remove(user_ids)
        user_ids = [_value(item[user_ids]) for item in items]
    columns = {name: [item[name] for item in items] for name in names}
    return user_ids, {name: rows if name in ragged else _stacked(name, rows) for name, rows in columns.items()}


def _stacked(name: str, values: list[Any]) -> NDArray[Any]:
    try:
        return np.stack([np.asarray(value) for value in values])
    except (ValueError, TypeError, RuntimeError):
        raise PopulationError(
            f"field {name!r} has items of different shapes, or that are no arrays: give equal shapes, or "
            f"lengths={{{name!r}: 128}}"
        ) from None


def _value(one: Any) -> Any:
    """An id, out of a tensor or array that holds only it."""
    return one.item() if hasattr(one, "item") else one


def _arrays(table: Any, names: list[str], text: Text | None, options: ColumnOptions) -> dict[str, Field]:
    arrays = arrow_fields("dataframe", table, names, text, options, 0)
    # Arrow's arrays may be views of the caller's memory that cannot be written to, which torch warns of.
    return {name: _own_numbers(name, array) for name, array in arrays.items()}


def _own_numbers(name: str, field: Field) -> Field:
    if isinstance(field, PackedField):  # a copy already
        return field.converted(lambda values: numbers_only(name, values))
    return np.array(numbers_only(name, field))


def _is_pandas(frame: Any) -> bool:
    return type(frame).__module__.partition(".")[0] == "pandas" and hasattr(frame, "columns")


def is_dataframe(frame: Any) -> bool:
    """Whether it is a dataframe of pandas, or of others that give theirs to Arrow, as polars and pyarrow do."""
    return _is_pandas(frame) or (hasattr(frame, "__arrow_c_stream__") and not _is_hugging_face(frame))


def _is_hugging_face(frame: Any) -> bool:
    return type(frame).__module__.partition(".")[0] == "datasets" and hasattr(frame, "with_format")


def column_names(frame: Any) -> list[Any]:
    """The names of all columns, of any kind of dataframe."""
    if _is_pandas(frame):
        return list(frame.columns)
    if hasattr(frame, "column_names") and (_is_hugging_face(frame) or hasattr(frame, "__arrow_c_stream__")):
        if isinstance(frame.column_names, dict):
            raise PopulationError("dataset has several splits but a population is one: give one, as dataset['train']")
        if not hasattr(frame, "__len__"):  # of datasets, as with streaming=True
            raise PopulationError("dataset is streamed but all rows are needed: load it without streaming=True")
        return list(frame.column_names)
    if hasattr(frame, "__arrow_c_stream__") and hasattr(frame, "columns"):  # polars and others
        return list(frame.columns)
    way_out = "give frame.collect()" if hasattr(frame, "collect") else _WAY_OUT
    raise PopulationError(f"frame is of type {type(frame).__name__} but must be a dataframe: {way_out}")


def _arrow_table(frame: Any, names: Sequence[str]) -> Any:
    """A pyarrow table with these columns."""
    import pyarrow as pa

    for name in names:
        if not isinstance(name, str):
            raise PopulationError(f"field {name!r} must be named by text: rename it")
    times = Counter(column_names(frame))
    for name in names:
        if times[name] > 1:
            raise PopulationError(f"dataframe has {times[name]} columns named {name!r}: rename all but one")
    try:
        if _is_pandas(frame):  # whose other columns may be none that Arrow knows
            frame = frame[list(names)]
        elif _is_hugging_face(frame):  # which may be a choice of rows of its table
            frame = frame.with_format("arrow")[:]
        return validated(pa.table(frame), names)
    except (pa.ArrowException, AttributeError) as error:
        mend = "give its columns one kind of value each, as with astype(str), or leave them out"
        way_out = mend if isinstance(error, pa.ArrowException) else _WAY_OUT
        raise PopulationError(f"dataframe cannot be read ({_without_values(error)}): {way_out}") from None


def _without_values(error: BaseException) -> str:
    """What Arrow says, less a message that quotes a value; the one behind it names the column."""
    words = [str(word) for word in error.args if "Could not convert" not in str(word)]
    return short(ValueError(words[-1])) if words else "a column mixes kinds of values"
