"""Chunks, which readers give and the store takes: some rows at a time, each with the id of its user."""

from __future__ import annotations

import difflib
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError, nearest
from .packed_field import Field

Chunk = tuple[NDArray[Any], dict[str, NDArray[Any]]]  # ids (rows,), whole numbers or text; name -> (rows, ...)
FieldChunk = tuple[Any, Mapping[str, Field]]  # the same where ids may be an array of Arrow, and fields lists
Convert = Callable[[Chunk], Chunk]  # may drop rows or add some, as long as ids and fields stay of equal length
Text = Callable[[Sequence[str]], NDArray[Any]]  # texts of one column -> (rows, ...) numbers, every row equally wide
Progress = Callable[[int, int], None]  # done and total; the function that reports says in which unit

CHUNK_BYTES = 8 << 20  # about the size of a chunk: large enough to be fast, small enough for any memory


def no_progress(done: int, total: int) -> None:
    """The default for `progress`: nothing is shown."""


def ignore_user(user: str) -> None:
    """The default for `without_rows`: users without rows are left out."""


def is_file(path: Path) -> bool:
    """Whether a file is there; False too for what cannot name one."""
    return os.path.isfile(path)  # noqa: PTH113  # `Path.is_file` raises for a name that is too long


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False too for what cannot name one."""
    return os.path.isdir(path)  # noqa: PTH112


def check_exists(name: str, path: Path) -> None:
    """Refuse a path where nothing is, with the nearest name beside it, if there is one."""
    if is_file(path) or is_folder(path):
        return
    way_out = "give a table (.parquet, .csv, .tsv, .jsonl or .npz), or a folder made by clipline data prepare"
    if is_folder(path.parent):
        beside = difflib.get_close_matches(
            path.name, [one.name for one in path.parent.iterdir() if one != path], n=1, cutoff=0.75
        )
        way_out = f"did you mean {str(path.with_name(beside[0]))!r}?" if beside else way_out
    raise PopulationError(f"{name}={str(path)[:200]!r} does not exist or is no regular file: {way_out}")


def existing_file(path: str | Path) -> Path:
    """`path` if a file with something in it is there; otherwise an error with a way out."""
    file = Path(path)
    if is_folder(file):
        raise PopulationError(f"{str(file)!r} is a folder but must be a file: give the path of one file")
    if not is_file(file):
        raise PopulationError(f"{str(file)!r} does not exist or is no regular file: give the path of a file")
    if file.stat().st_size == 0:
        raise PopulationError(f"{str(file)!r} is empty: give a file with examples, perhaps by copying it again")
    return file


def text_array(values: Iterable[str | bytes], where: str) -> NDArray[Any]:
    """Texts as an array of `str` objects (rows,); bytes must be UTF-8, and anything else is refused."""
    texts = list(values)
    for text in texts:
        if not isinstance(text, str | bytes):
            raise PopulationError(f"{where} holds {type(text).__name__} where text is needed: convert it first")
    array = np.empty(len(texts), dtype=object)
    try:
        array[:] = [text.decode() if isinstance(text, bytes) else text for text in texts]
    except UnicodeDecodeError as error:
        raise PopulationError(f"{where} holds bytes that are not UTF-8 ({error.reason}): convert them first") from None
    return array


def chosen(names: Iterable[str], wanted: Iterable[str] | None, where: str) -> list[str]:
    """The fields to read: all of `names`, or those `wanted`, which must be there."""
    known = list(names)
    if wanted is None:
        return known
    for name in wanted:
        if name not in known:
            raise PopulationError(f"{where} has no field {name!r}: {nearest(name, known)}")
    return list(dict.fromkeys(wanted))


def columns_of(where: str, names: Sequence[str], user_column: str, fields: Sequence[str] | None) -> list[str]:
    """The fields of a table to read, without the user column, which must be there. `where` is the table, for errors."""
    if user_column not in names:
        raise PopulationError(f"{where} has no user column {user_column!r}: {nearest(user_column, names)}")
    columns = [name for name in chosen(names, fields, where) if name != user_column]
    times = Counter(names)
    for name in (user_column, *columns):
        if times[name] > 1:
            raise PopulationError(f"{where} has {times[name]} columns named {name!r}: rename all but one")
    return columns


def short(error: BaseException) -> str:
    """The first line of a library's message, at most 160 characters, without the values that Arrow quotes."""
    message = re.sub(r"(invalid value|got \d+:|couldn't parse:) ?.*", r"\1 (not shown)", str(error), flags=re.DOTALL)
    return (message.splitlines() or [type(error).__name__])[0][:160]


def converted(chunks: Iterable[FieldChunk], convert: Convert | None) -> Iterator[FieldChunk]:
    """The chunks, each as `convert` makes it, which is given arrays: lists are padded for it."""
    for ids, fields in chunks:
        if convert is None:
            yield ids, fields
        else:
            yield convert((np.asarray(ids), {name: np.asarray(field) for name, field in fields.items()}))
