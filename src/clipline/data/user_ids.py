"""Ids of users from whatever holds them: lists, NumPy, pandas, polars, pyarrow, with text, whole numbers or UUIDs.

A missing id is refused everywhere: all rows without one would become one user, or each a user of its own, and nobody
could say whose privacy they fall under.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError

LONGEST_ID = 1024  # letters


def ids_array(name: str, values: Any) -> NDArray[Any]:
    """Ids as an array (examples,) of numbers, `str` or `bytes`. UUIDs become text, as `str` writes them.

    `name` is what errors call them. Refused: missing ids, empty ones, several kinds at once, dates. No message has an
    id in it.
    """
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | range):
        array = _objects(values)  # NumPy would make text of [1, "a"], and "nan" of a gap among texts
    else:
        try:
            array = np.asarray(values)
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise PopulationError(
                f"{name} cannot become a NumPy array ({type(error).__name__}): give one id for each example"
            ) from None
    if array.ndim != 1:
        raise PopulationError(f"{name} has shape {array.shape} but must have one axis: give one id for each example")
    if array.dtype.kind in "OT":
        return _of_objects(name, array.tolist())
    if array.dtype.kind == "f":
        refuse_missing(name, int(np.isnan(array).sum()), len(array))
    if array.dtype.kind in "US":
        _refuse_empty(name, int((array == array.dtype.type()).sum()), len(array))
    return array


def refuse_missing(name: str, missing: int, rows: int) -> None:
    """Raise if any id is missing."""
    if missing:
        raise PopulationError(
            f"{name} has {missing} of {rows} ids missing (None, NaN or null) but every example needs its user: drop "
            "these examples, as with df.dropna(subset=[...]), or give each the id of its user"
        )


def check_text_id(user: str | bytes) -> None:
    """Refuse an id that an array of text cannot hold: it has room for the longest, and drops NULs at the end."""
    if len(user) > LONGEST_ID:
        raise PopulationError(f"a user id has {len(user)} letters but may have {LONGEST_ID}: give shorter ids")
    if user[-1:] in ("\0", b"\0"):
        raise PopulationError("a user id ends in a NUL byte but must end in a letter: rename the user, as with .hex()")


def is_text(kind: Any) -> bool:
    """Whether a type of Arrow is text."""
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_missing(one: object) -> bool:
    """Whether this stands for no value: None, NaN, or NaT and NA of pandas, which need not be imported to be known."""
    if one is None or type(one).__name__ in ("NAType", "NaTType"):
        return True
    if isinstance(one, np.datetime64 | np.timedelta64):
        return bool(np.isnat(one))
    return isinstance(one, float | np.floating) and bool(one != one)


def listed(values: Any) -> Any:
    """What a column of any library or an array holds, as Python's own; anything else as it is."""
    for method in ("to_pylist", "to_list", "tolist"):  # columns of pyarrow, of polars and pandas; arrays and tensors
        if hasattr(values, method):
            return getattr(values, method)()
    return values


def _objects(values: Sequence[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    for place, one in enumerate(values):
        array[place] = one
    return array


def _of_objects(name: str, ids: list[Any]) -> NDArray[Any]:
    """Ids that are Python objects, as an array of one type."""
    refuse_missing(name, sum(map(is_missing, ids)), len(ids))
    kinds = {_kind(one) for one in ids}
    if len(kinds) > 1 or kinds & {"other"}:
        found = sorted({type(one).__name__ for one in ids} if "other" in kinds else kinds)
        raise PopulationError(
            f"{name} mixes types or holds objects ({', '.join(found)}) but must hold one kind, text or whole numbers: "
            "convert it, as with astype(str)"
        )
    kind = kinds.pop() if kinds else "whole numbers"
    if kind == "UUID":
        return np.array([str(one) for one in ids])
    if kind in ("text", "bytes"):
        _refuse_empty(name, sum(not one for one in ids), len(ids))
        for one in ids:
            check_text_id(one)
        return np.array(ids)
    if kind == "fractions":
        return np.array(ids, np.float64)
    return np.array(ids, np.int64 if kind == "whole numbers" else np.uint64)


def _refuse_empty(name: str, empty: int, rows: int) -> None:
    if empty:
        raise PopulationError(
            f"{name} has {empty} of {rows} ids empty but every example needs its user: drop these examples, or give "
            "each the id of its user"
        )


def _kind(one: object) -> str:
    if isinstance(one, str):
        return "text"
    if isinstance(one, bytes):
        return "bytes"
    if isinstance(one, UUID):
        return "UUID"
    if isinstance(one, bool | np.bool_ | int | np.integer):
        number = int(one)
        if -(2**63) <= number < 2**63:
            return "whole numbers"
        return "whole numbers beyond 64 bits with a sign" if 0 <= number < 2**64 else "other"
    return "fractions" if isinstance(one, float | np.floating) else "other"
