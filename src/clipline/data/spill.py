"""The first pass of grouping by user: chunks are spilled to disk as they come, and each user's rows are counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError
from .array_checks import check_finite
from .chunks import FieldChunk, text_array
from .fields import not_numbers
from .manifest import check_field_names
from .packed_field import Field, PackedField, stored_values
from .user_ids import check_text_id

_NUMBERS = "biuf"  # NumPy's kinds of numbers that a store can hold


class Spill:
    """Rows in the order they came: one raw file for each field, two of lists, and one that says whose each row is.

    Memory grows with the number of users, never with the number of examples. Users are numbered by codes, given in
    order of first appearance.
    """

    def __init__(self, folder: Path, *, finite: bool = True) -> None:
        self.folder, self.finite = folder, finite
        self.codes: dict[int | str, int] = {}
        self.counts: list[int] = []  # rows of each user, by code
        self.layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}  # field -> type and shape of one row
        self.packed: dict[str, PackedField] = {}  # fields of lists; of each no row, for width and pad
        self.rows = 0
        self._files: dict[str, IO[bytes]] = {}

    def owners(self) -> Path:
        """The file with the code of every row's user, int64."""
        return self.folder / "owners.raw"

    def field(self, name: str) -> Path:
        """The file with one field's rows, or the entries of its lists, raw."""
        return self.folder / f"field.{name}.raw"

    def sizes(self, name: str) -> Path:
        """The file with the number of entries of each list of a packed field, int64."""
        return self.folder / f"sizes.{name}.raw"

    def add_user(self, user: int | str) -> int:
        """The code of a user, new or known; a user may have no row at all."""
        code = self.codes.setdefault(user, len(self.codes))
        if code == len(self.counts):
            first = next(iter(self.codes))
            if type(first) is not type(user):
                raise PopulationError("user ids are numbers in some rows and text in others: give one kind only")
            if isinstance(user, str):
                check_text_id(user)
            self.counts.append(0)
        return code

    def add(self, chunk: FieldChunk) -> None:
        """Append the rows of a chunk. The first chunk fixes the fields; a later one that differs is refused."""
        users = _checked_ids(np.asarray(chunk[0]))
        arrays = {
            name: field if isinstance(field, PackedField) else np.asarray(field) for name, field in chunk[1].items()
        }
        if "" in users:
            row, last = self.rows + users.index("") + 1, self.rows + len(users)
            raise PopulationError(
                f"row {row} has an empty user id ({users.count('')} have one up to row {last}): "
                "drop the rows without a user"
            )
        self._check(len(users), arrays)
        for user, count in Counter(users).items():
            self.counts[self.add_user(user)] += count
        self._append(self.owners(), np.fromiter(map(self.codes.__getitem__, users), np.int64, len(users)))
        for name, array in arrays.items():
            assert isinstance(array, PackedField) == (
                name in self.packed
            )  # as options say, which are those of all rows
            if isinstance(array, PackedField):
                self._append(self.sizes(name), np.diff(array.offsets))
            self._append(self.field(name), np.ascontiguousarray(stored_values(array), dtype=self.layout[name][0]))
        self.rows += len(users)

    def close(self) -> None:
        """Finish writing."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, path: Path, array: NDArray[Any]) -> None:
        if path.name not in self._files:
            self._files[path.name] = path.open("wb")
        self._files[path.name].write(array.data if array.size else b"")

    def _check(self, rows: int, arrays: dict[str, Field]) -> None:
        for name, array in arrays.items():
            if array.ndim == 0 or len(array) != rows:
                found = 0 if array.ndim == 0 else len(array)
                raise PopulationError(
                    f"field {name!r} has {found} rows but must have {rows}, one for each user id: "
                    "give arrays of equal length"
                )
        if not self.layout:
            self._begin(arrays)
        if set(arrays) != set(self.layout):
            odd = sorted(set(arrays) ^ set(self.layout))[0]
            raise PopulationError(
                f"field {odd!r} is in some rows before row {self.rows + rows} and missing in others: "
                "give every example the same fields"
            )
        for name, array in arrays.items():
            dtype, shape = self.layout[name]
            if (array.dtype.newbyteorder("="), array.shape[1:]) != (dtype, shape):
                raise PopulationError(
                    f"field {name!r} has rows of {array.dtype}{list(array.shape[1:])} after row {self.rows} but began "
                    f"with {dtype}{list(shape)}: give every example the same type and shape"
                )
            if self.finite:
                check_finite(f"field {name!r}, rows {self.rows + 1} to {self.rows + rows},", array)

    def _begin(self, arrays: dict[str, Field]) -> None:
        if not arrays:
            raise PopulationError("examples have 0 fields but need at least 1: choose other columns than the user's")
        check_field_names(arrays)
        for name, array in arrays.items():
            if array.dtype.kind not in _NUMBERS or array.dtype.char == "g":  # "g": torch has no long double
                what = "text" if array.dtype.kind in "OUS" else str(array.dtype)
                raise not_numbers(name, what, array[:] if what == "text" else None)
            self.layout[name] = array.dtype.newbyteorder("="), array.shape[1:]
            if isinstance(array, PackedField):
                self.packed[name] = array.take(np.zeros(0, np.int64))


def _checked_ids(ids: NDArray[Any]) -> list[int | str]:
    """Ids as whole numbers or as text; anything else cannot name a user safely."""
    if ids.ndim != 1:
        raise PopulationError(f"user ids have shape {ids.shape} but must have one axis: give one id for each example")
    if ids.dtype.kind in "SO" and all(isinstance(user, str | bytes) for user in ids):
        ids = text_array(ids, "user ids")
    elif ids.dtype.kind not in "iuU":
        raise PopulationError(
            f"user ids are {ids.dtype} with gaps or fractions but must be whole numbers or text: "
            "convert them, or drop the rows without a user"
        )
    users: list[int | str] = ids.tolist()
    return users
