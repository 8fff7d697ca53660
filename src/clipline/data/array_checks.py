"""Checks of the arrays that a population is made of: offsets, fields and ids, without copies of long ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError
from .packed_field import Field, PackedField

_STEP = 1 << 16  # entries of a long array to look at in one go: few enough for the cache


def check_finite(where: str, values: Field) -> None:
    """Refuse NaN and infinity, and what float32 would make infinity of; `where` names the values in the error.

    Training would go on without a word, and the users who have them would add nothing.
    """
    if isinstance(values, PackedField):
        if values.has_padding:
            check_finite(where, values.pad.reshape(1))
        values = values.values
    if values.dtype.kind not in "fc" or not values.size:
        return
    step = max(1, 8 * _STEP * len(values) // max(1, values.nbytes))  # rows: few enough for the cache
    missing = endless = 0
    for start in range(0, len(values), step):
        sizes = np.abs(values[start : start + step])
        bad = ~(sizes <= np.finfo(np.float32).max if sizes.dtype.itemsize > 4 else np.isfinite(sizes))
        if bad.any():
            missing += int(np.isnan(sizes).sum())
            endless += int(bad.sum()) - int(np.isnan(sizes).sum())
    if missing:
        raise PopulationError(
            f"{where} has {missing} of {values.size} values missing (NaN) but needs all: drop these examples, fill "
            'them with missing=0.0 or fill={field: 0}, or keep them with missing="zero-update", where who has one adds '
            "nothing"
        )
    if endless:
        raise PopulationError(
            f"{where} has {endless} of {values.size} values infinite or above 3.4e38, the limit of float32: drop or "
            'bound them, as with np.clip, or keep them with missing="zero-update": who has one adds nothing'
        )


def checked_offsets(offsets: object) -> NDArray[np.int64]:
    """`offsets` as int64 if they are running totals from 0 on: with others, one row would belong to two users."""
    if not isinstance(offsets, np.ndarray) or offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        found = f"{offsets.dtype} of shape {offsets.shape}" if isinstance(offsets, np.ndarray) else _type(offsets)
        raise PopulationError(
            f"offsets are {found} but must be a NumPy array of whole numbers with one axis: give np.cumsum of the sizes"
        )
    if len(offsets) < 2:
        raise PopulationError("population has 0 users but needs at least 1: give the user id of every example")
    offsets = offsets if offsets.dtype == np.int64 else offsets.astype(np.int64)
    if int(offsets[0]) != 0:
        raise PopulationError(f"offsets start at {int(offsets[0])} but must start at 0: give users+1 offsets")
    if any(bool((part[1:] < part[:-1]).any()) for part in overlapping(offsets)):
        raise PopulationError("offsets fall somewhere but must never fall: give running totals of the user sizes")
    return offsets


def check_field(name: object, field: object, examples: int) -> None:
    """Refuse a field that has another name than text, another number of rows, or something else than numbers."""
    if not isinstance(name, str):
        raise PopulationError(f"field {name!r} must be named by text: rename it")
    if not isinstance(field, np.ndarray | PackedField) or field.ndim == 0:
        raise PopulationError(
            f"field {name!r} is {_type(field)} but must be a NumPy array with one row an example: convert it"
        )
    if len(field) != examples:
        raise PopulationError(
            f"field {name!r} has {len(field)} rows but must have {examples}, one for each example: "
            "give arrays of equal length"
        )
    # What torch can take. Python objects would be stored as pickles as well, which run code when they are opened.
    if field.dtype.kind not in "biufc" or field.dtype.char in "gG" or not field.dtype.isnative:
        raise PopulationError(
            f"field {name!r} is {field.dtype} but must hold numbers that torch knows: convert it, as with "
            "astype(np.float32) or astype(np.int64)"
        )


def check_user_ids(ids: object, users: int) -> None:
    """Refuse ids that do not name each user once: who has two entries would count as two users."""
    if not isinstance(ids, np.ndarray):
        raise PopulationError(f"user_ids are {_type(ids)} but must be a NumPy array: convert them with np.asarray")
    check_ids("user_ids", ids, "give each user's id once, or leave user_ids out")
    if len(ids) != users:
        raise PopulationError(
            f"user_ids has {len(ids)} entries but must have {users}, one for each user: "
            "give each user's id once, or leave user_ids out"
        )
    if not (_rise(ids) or _rise(np.sort(ids))):  # those of a store are sorted already
        raise PopulationError(
            "user_ids name somebody twice but each entry must be another user: join the rows of one user, as "
            "Population.from_arrays does"
        )


def check_ids(name: str, ids: NDArray[Any], way_out: str) -> None:
    """Refuse what cannot name users: another number of axes, objects, dates, NaN."""
    if ids.ndim != 1:
        raise PopulationError(f"{name} has shape {ids.shape} but must have one axis: {way_out}")
    if ids.dtype.kind == "O":
        raise PopulationError(f"{name} mixes types or holds None but must be all numbers or all text: convert it")
    if ids.dtype.kind not in "biufUS":
        raise PopulationError(f"{name} are {ids.dtype} but must be numbers or text: convert it, as with astype(str)")
    starts = range(0, len(ids) if ids.dtype.kind == "f" else 0, _STEP)
    if bad := sum(int((~np.isfinite(ids[start : start + _STEP])).sum()) for start in starts):
        raise PopulationError(
            f"{name} holds NaN or infinity {bad} times among {len(ids)} ids but must hold finite ids: "
            "drop those examples first"
        )


def _rise(ids: NDArray[Any]) -> bool:
    """Whether each is above the one before, so that all are distinct."""
    return all(bool((part[1:] > part[:-1]).all()) for part in overlapping(ids))


def overlapping(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array part by part, each beginning with the last entry of the one before: a map is not held in memory."""
    return (array[start : start + _STEP + 1] for start in range(0, len(array) - 1, _STEP))


def _type(thing: object) -> str:
    return f"of type {type(thing).__name__}"
