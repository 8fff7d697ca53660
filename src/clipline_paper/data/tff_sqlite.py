"""TFF's SQLite files, plain or as `.lzma`: one row an example, serialized, with its client and its split."""

from __future__ import annotations

import lzma
import sqlite3
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clipline.data import CHUNK_BYTES, Chunk, Progress, existing_file, ignore_user, no_progress, short, text_array
from clipline.errors import PopulationError, nearest

from .tf_example import Value, parse_example

_BLOCK = 1 << 20


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
    with _sqlite_errors(file):
        yield from _examples(
            file, split, fields, without_rows, lambda done, total: progress(size * done // total, size)
        )


@contextmanager
def decompressed(file: Path, folder: Path, progress: Callable[[int], None]) -> Iterator[Path]:
    """The plain file of a `.lzma` file, in a folder of its own inside `folder`; gone afterwards."""
    with _sqlite_errors(file), tempfile.TemporaryDirectory(dir=folder, prefix=f".{file.stem}.") as own:
        target = Path(own) / file.stem
        with file.open("rb") as raw, lzma.open(raw) as stream, target.open("wb") as plain:
            while block := stream.read(_BLOCK):
                plain.write(block)
                progress(raw.tell())
        yield target


@contextmanager
def _sqlite_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.DatabaseError, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise PopulationError(
            f"{str(file)!r} cannot be read as TFF's SQLite ({short(error)}): copy or download it again"
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
            without_rows(_text_id(user))
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
            row = _parsed(_text_id(user), data, names)
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
    if not isinstance(splits[split], int):
        raise sqlite3.DatabaseError(f"client_metadata holds counts of {split!r} that are no whole numbers")
    return int(splits[split])


def _text_id(user: object) -> str:
    """A client's id: SQLite stores anything in any column."""
    if not isinstance(user, str):
        raise sqlite3.DatabaseError(f"a client's id is {type(user).__name__}, not text")
    return user


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
