"""Dataframes with a user column, of pandas, polars or pyarrow, as one chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import PopulationError
from ..chunks import Chunk, Text, columns_of, short
from ..spill import not_numbers
from .tables import arrow_chunk

_WAY_OUT = "give a DataFrame of pandas or polars, or a Table of pyarrow"


def read_dataframe(frame: Any, user_column: str, *, fields: Sequence[str] | None, text: Text | None) -> Chunk:
    """All rows of a dataframe, by the rules of `read_table`, copied. The index of a pandas dataframe is not a column.

    Neither pandas nor polars is imported here: a caller who has one of their dataframes has done so. NaN in pandas
    means a missing value, and missing values are refused.
    """
    names, table = _arrow_table(frame, user_column, fields)
    ids, arrays = arrow_chunk("dataframe", table, user_column, names, text, 0)
    for name, array in arrays.items():
        if array.dtype.kind in "OUS":
            raise not_numbers(name, "text")
    if ids.dtype.kind not in "iuUO":
        raise PopulationError(
            f"user column {user_column!r} is {ids.dtype} but must hold whole numbers or text: convert it"
        )
    if ids.dtype == object and "" in ids:
        row = ids.tolist().index("") + 1
        raise PopulationError(f"row {row} has an empty user id: drop the rows without a user")
    # Arrow's arrays may be views of the caller's memory that cannot be written to, which torch warns of.
    return ids, {name: np.array(array) for name, array in arrays.items()}


def _arrow_table(frame: Any, user_column: str, fields: Sequence[str] | None) -> tuple[list[str], Any]:
    """The fields to read, and a pyarrow table that has them and the user column."""
    import pyarrow as pa

    try:
        if type(frame).__module__.partition(".")[0] == "pandas" and hasattr(frame, "columns"):
            names = columns_of("dataframe", list(frame.columns), user_column, fields)
            for name in names:
                if not isinstance(name, str):
                    raise PopulationError(f"field {name!r} must be named by text: rename it")
            return names, pa.Table.from_pandas(frame[[user_column, *names]], preserve_index=False)
        if hasattr(frame, "__arrow_c_stream__"):  # what polars, pyarrow and others share
            table = pa.table(frame)
            return columns_of("dataframe", table.column_names, user_column, fields), table
    except (pa.ArrowException, AttributeError) as error:
        raise PopulationError(f"dataframe cannot be read ({short(error)}): {_WAY_OUT}") from None
    raise PopulationError(f"frame is of type {type(frame).__name__} but must be a dataframe: {_WAY_OUT}")
