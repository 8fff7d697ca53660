"""Writes a stored population from chunks in any order of users, without ever holding all examples.

Chunks are put aside as they come. Then rows move twice: into the region of a few users, as many as fit into memory, and
inside of it to their user. Everything is made in a hidden folder beside the target and renamed at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError
from ..privacy.events import GaussianEvent
from .array_checks import check_finite
from .chunks import FieldChunk, Progress, no_progress, short, text_array
from .column_options import ZERO_UPDATE
from .fields import not_numbers
from .manifest import Manifest, Origin, check_field_names, packed_entry, write_manifest
from .packed_field import Field, PackedField, entry_places, offsets_of, stored_values
from .user_ids import check_text_id

_NUMBERS = "biuf"  # NumPy's kinds of numbers that a store can hold
_SUMMED = 1 << 16  # sizes of lists to add up in one go
_INDEX_BYTES = 64  # working memory per row beside the row itself: owner, rank, order, position


def write_store(
    folder: str | Path,
    chunks: Iterable[FieldChunk],
    *,
    source: str,
    tasks: Sequence[str] = (),
    origin: Origin = "own",
    shared_users: bool = False,
    known_users: Iterable[int | str] = (),
    progress: Progress = no_progress,
    memory_bytes: int = 32 << 20,
    scratch: Path | None = None,
    column_options: Mapping[str, Any] | None = None,
    charges: Iterable[GaussianEvent] = (),
) -> Manifest:
    """Group the rows of all chunks by user and store them in `folder` for `Population.open`.

    Users may come in any order and as often as they like; they are stored sorted by id, and the order of a user's own
    examples is kept. Working memory is a few times `memory_bytes`, one chunk, and the list of users. The folder must
    not exist yet or be empty; it is complete or, after an error or an interruption, untouched. `known_users`, which is
    read after the chunks, adds users without any example. `tasks`, `origin`, `shared_users`, `column_options` and
    `charges` go into the manifest. NaN and infinity are refused unless options say `missing="zero-update"`.
    `progress` counts rows as they find their user.

    A caller who is inside an `atomic_folder` already hands on its `scratch` folder: then `folder` is written in place.
    """
    new = Path(folder)
    with ExitStack() as stack:
        if scratch is None:
            new, scratch = stack.enter_context(atomic_folder(folder))
        new.mkdir(exist_ok=True)
        options = dict(column_options or {})
        rows = _Rows(scratch, memory_bytes, finite=options.get("missing") != ZERO_UPDATE)
        stack.callback(rows.close)
        for chunk in chunks:
            rows.add(chunk)
        rows.owners(list(known_users))
        if not rows.codes or not rows.columns:
            raise PopulationError(f"{source} holds no example: give a file with at least one")
        users = sorted(rows.codes)  # all numbers or all text
        ranks = np.empty(len(users), np.int64)
        ranks[[rows.codes[user] for user in users]] = np.arange(len(users))
        _group(new, rows, ranks, progress)
        np.save(new / "user_ids.npy", _ids_array(users))
        return write_manifest(
            new, fields=rows.columns, user_ids=True, users=len(users), examples=rows.count, source=source,
            tasks=tasks, origin=origin, shared_users=shared_users, column_options=options, charges=charges,
            packed={n: packed_entry(*one.lists) for n, one in rows.columns.items() if one.lists},
        )  # fmt: skip


@contextmanager
def atomic_folder(target: str | Path) -> Iterator[tuple[Path, Path]]:
    """Two empty folders: one that becomes `target` on leaving without an error, and a scratch one that is deleted.

    A target in use is refused at once. After an error nothing is left of either. Both lie in a hidden folder beside the
    target, on the same file system. What the file system refuses meanwhile (no space, no permission) becomes an error
    with a way out.
    """
    path = Path(target).absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise PopulationError(f"{str(target)!r} is in use: give a folder that is new or empty")
    try:
        parent = next(folder for folder in path.parents if folder.exists())
        hidden = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=parent))
        try:
            new, scratch = hidden / "new", hidden / "scratch"
            new.mkdir()
            scratch.mkdir()
            yield new, scratch
            path.parent.mkdir(parents=True, exist_ok=True)
            new.rename(path)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    except OSError as error:
        raise PopulationError(
            f"{str(target)!r} cannot be written ({short(error)}): free some space or give another folder"
        ) from error


@dataclass
class _Column:
    """One field, put aside: rows in the order they came; of lists their entries, and their sizes beside them."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]  # of a row; of lists, of an entry
    entries: IO[bytes]
    sizes: IO[bytes]  # of lists, int64
    lists: tuple[int, NDArray[Any]] | None  # their width, and what pads them

    @property
    def width(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))


class _Rows:
    """Rows in the order they came, in memory or, beyond `memory` bytes, in files without a name.

    Memory grows with the number of users, never with the number of examples. Users are numbered by codes, given in
    order of first appearance.
    """

    def __init__(self, folder: Path, memory: int, *, finite: bool) -> None:
        self.folder, self.memory, self.finite = folder, memory, finite
        self.codes: dict[int | str, int] = defaultdict(count().__next__)
        self.columns: dict[str, _Column] = {}
        self.count = 0
        self.files: list[IO[bytes]] = []
        self.whose = self.file(4)  # the code of every row's user, int64

    def file(self, share: int) -> IO[bytes]:
        """A file in memory up to its share of it."""
        file = tempfile.SpooledTemporaryFile(max(1, self.memory // share), dir=str(self.folder))  # noqa: SIM115
        self.files.append(file)
        return file

    def close(self) -> None:
        for file in self.files:
            file.close()

    def owners(self, users: list[int | str]) -> NDArray[np.int64]:
        """The codes of users, new or known; a user may have no row at all."""
        known = len(self.codes)
        owners = np.fromiter(map(self.codes.__getitem__, users), np.int64, len(users))
        for user in islice(reversed(self.codes), len(self.codes) - known):
            if type(user) is not type(next(iter(self.codes))):
                raise PopulationError("user ids are numbers in some rows and text in others: give one kind only")
            if isinstance(user, str):
                check_text_id(user)
        return owners

    def add(self, chunk: FieldChunk) -> None:
        """Append the rows of a chunk. The first chunk fixes the fields; a later one that differs is refused."""
        users = _checked_ids(np.asarray(chunk[0]))
        arrays = {name: one if isinstance(one, PackedField) else np.asarray(one) for name, one in chunk[1].items()}
        if "" in users:
            row, last = self.count + users.index("") + 1, self.count + len(users)
            raise PopulationError(
                f"row {row} has an empty user id ({users.count('')} have one up to row {last}): "
                "drop the rows without a user, or give each the id of its user"
            )
        self._check(len(users), arrays)
        self.whose.write(self.owners(users).data)
        for name, array in arrays.items():
            column = self.columns[name]
            if isinstance(array, PackedField):
                column.sizes.write(np.diff(array.offsets).data)
            values = np.ascontiguousarray(stored_values(array), dtype=column.dtype)
            column.entries.write(values.data if values.size else b"")
        self.count += len(users)

    def blocks(self, ranks: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], dict[str, NDArray[np.int64]]]]:
        """Some rows at a time: the rank of each one's user, and for each field of lists their sizes."""
        widest = max(one.width * (one.lists[0] if one.lists else 1) for one in self.columns.values())
        step = max(1, self.memory // (widest + _INDEX_BYTES))
        for one in self.columns.values():
            one.entries.seek(0)
        for start in range(0, self.count, step):
            rows = min(step, self.count - start)

            def numbers(file: IO[bytes], at: int = 8 * start, rows: int = rows) -> NDArray[np.int64]:
                file.seek(at)
                return np.frombuffer(file.read(8 * rows), np.int64)

            sizes = {name: numbers(one.sizes) for name, one in self.columns.items() if one.lists}
            yield ranks[numbers(self.whose)], sizes

    def _check(self, rows: int, arrays: dict[str, Field]) -> None:
        for name, array in arrays.items():
            if array.ndim == 0 or len(array) != rows:
                found = 0 if array.ndim == 0 else len(array)
                raise PopulationError(
                    f"field {name!r} has {found} rows but must have {rows}, one for each user id: "
                    "give arrays of equal length"
                )
        if not self.columns:
            self._begin(arrays)
        if set(arrays) != set(self.columns):
            odd = sorted(set(arrays) ^ set(self.columns))[0]
            raise PopulationError(
                f"field {odd!r} is in some rows before row {self.count + rows} and missing in others: "
                "give every example the same fields"
            )
        for name, array in arrays.items():
            column, shape = self.columns[name], stored_values(array).shape[1:]
            if (array.dtype.newbyteorder("="), shape) != (column.dtype, column.shape):
                raise PopulationError(
                    f"field {name!r} has rows of {array.dtype}{list(shape)} after row {self.count} but began "
                    f"with {column.dtype}{list(column.shape)}: give every example the same type and shape"
                )
            if self.finite:
                check_finite(f"field {name!r}, rows {self.count + 1} to {self.count + rows},", array)

    def _begin(self, arrays: dict[str, Field]) -> None:
        if not arrays:
            raise PopulationError("examples have 0 fields but need at least 1: choose other columns than the user's")
        check_field_names(arrays)
        for name, array in arrays.items():
            if array.dtype.kind not in _NUMBERS or array.dtype.char == "g":  # "g": torch has no long double
                what = "text" if array.dtype.kind in "OUS" else str(array.dtype)
                raise not_numbers(name, what, array[:] if what == "text" else None)
            lists = (array.width, array.pad) if isinstance(array, PackedField) else None
            files = self.file(len(arrays)), self.file(len(arrays))
            self.columns[name] = _Column(array.dtype.newbyteorder("="), stored_values(array).shape[1:], *files, lists)


def _checked_ids(ids: NDArray[Any]) -> list[int | str]:
    """Ids as whole numbers or as text; anything else cannot name a user safely."""
    if ids.ndim != 1:
        raise PopulationError(f"user ids have shape {ids.shape} but must have one axis: give one id for each example")
    users: list[Any] = ids.tolist()
    kinds = set(map(type, users)) if ids.dtype.kind in "SO" else set()
    if not (kinds and all(issubclass(kind, str | bytes) for kind in kinds)) and ids.dtype.kind not in "iuU":
        raise PopulationError(
            f"user ids are {ids.dtype} with gaps or fractions but must be whole numbers or text: "
            "convert them, or drop the rows without a user"
        )
    return text_array(users, "user ids").tolist() if bytes in kinds else users


def _ids_array(users: list[Any]) -> NDArray[Any]:
    """Sorted ids as text or whole numbers; NumPy itself would turn numbers of 64 bits into fractions."""
    if isinstance(users[0], str):
        return np.array(users)
    for dtype in (np.int64, np.uint64):
        limits = np.iinfo(dtype)
        if limits.min <= users[0] and users[-1] <= limits.max:
            return np.array(users, dtype)
    raise PopulationError("user ids are both below 0 and above 2^63, or of more than 64 bits: give them as text")


class _Regions:
    """A file with a region for each of some groups of users, in which rows are first collected and then sorted."""

    def __init__(self, file: IO[bytes], begin: int, width: int, counts: NDArray[np.int64]) -> None:
        self.file, self.begin, self.width = file, begin, width
        self.starts = offsets_of(counts)
        self.filled = self.starts[:-1].copy()

    def append(self, data: NDArray[Any], counts: NDArray[np.int64]) -> None:
        """Add rows that are ordered by region, so many to each."""
        stops = np.cumsum(counts)
        for number in np.flatnonzero(counts).tolist():
            self._write(data[stops[number] - counts[number] : stops[number]], int(self.filled[number]))
        self.filled += counts

    def read(self, number: int) -> NDArray[np.uint8]:
        """The rows of a region, as bytes (rows, width)."""
        start, stop = self.starts[number : number + 2].tolist()
        self.file.seek(self.begin + start * self.width)
        return _read(self.file, stop - start, self.width)

    def replace(self, number: int, data: NDArray[Any]) -> None:
        """Put other rows into a region, as many as it has."""
        self._write(data, int(self.starts[number]))

    def _write(self, data: NDArray[Any], place: int) -> None:
        self.file.seek(self.begin + place * self.width)
        self.file.write(data.reshape(-1).view(np.uint8).data)


def _group(folder: Path, rows: _Rows, ranks: NDArray[np.int64], progress: Progress) -> None:
    """Write offsets and fields. Users come by rank, of which `ranks` has one for each code."""
    columns, users = rows.columns, len(ranks)
    counts, entries = np.zeros(users, np.int64), {name: np.zeros(users, np.int64) for name in columns}
    for whose, sizes in rows.blocks(ranks):
        counts += np.bincount(whose, minlength=users)
        for name, size in sizes.items():
            entries[name] += _summed(whose, size, users)
    entries = {name: entries[name] if one.lists else counts for name, one in columns.items()}
    np.save(folder / "offsets.npy", offsets_of(counts))
    region = _regions_of(counts * _INDEX_BYTES + sum(one.width * entries[name] for name, one in columns.items()), rows)
    regions = int(region[-1]) + 1
    with ExitStack() as stack:

        def room(
            name: str, dtype: np.dtype[Any], shape: tuple[int, ...], each: NDArray[np.int64], first: int
        ) -> _Regions:
            """An `.npy` file with so many rows of each user, after the first ones."""
            file = stack.enter_context((folder / f"{name}.npy").open("w+b"))
            total, width = int(each.sum()) + first, dtype.itemsize * int(np.prod(shape))
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (total, *shape)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + total * width)
            return _Regions(file, file.tell() + first * width, width, _summed(region, each, regions))

        owner = _Regions(rows.file(4), 0, 8, _summed(region, counts, regions))
        # An offset is the size of its list until all are summed; the first stays 0.
        sized = {n: room(f"offsets.{n}", np.dtype(np.int64), (), counts, 1) for n, one in columns.items() if one.lists}
        valued = {
            name: room(f"{'values' if one.lists else 'field'}.{name}", one.dtype, one.shape, entries[name], 0)
            for name, one in columns.items()
        }
        done = 0
        for whose, sizes in rows.blocks(ranks):
            where = region[whose]
            order, added = np.argsort(where, kind="stable"), np.bincount(where, minlength=regions)
            owner.append(whose[order], added)
            for name, one in columns.items():
                if one.lists:
                    size = sizes[name]
                    data = _read(one.entries, int(size.sum()), one.width)
                    valued[name].append(data[_entries(order, size)], _summed(where, size, regions))
                    sized[name].append(size[order], added)
                else:
                    valued[name].append(_read(one.entries, len(whose), one.width)[order], added)
            done += len(whose)
            progress(done // 2, rows.count)
        for number in range(regions):
            whose = owner.read(number).view(np.int64)[:, 0]
            done += len(whose)
            progress(done // 2, rows.count)
            if (whose[1:] >= whose[:-1]).all():
                continue
            order = np.argsort(whose, kind="stable")  # a user's own examples keep their order
            for name, one in columns.items():
                if one.lists:
                    size = sized[name].read(number).view(np.int64)[:, 0]
                    valued[name].replace(number, valued[name].read(number)[_entries(order, size)])
                    sized[name].replace(number, size[order])
                else:
                    valued[name].replace(number, valued[name].read(number)[order])
    for name in sized:
        offsets = np.lib.format.open_memmap(folder / f"offsets.{name}.npy", mode="r+")
        for start in range(0, rows.count, _SUMMED):
            part = offsets[start : start + _SUMMED + 1]
            np.cumsum(part, out=part)
        offsets.flush()


def _regions_of(bytes_of_users: NDArray[np.int64], rows: _Rows) -> NDArray[np.int64]:
    """The region of each user, by rank: as many users as fit into memory, or a single one."""
    stops = np.cumsum(bytes_of_users)
    first, last = (stops - bytes_of_users) // rows.memory, np.maximum(stops - 1, 0) // rows.memory
    return np.cumsum((np.diff(first, prepend=0) != 0) | (np.diff(last, prepend=last[0]) != 0))


def _summed(where: NDArray[np.int64], numbers: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """The sum of the numbers at each place, exact below 2^53."""
    return np.bincount(where, numbers, length).astype(np.int64)


def _entries(order: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places of the entries of lists of these sizes, with the lists in this order."""
    return entry_places((np.cumsum(sizes) - sizes)[order], sizes[order])


def _read(file: IO[bytes], rows: int, width: int) -> NDArray[np.uint8]:
    return np.frombuffer(file.read(rows * width), np.uint8).reshape(rows, width)
