"""A field of lists: the entries of all rows end to end and an offset for each row, padded only as rows are read.

The width is declared, so that a row looks the same whatever other rows there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError

_STEP = 1 << 16  # offsets to look at in one go: those of a store are a memory map
_LONG = 100  # entries of a row on average, from which copying row by row is faster than by an index of all entries


@dataclass(frozen=True, eq=False, repr=False)
class PackedField(np.lib.mixins.NDArrayOperatorsMixin):
    """Reads as the array (rows, width, ...) in which row i has its entries first and `pad` in all places after them.

    Length, `shape`, `dtype` and `nbytes` are those of this array, and an index gives what it would give: rows by number
    or slice are made when they are asked for. `np.asarray` makes all of it, and so does whatever else is asked of it as
    of an array, such as `field == 3` or `field.max()`. It cannot be written to.
    """

    values: NDArray[Any]  # (entries, ...): those of row i are offsets[i]:offsets[i + 1]
    offsets: NDArray[np.int64]  # (rows + 1,), from 0 to the number of entries, rising by at most `width`
    width: int
    pad: NDArray[Any]  # (), of the type of the values

    def __post_init__(self) -> None:
        if self.values.ndim == 0 or self.offsets.ndim != 1 or self.offsets.dtype != np.int64 or not len(self.offsets):
            raise PopulationError(
                f"offsets of lists are {self.offsets.dtype} of shape {self.offsets.shape} but must be int64 with one "
                "axis, beside values with at least one: prepare or save the data again"
            )
        ends = int(self.offsets[0]), int(self.offsets[-1])
        if ends != (0, len(self.values)):
            raise PopulationError(
                f"offsets of lists go from {ends[0]} to {ends[1]} but must go from 0 to {len(self.values)}, the number "
                "of entries: prepare or save the data again"
            )
        for start in range(0, len(self), _STEP):
            sizes = np.diff(self.offsets[start : start + _STEP + 1])
            if int(sizes.min()) < 0 or int(sizes.max()) > self.width:
                raise PopulationError(
                    f"offsets of lists rise by {sizes.min()} to {sizes.max()} but must by 0 to the width of "
                    f"{self.width}: prepare or save the data again"
                )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, width, and the shape of an entry."""
        return (len(self), self.width, *self.values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the values."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Number of axes, at least 2."""
        return self.values.ndim + 1

    @property
    def size(self) -> int:
        """Number of values, padding included."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one value."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, padding included: what they take where they are padded, as on a GPU."""
        return self.size * self.itemsize

    @property
    def has_padding(self) -> bool:
        """Whether a row is shorter than the width."""
        return len(self.values) < len(self) * self.width

    def __getitem__(self, rows: Any) -> Any:
        """What the padded array gives for this index; only rows that a slice or an array of numbers names are made."""
        if isinstance(rows, slice | np.ndarray):
            return self._padded(*self._starts_and_sizes(rows))
        if isinstance(rows, int | np.integer):
            return self[np.array([rows])][0]
        return np.asarray(self)[rows]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("a packed field has no padded array to share: leave copy=False out")
        padded: NDArray[Any] = self[:]
        return padded if dtype is None else padded.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Arithmetic and comparisons, of the padded array."""
        plain = [np.asarray(one) if isinstance(one, PackedField) else one for one in inputs]
        return getattr(ufunc, method)(*plain, **options)

    def __getattr__(self, name: str) -> Any:
        """What else an array has, of the padded one: users' code may take a field for an array."""
        if name.startswith("_") or not hasattr(np.ndarray, name):
            raise AttributeError(f"a packed field has no {name!r}, and neither has an array")
        padded = np.asarray(self)
        padded.flags.writeable = False  # else what sorts or fills in place would do so to this copy, and nobody see it
        return getattr(padded, name)

    def __repr__(self) -> str:
        return f"PackedField({len(self)} rows of at most {self.width}, {self.dtype})"

    def min(self) -> Any:
        """The smallest value, that of padding included where there is some."""
        if not len(self.values):
            return self.pad[()]
        return np.minimum(self.values.min(), self.pad) if self.has_padding else self.values.min()

    def astype(self, dtype: Any, copy: bool = True) -> PackedField:
        """The same in another type; itself if it has this type already and `copy` is False."""
        if self.dtype == dtype and not copy:
            return self
        return self.converted(lambda values: values.astype(dtype))

    def converted(self, convert: Callable[[NDArray[Any]], NDArray[Any]]) -> PackedField:
        """The same lists with other values, each a function of the one before: `convert` keeps shapes."""
        return replace(self, values=convert(self.values), pad=np.asarray(convert(self.pad)))

    def take(self, rows: NDArray[np.int64]) -> PackedField:
        """These rows (count,) in this order, packed, as a copy."""
        starts, sizes = self._starts_and_sizes(rows)
        values = np.asarray(self.values)[entry_places(starts, sizes)]
        return replace(self, values=values, offsets=offsets_of(sizes))

    def _starts_and_sizes(self, rows: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts, stops = np.asarray(self.offsets[:-1])[rows], np.asarray(self.offsets[1:])[rows]
        return starts, stops - starts

    def _entries(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[Any]:
        """The entries of rows end to end; a view where that is how they lie."""
        values = np.asarray(self.values)
        if len(starts) and (starts[1:] == starts[:-1] + sizes[:-1]).all():
            return values[starts[0] : starts[-1] + sizes[-1]]
        return values[entry_places(starts, sizes)]

    def _padded(self, starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[Any]:
        """Rows that begin at these places and have these sizes, (*sizes.shape, width, ...)."""
        padded = np.full((*sizes.shape, self.width, *self.values.shape[1:]), self.pad, self.dtype)
        first, count = starts.reshape(-1), sizes.reshape(-1)
        if int(count.sum()) < _LONG * len(count):
            padded[np.arange(self.width) < sizes[..., None]] = self._entries(first, count)
            return padded
        rows, values = padded.reshape(len(count), *padded.shape[sizes.ndim :]), np.asarray(self.values)
        for row, start, size in zip(rows, first.tolist(), count.tolist(), strict=True):
            row[:size] = values[start : start + size]
        return padded


Field: TypeAlias = NDArray[Any] | PackedField  # (examples, ...)


def offsets_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Running totals from 0 on, one more than there are sizes."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def entry_places(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of the entries of some rows, row by row: `sizes[0]` from `starts[0]` on, and so forth."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(starts - before, sizes) + np.arange(int(sizes.sum()))


def taken(field: Field, rows: NDArray[np.int64]) -> Field:
    """These rows in this order, as a copy; lists stay packed."""
    return field.take(rows) if isinstance(field, PackedField) else field[rows]


def joined(parts: Sequence[Field]) -> Field:
    """The rows of all parts, which have one type, shape and padding."""
    first = parts[0]
    if not isinstance(first, PackedField):
        return np.concatenate(parts)
    lists = [part for part in parts if isinstance(part, PackedField)]
    sizes = np.concatenate([np.diff(part.offsets) for part in lists])
    return replace(first, values=np.concatenate([part.values for part in lists]), offsets=offsets_of(sizes))


def stored_values(field: Field) -> NDArray[Any]:
    """The array that holds a field's values: the field itself, or of a packed one its values without padding."""
    return field.values if isinstance(field, PackedField) else field


def is_mapped(field: Field) -> bool:
    """Whether a field is a memory map of a file, so that reading all of it may take long."""
    return isinstance(stored_values(field), np.memmap)
