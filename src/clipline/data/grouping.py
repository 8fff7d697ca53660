"""Rows of users in any order, grouped by user in bounded memory.

Rows are collected until they fill the memory, sorted by user and put aside as a run. At the end the rows of as many
users as fit into memory are read from every run and joined. What fits into memory at once is never put aside.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError
from .array_checks import check_finite
from .chunks import FieldChunk, Progress, no_progress
from .fields import not_numbers
from .manifest import check_field_names
from .packed_field import Field, PackedField, joined, offsets_of, stored_values, taken
from .user_ids import LONGEST_ID, check_text_id, is_text

MEMORY_BYTES = 32 << 20
_NUMBERS = "biuf"  # NumPy's kinds of numbers that a store can hold
_INDEX_BYTES = 64  # working memory per row beside the row itself: owner, rank, order, position
_OWNERS = ""  # no field has this name


class Rows:
    """Rows with their users: `take_in` all, then get them by user with `parts`. To be used in a `with`.

    Memory grows with the number of users, never with the number of rows. Users who were put aside have codes, in order
    of first appearance. At the end everybody has a rank in order of the ids.
    """

    def __init__(self, folder: Path, memory: int | None = None, *, finite: bool) -> None:
        self.folder, self.finite = folder, finite
        self.memory = MEMORY_BYTES if memory is None else memory
        self.form: dict[str, Field] = {}  # each field without rows: its type, shape and padding
        self.count = 0
        self.entries: dict[str, int] = {}  # of each field: rows, or entries of its lists
        self._known: Any = None  # ids by code, a column of Arrow
        self._held: list[tuple[Any, dict[str, Field]]] = []
        self._held_bytes = 0
        self._runs: list[dict[str, int]] = []  # rows of each, and entries of each field of lists
        self._files: dict[str, IO[bytes]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    @property
    def in_memory(self) -> bool:
        """Whether nothing was put aside, so that there is one part."""
        return not self._runs

    def take_in(self, chunks: Iterable[FieldChunk], known_users: Iterable[int | str], source: str) -> None:
        """All rows, and then users who may have none; `user_ids`, sorted, are known afterwards."""
        for chunk in chunks:
            self.add(chunk)
        if self._runs and self._held:
            self._put_aside()
        others = list(known_users)
        columns = [*([] if self._known is None else [self._known]), *(ids for ids, _ in self._held)]
        columns += [_id_column(np.array(others, object))] if others else []
        if not sum(map(len, columns)) or not self.form:
            raise PopulationError(f"{source} holds no example: give a file with at least one")
        everybody, _ = _encoded(columns)
        _check_ids(everybody)
        order = _order_of(everybody)
        self._everybody, self._ranks = everybody, _inverse(order)
        self.user_ids = _ids_array(everybody.take(order))

    def add(self, chunk: FieldChunk) -> None:
        """Append the rows of a chunk. The first chunk fixes the fields; a later one that differs is refused."""
        ids = _id_column(chunk[0])
        fields: dict[str, Field] = {}
        for name, one in chunk[1].items():
            field = one if isinstance(one, PackedField) else np.asarray(one)
            fields[name] = field if field.dtype.isnative else field.astype(field.dtype.newbyteorder("="))
        self._check(ids, fields)
        self.count += len(ids)
        for name, field in fields.items():
            self.entries[name] = self.entries.get(name, 0) + len(stored_values(field))
        self._held.append((ids, fields))
        self._held_bytes += _INDEX_BYTES * len(ids) + sum(stored_values(field).nbytes for field in fields.values())
        if self._held_bytes > self.memory:
            self._put_aside()

    def parts(self, progress: Progress = no_progress) -> Iterator[tuple[NDArray[np.int64], dict[str, Field]]]:
        """All rows by user, some users at a time: how many rows each of these has, and the rows.

        A user's own rows are in the order in which they came. `progress` counts rows.
        """
        if self.in_memory:
            _, codes = _encoded([self._everybody, *(ids for ids, _ in self._held)])
            owners, fields = _sorted(self._ranks[codes[len(self._ranks) :]], [fields for _, fields in self._held])
            yield np.bincount(owners, minlength=len(self._ranks)), fields
            progress(self.count, self.count)
            return
        region, bounds = self._regions()
        first, done = 0, 0
        for number, users in enumerate(np.bincount(region).tolist()):
            rows = [self._read_region(number, places) for places in bounds]
            owners, fields = _sorted(np.concatenate([owners for owners, _ in rows]), [fields for _, fields in rows])
            yield np.bincount(owners - first, minlength=users), fields
            first, done = first + users, done + len(owners)
            progress(done, self.count)

    def _check(self, ids: Any, fields: Mapping[str, Field]) -> None:
        import pyarrow.compute as pc

        rows, last = len(ids), self.count + len(ids)
        if is_text(ids.type) and (empty := np.flatnonzero(pc.equal(ids, "").to_numpy(zero_copy_only=False))).size:
            raise PopulationError(
                f"row {self.count + int(empty[0]) + 1} has an empty user id ({len(empty)} have one up to row {last}): "
                "drop the rows without a user, or give each the id of its user"
            )
        for name, field in fields.items():
            if field.ndim == 0 or len(field) != rows:
                found = 0 if field.ndim == 0 else len(field)
                raise PopulationError(
                    f"field {name!r} has {found} rows but must have {rows}, one for each user id: "
                    "give arrays of equal length"
                )
        if not self.form:
            self._begin(fields)
        if set(fields) != set(self.form):
            odd = sorted(set(fields) ^ set(self.form))[0]
            raise PopulationError(
                f"field {odd!r} is in some rows before row {last} and missing in others: "
                "give every example the same fields"
            )
        for name, field in fields.items():
            form, shape = stored_values(self.form[name]), stored_values(field).shape[1:]
            if (field.dtype, shape) != (form.dtype, form.shape[1:]):
                raise PopulationError(
                    f"field {name!r} has rows of {field.dtype}{list(shape)} after row {self.count} but began "
                    f"with {form.dtype}{list(form.shape[1:])}: give every example the same type and shape"
                )
            if self.finite:
                check_finite(f"field {name!r}, rows {self.count + 1} to {last},", field)

    def _begin(self, fields: Mapping[str, Field]) -> None:
        if not fields:
            raise PopulationError("examples have 0 fields but need at least 1: choose other columns than the user's")
        check_field_names(fields)
        for name, field in fields.items():
            if field.dtype.kind not in _NUMBERS or field.dtype.char == "g":  # "g": torch has no long double
                what = "text" if field.dtype.kind in "OUS" else str(field.dtype)
                raise not_numbers(name, what, field[:] if what == "text" else None)
            self.form[name] = taken(field, np.zeros(0, np.int64))

    def _put_aside(self) -> None:
        """Sort the rows that are held by the ids of their users, and write them as a run."""
        here, owners = _encoded([ids for ids, _ in self._held])
        _check_ids(here)
        order = _order_of(here)
        owners, fields = _sorted(_inverse(order)[owners], [fields for _, fields in self._held])
        self._held, self._held_bytes = [], 0
        known = 0 if self._known is None else len(self._known)
        self._known, codes = _encoded([here] if self._known is None else [self._known, here])
        run = {_OWNERS: len(owners)}
        self._write(_OWNERS, codes[known:][order][owners])
        for name, field in fields.items():
            self._write(f"values {name}", stored_values(field))
            if isinstance(field, PackedField):
                self._write(f"sizes {name}", np.diff(field.offsets))
                run[name] = len(field.values)
        self._runs.append(run)

    def _write(self, name: str, array: NDArray[Any]) -> None:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(tempfile.TemporaryFile(dir=self.folder))  # noqa: SIM115
        self._files[name].write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def _read(self, name: str, start: int, stop: int, like: NDArray[Any] | None = None) -> NDArray[Any]:
        """What was written under a name, from row or entry `start` to `stop`: codes or sizes, or values like these."""
        dtype, shape = (np.dtype(np.int64), ()) if like is None else (like.dtype, like.shape[1:])
        width = dtype.itemsize * int(np.prod(shape))
        file = self._files[name]
        file.seek(start * width)
        return np.frombuffer(file.read((stop - start) * width), dtype).reshape(stop - start, *shape)

    def _sizes_by_run(self) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray[np.int64] | None]]]:
        """Of each run the ranks of its rows' users, and how many entries of each field of lists each row has."""
        start = 0
        for run in self._runs:
            stop = start + run[_OWNERS]
            sizes = {name: self._read(f"sizes {name}", start, stop) for name in run if name != _OWNERS}
            yield self._ranks[self._read(_OWNERS, start, stop)], {_OWNERS: None, **sizes}
            start = stop

    def _regions(self) -> tuple[NDArray[np.int64], list[dict[str, NDArray[np.int64]]]]:
        """The region of each user, by rank: as many users as fit into memory; and where each region is in each run.

        That is, for rows and for the entries of each field of lists, the places between which those of a region lie.
        """
        widths = {name: _width(form) for name, form in self.form.items()}
        lists = [name for name, form in self.form.items() if isinstance(form, PackedField)]
        width = {_OWNERS: _INDEX_BYTES + sum(widths[name] for name in widths if name not in lists), **widths}
        users = len(self._ranks)
        stops = np.zeros(users)
        for owners, sizes in self._sizes_by_run():
            for name, size in sizes.items():
                stops += width[name] * np.bincount(owners, size, users)
        bytes_of_users = stops
        stops = np.cumsum(bytes_of_users)
        first, last = (stops - bytes_of_users) // self.memory, np.maximum(stops - 1, 0) // self.memory
        region = np.cumsum((np.diff(first, prepend=0) != 0) | (np.diff(last, prepend=last[0]) != 0))
        regions, begun, bounds = int(region[-1]) + 1, dict.fromkeys([_OWNERS, *lists], 0), []
        for owners, sizes in self._sizes_by_run():
            counts = {name: np.bincount(region[owners], size, regions) for name, size in sizes.items()}
            bounds.append({name: begun[name] + offsets_of(each.astype(np.int64)) for name, each in counts.items()})
            begun = {name: int(places[-1]) for name, places in bounds[-1].items()}
        return region, bounds

    def _read_region(
        self, number: int, places: Mapping[str, NDArray[np.int64]]
    ) -> tuple[NDArray[np.int64], dict[str, Field]]:
        """The rows of a region in one run: ranks of their users, and fields."""
        start, stop = places[_OWNERS][number : number + 2].tolist()
        fields: dict[str, Field] = {}
        for name, form in self.form.items():
            if isinstance(form, PackedField):
                first, last = places[name][number : number + 2].tolist()
                values = self._read(f"values {name}", first, last, form.values)
                sizes = self._read(f"sizes {name}", start, stop)
                fields[name] = replace(form, values=values, offsets=offsets_of(sizes))
            else:
                fields[name] = self._read(f"values {name}", start, stop, form)
        return self._ranks[self._read(_OWNERS, start, stop)], fields


def _sorted(
    owners: NDArray[np.int64], blocks: Sequence[Mapping[str, Field]]
) -> tuple[NDArray[np.int64], dict[str, Field]]:
    """The rows of some blocks in the order of their owners; those of one owner stay in their order."""
    order = None if (owners[1:] >= owners[:-1]).all() else np.argsort(owners, kind="stable")
    fields: dict[str, Field] = {}
    for name in blocks[0]:
        field = joined([block[name] for block in blocks])
        fields[name] = field if order is None else taken(field, order)
    return owners if order is None else owners[order], fields


def _width(form: Field) -> int:
    """Bytes of a row, or of an entry of a list."""
    values = stored_values(form)
    return values.itemsize * int(np.prod(values.shape[1:]))


def _inverse(order: NDArray[np.int64]) -> NDArray[np.int64]:
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


def _id_column(ids: Any) -> Any:
    """Ids as a column of Arrow, of text or whole numbers of 64 bits; anything else cannot name a user safely."""
    import pyarrow as pa

    column, kind = ids, getattr(ids, "type", None)
    try:
        if not isinstance(ids, pa.Array):
            array = np.asarray(ids)
            kind = array.dtype
            if array.ndim != 1:
                raise PopulationError(
                    f"user ids have shape {array.shape} but must have one axis: give one id for each example"
                )
            column = pa.array(array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
        if is_text(column.type) or pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type):
            column = column.cast(pa.large_string())
        elif pa.types.is_integer(column.type):
            column = column.cast(pa.uint64() if column.type == pa.uint64() else pa.int64())
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise PopulationError("user ids holds bytes that are not UTF-8: convert them first") from None
    except (pa.ArrowException, TypeError, UnicodeError, OverflowError):
        pass
    known = isinstance(column, pa.Array) and column.type in (pa.large_string(), pa.int64(), pa.uint64())
    if not known or column.null_count:
        raise PopulationError(
            f"user ids are {kind} with gaps or fractions but must be whole numbers or text: "
            "convert them, or drop the rows without a user"
        )
    return column


def _encoded(columns: Sequence[Any]) -> tuple[Any, NDArray[np.int64]]:
    """Distinct ids of some columns, in order of first appearance, and the place among them of each id in turn."""
    import pyarrow as pa

    kinds = {column.type for column in columns}
    if len(kinds) > 1 and pa.large_string() in kinds:
        raise PopulationError("user ids are numbers in some rows and text in others: give one kind only")
    try:
        together = pa.chunked_array([column.cast(pa.uint64()) if len(kinds) > 1 else column for column in columns])
    except pa.ArrowInvalid:
        raise PopulationError("user ids are both below 0 and above 2^63: give them as text") from None
    chunks = together.dictionary_encode().chunks
    return chunks[-1].dictionary, np.concatenate([np.asarray(chunk.indices, np.int64) for chunk in chunks])


def _check_ids(ids: Any) -> None:
    """Refuse text that an array of text cannot hold."""
    import pyarrow.compute as pc

    if is_text(ids.type) and len(ids):
        odd = pc.or_(pc.greater(pc.utf8_length(ids), LONGEST_ID), pc.ends_with(ids, "\0"))
        for user in ids.filter(odd).slice(0, 1).to_pylist():
            check_text_id(user)


def _order_of(ids: Any) -> NDArray[np.int64]:
    """The order that sorts ids: of numbers, and of letters as in Python."""
    import pyarrow.compute as pc

    return np.asarray(pc.sort_indices(ids), np.int64)


def _ids_array(ids: Any) -> NDArray[Any]:
    """Ids of text as NumPy's own text, which a file of a store can hold."""
    return np.array(ids.to_pylist()) if is_text(ids.type) else np.asarray(ids)
