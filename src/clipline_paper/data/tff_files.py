"""Readers of TFF's files: HDF5, SQLite, and the serialized examples inside."""

from __future__ import annotations

import lzma
import sqlite3
import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipline.data import (
    CHUNK_BYTES,
    Chunk,
    Progress,
    chosen,
    existing_file,
    ignore_user,
    no_progress,
    short,
    text_array,
)
from clipline.errors import PopulationError, nearest

Value = list[bytes] | NDArray[Any]  # bytes; or (entries,) float32 or int64

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_BYTES, _FLOATS, _WHOLES = 1, 2, 3


def parse_example(data: bytes, wanted: Collection[str] | None = None) -> dict[str, Value]:
    """The features of one serialized example by name, or only those wanted.

    A feature without any value is an empty list of bytes. Raises ValueError for bytes that are no such message.
    """
    features: dict[str, Value] = {}
    for number, _, start, end in _parts(data, 0, len(data)):
        if number != 1:
            continue
        for entry_number, _, entry_start, entry_end in _parts(data, start, end):
            if entry_number == 1:
                name, place = _entry(data, entry_start, entry_end)
                if wanted is None or name in wanted:
                    features[name] = _feature(data, *place)
    return features


def _parts(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Every field of a message that lies at `at:end`: its number, its wire type, and where its payload lies."""
    while at < end:
        key, at = _varint(data, at, end)
        wire = key & 7
        if wire == _DELIMITED:
            size, at = _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            stop = _varint(data, at, end)[1]
        elif wire in (_FIXED32, _FIXED64):
            stop = at + (4 if wire == _FIXED32 else 8)
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if stop > end:
            raise ValueError(f"a field at byte {at} runs over the end")
        yield key >> 3, wire, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """The whole number at `at`, seven bits a byte, lowest first, and where it ends."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise ValueError(f"a number at byte {at} does not end")


def _entry(data: bytes, start: int, end: int) -> tuple[str, tuple[int, int]]:
    """Name and place of the value of one entry of the map; both may be left out on the wire."""
    name, place = "", (end, end)
    for number, _, at, stop in _parts(data, start, end):
        if number == 1:
            name = data[at:stop].decode()
        elif number == 2:
            place = at, stop
    return name, place


def _feature(data: bytes, start: int, end: int) -> Value:
    value: Value = []
    for kind, _, at, stop in _parts(data, start, end):
        # A packed list is one payload of many numbers, an unpacked one many payloads of one: joined, they are equal.
        payloads = [data[begin:close] for number, _, begin, close in _parts(data, at, stop) if number == 1]
        if kind == _BYTES:
            value = payloads
        elif kind == _FLOATS:
            value = np.frombuffer(b"".join(payloads), dtype="<f4")
        elif kind == _WHOLES:
            value = _wholes(b"".join(payloads))
    return value


def _wholes(data: bytes) -> NDArray[np.int64]:
    """Numbers of seven bits a byte, end to end, as int64; negative ones take ten bytes and wrap around."""
    raw = np.frombuffer(data, dtype=np.uint8)
    last = raw < 0x80
    if last.all():
        return raw.astype(np.int64)
    if not last[-1]:
        raise ValueError("a list of whole numbers does not end")
    starts = np.concatenate([[0], np.flatnonzero(last)[:-1] + 1])
    sizes = np.diff(starts, append=len(raw))
    if sizes.max() > 10:
        raise ValueError("a whole number is longer than ten bytes")
    shifts = (7 * (np.arange(len(raw)) - np.repeat(starts, sizes))).astype(np.uint64)
    return np.add.reduceat((raw & 0x7F).astype(np.uint64) << shifts, starts).view(np.int64)


_BLOCK = 1 << 20
_DAMAGED = (sqlite3.Error, lzma.LZMAError, EOFError, OSError, RuntimeError, LookupError, TypeError, ValueError)


def read_tff_sqlite(
    path: str | Path,
    split: str,
    *,
    fields: Sequence[str] | None = None,
    scratch: str | Path | None = None,
    without_rows: Callable[[str], None] = ignore_user,
    progress: Progress = no_progress,
) -> Generator[Chunk, None, None]:
    """The examples of one split; numbers as (rows,) or (rows, entries), bytes as text.

    Rows of one client that follow each other stay in one chunk. A `.lzma` file is decompressed into a temporary file in
    the folder `scratch` (the file's own folder unless given), gone afterwards. Clients of the file's own list that have
    no example are in no chunk: `without_rows` is told of them. `progress` counts bytes of the file, twice over if it
    has to be decompressed first.
    """
    file = existing_file(path)
    size = file.stat().st_size
    if file.suffix.lower() == ".lzma":
        with decompressed(file, Path(scratch or file.parent), lambda done: progress(done, 2 * size)) as plain:
            second = lambda done, total: progress(size + size * done // total, 2 * size)  # noqa: E731
            yield from _examples(plain, split, fields, without_rows, second)
        return
    with _errors_of(file, "SQLite"):
        yield from _examples(
            file, split, fields, without_rows, lambda done, total: progress(size * done // total, size)
        )


@contextmanager
def decompressed(file: Path, folder: Path, progress: Callable[[int], None]) -> Iterator[Path]:
    """The plain file of a `.lzma` file, in a folder of its own inside `folder`; gone afterwards."""
    with _errors_of(file, "SQLite"), tempfile.TemporaryDirectory(dir=folder, prefix=f".{file.stem}.") as own:
        target = Path(own) / file.stem
        with file.open("rb") as raw, lzma.open(raw) as stream, target.open("wb") as plain:
            while block := stream.read(_BLOCK):
                plain.write(block)
                progress(raw.tell())
        yield target


@contextmanager
def _errors_of(file: Path, layout: str) -> Iterator[None]:
    """Whatever a damaged file makes a library say, in a sentence."""
    try:
        yield
    except PopulationError:
        raise
    except (
        sqlite3.Error,
        lzma.LZMAError,
        EOFError,
        OSError,
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        raise PopulationError(
            f"{str(file)!r} cannot be read as TFF's {layout} ({short(error)}): copy or download it again"
        ) from None


def _examples(
    file: Path, split: str, fields: Sequence[str] | None, without_rows: Callable[[str], None], progress: Progress
) -> Iterator[Chunk]:
    # An unfinished generator may be collected, and its file closed, in whatever thread is running by then.
    address = f"{file.absolute().as_uri()}?mode=ro&immutable=1"
    with closing(sqlite3.connect(address, uri=True, check_same_thread=False)) as base:
        total = _promised(base, split)
        listed = "SELECT client_id FROM client_metadata WHERE split_name = ? AND num_examples = 0"
        for (user,) in base.execute(listed, (split,)):
            without_rows(*text_array([user], "client ids"))
        query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ?"
        names = None if fields is None else list(fields)
        users: list[str] = []
        rows: list[dict[str, Value]] = []
        done = held = 0
        for user, data in base.execute(query, (split,)):
            if held > CHUNK_BYTES and user != users[-1]:
                yield text_array(users, "client ids"), _columns(users, rows, names or [])
                users, rows, held = [], [], 0
                progress(done, total)
            row = _parsed(user, data, names)
            names = list(row) if names is None else names
            users.append(user)
            rows.append(row)
            done += 1
            held += len(data)
        if done != total:
            raise sqlite3.DatabaseError(f"{done} examples of {split!r} where its client_metadata promises {total}")
        if users:
            yield text_array(users, "client ids"), _columns(users, rows, names or [])
        progress(max(done, 1), max(total, 1))


def _promised(base: sqlite3.Connection, split: str) -> int:
    """How many examples the split has, according to the file's own list of clients."""
    splits = dict(base.execute("SELECT split_name, SUM(num_examples) FROM client_metadata GROUP BY split_name"))
    if split not in splits:
        raise PopulationError(f"the file has no split {split!r}: {nearest(split, splits)}")
    total: int = splits[split]  # SQLite stores anything in any column: what is no number is unequal to what comes
    return total


def _parsed(user: str, data: bytes, names: list[str] | None) -> dict[str, Value]:
    try:
        row = parse_example(data, names)
    except (ValueError, TypeError) as error:
        raise sqlite3.DatabaseError(f"an example of client {user!r} is no tf.train.Example: {short(error)}") from None
    for name in names or []:
        if name not in row:
            known = parse_example(data)
            raise PopulationError(f"an example of client {user!r} has no field {name!r}: {nearest(name, known)}")
    return row


def _columns(users: list[str], rows: list[dict[str, Value]], names: list[str]) -> dict[str, NDArray[Any]]:
    """Field by field instead of example by example."""
    return {name: _column(users, name, [row[name] for row in rows]) for name in names}


def _column(users: list[str], name: str, values: list[Value]) -> NDArray[Any]:
    first = values[0]
    for user, value in zip(users, values, strict=True):
        if len(value) != len(first) or type(value) is not type(first):
            raise PopulationError(
                f"an example of client {user!r} has {len(value)} entries of {name!r} but others have {len(first)}: "
                "only examples of equal shape can be stored"
            )
    if isinstance(first, list):
        if len(first) != 1:
            raise PopulationError(f"field {name!r} has {len(first)} texts in one example: only one can be read")
        return text_array((value[0] for value in values if isinstance(value, list)), f"field {name!r}")
    column = np.stack([np.asarray(value) for value in values])
    return column[:, 0] if column.shape[1] == 1 else column


def read_tff_hdf5(
    path: str | Path,
    *,
    fields: Sequence[str] | None = None,
    without_rows: Callable[[str], None] = ignore_user,
    progress: Progress = no_progress,
) -> Generator[Chunk, None, None]:
    """The examples of every client in the file; a client's examples stay in one chunk.

    Data sets of text give arrays of `str`. All clients must have the same fields. A client without examples is in no
    chunk: `without_rows` is told of it, since it is one of the users all the same. `progress` counts clients.
    """
    import h5py

    file = existing_file(path)
    with _errors_of(file, "HDF5"), h5py.File(file, "r") as root:
        clients = root.get("examples")
        if not isinstance(clients, h5py.Group):
            raise PopulationError(f"{str(file)!r} has no group 'examples': give a file in TFF's layout")
        ids: list[str] = []
        parts: list[dict[str, NDArray[Any]]] = []
        names: list[str] = []
        held = 0
        for done, (client, group) in enumerate(clients.items(), start=1):
            if not isinstance(group, h5py.Group):
                raise PopulationError(f"client {client!r} is no group: give a file in TFF's layout")
            if len(group):
                names = names or chosen(list(group), fields, repr(str(file)))
                part = _fields(client, group, names)
            if not len(group) or not len(part[names[0]]):
                without_rows(client)  # its arrays may have any shape and type, as h5py's defaults do
                continue
            ids.append(client)
            parts.append(part)
            held += sum(_bytes(array) for array in part.values())
            if held > CHUNK_BYTES:
                yield _joined(ids, parts)
                ids, parts, held = [], [], 0
                progress(done, len(clients))
        if ids:
            yield _joined(ids, parts)
        progress(len(clients), len(clients))


def _fields(client: str, group: Any, names: list[str]) -> dict[str, NDArray[Any]]:
    part: dict[str, NDArray[Any]] = {}
    for name in names:
        if name not in group:
            raise PopulationError(f"client {client!r} has no field {name!r} as others have: leave it out of the fields")
        array = np.asarray(group[name][()])
        if array.ndim == 0:
            raise PopulationError(f"client {client!r} has one value as {name!r}, not a list: copy the file again")
        part[name] = text_array(array.reshape(-1), f"client {client!r}") if array.dtype.kind in "OS" else array
    rows = {name: len(array) for name, array in part.items()}
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{count} of {name!r}" for name, count in rows.items())
        raise PopulationError(f"client {client!r} has unequal numbers of examples ({counts}): copy the file again")
    return part


def _bytes(array: NDArray[Any]) -> int:
    return array.nbytes if array.dtype.kind != "O" else sum(map(len, array))


def _joined(ids: list[str], parts: list[dict[str, NDArray[Any]]]) -> Chunk:
    """Clients end to end. What differs in shape or type between clients is refused here."""
    rows = [len(next(iter(part.values()))) for part in parts]
    for name, first in parts[0].items():
        for client, part in zip(ids, parts, strict=True):
            if (part[name].dtype, part[name].shape[1:]) != (first.dtype, first.shape[1:]):
                raise PopulationError(
                    f"client {client!r} has {name!r} as {part[name].dtype}{list(part[name].shape[1:])} but others as "
                    f"{first.dtype}{list(first.shape[1:])}: only examples of equal shape can be stored"
                )
    return np.repeat(np.array(ids), rows), {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
