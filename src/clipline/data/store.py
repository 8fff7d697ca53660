"""Writes a stored population from chunks in any order of users, without ever holding all examples.

The first pass (`spill.py`) writes chunks to disk and counts rows per user; the second moves each row to its user's
place. Everything is made in a hidden folder beside the target and renamed at the end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError
from ..privacy.events import GaussianEvent
from .chunks import FieldChunk, Progress, no_progress, short
from .column_options import ZERO_UPDATE
from .manifest import Manifest, Origin, packed_entry, write_manifest
from .packed_field import entry_places, offsets_of
from .spill import Spill

_INDEX_BYTES = 64  # working memory per row beside the row itself: owner, rank, order, position
_SUMMED = 1 << 16  # sizes of lists to add up in one go


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
    `progress` counts the rows of the second pass, and once more for each field of lists.

    A caller who is inside an `atomic_folder` already hands on its `scratch` folder: then `folder` is written in place.
    """
    new = Path(folder)
    with ExitStack() as stack:
        if scratch is None:
            new, scratch = stack.enter_context(atomic_folder(folder))
        new.mkdir(exist_ok=True)
        options = dict(column_options or {})
        raw = stack.enter_context(tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True))
        spill = Spill(Path(raw), finite=options.get("missing") != ZERO_UPDATE)
        with closing(spill):
            for chunk in chunks:
                spill.add(chunk)
            for user in known_users:
                spill.add_user(user)
        _write(new, spill, source, progress, memory_bytes)
        return write_manifest(
            new, fields=spill.layout, user_ids=True, users=len(spill.codes), examples=spill.rows, source=source,
            tasks=tasks, origin=origin, shared_users=shared_users, column_options=options, charges=charges,
            packed={name: packed_entry(field.width, field.pad) for name, field in spill.packed.items()},
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


def _write(folder: Path, spill: Spill, source: str, progress: Progress, memory_bytes: int) -> None:
    if not spill.codes or not spill.layout:
        raise PopulationError(f"{source} holds no example: give a file with at least one")
    users = sorted(spill.codes)  # all numbers or all text, as Spill makes sure
    by_rank = np.array([spill.codes[user] for user in users], dtype=np.int64)
    counts = np.array(spill.counts, dtype=np.int64)
    offsets = np.zeros(len(users) + 1, dtype=np.int64)
    np.cumsum(counts[by_rank], out=offsets[1:])
    ranks = np.empty_like(by_rank)
    ranks[by_rank] = np.arange(len(users))
    _scatter(folder, spill, ranks, offsets, progress, memory_bytes)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "user_ids.npy", _ids_array(users))


def _ids_array(users: list[Any]) -> NDArray[Any]:
    """Sorted ids as text or whole numbers; NumPy itself would turn numbers of 64 bits into fractions."""
    if isinstance(users[0], str):
        return np.array(users)
    for dtype in (np.int64, np.uint64):
        limits = np.iinfo(dtype)
        if limits.min <= users[0] and users[-1] <= limits.max:
            return np.array(users, dtype)
    raise PopulationError("user ids are both below 0 and above 2^63, or of more than 64 bits: give them as text")


def _scatter(
    folder: Path, spill: Spill, ranks: NDArray[np.int64], offsets: NDArray[np.int64], progress: Progress, memory: int
) -> None:
    """Move every spilled row to its user's place in the `.npy` files."""
    widths = {name: dtype.itemsize * int(np.prod(shape)) for name, (dtype, shape) in spill.layout.items()}
    rows_at_once = max(1, memory // (max(widths.values()) + _INDEX_BYTES))
    passes = 1 + len(spill.packed)
    with ExitStack() as stack:
        ends = []
        for name, (dtype, shape) in spill.layout.items():
            if name in spill.packed:  # how long each list is: its place follows from the lists before it
                raw = stack.enter_context(spill.sizes(name).open("rb"))
                out = stack.enter_context((folder / f"offsets.{name}.npy").open("wb", buffering=0))
                begin = _begin_npy(out, np.dtype(np.int64), (spill.rows + 1,))
                ends.append((raw, out, begin + 8, 8))  # the first offset stays 0
            else:
                raw = stack.enter_context(spill.field(name).open("rb"))
                out = stack.enter_context((folder / f"field.{name}.npy").open("wb", buffering=0))
                ends.append((raw, out, _begin_npy(out, dtype, (spill.rows, *shape)), widths[name]))
        done = 0
        for order, breaks, starts in _blocks(spill, ranks, offsets, rows_at_once):
            for raw, out, header, width in ends:
                block = np.fromfile(raw, np.uint8, len(order) * width).reshape(len(order), width)[order]
                data = block.reshape(-1).data
                for index, place in enumerate(starts):
                    part = data[breaks[index] * width : breaks[index + 1] * width]
                    _write_at(out.fileno(), part, header + place * width)
            done += len(order)
            progress(done, passes * spill.rows)
    for name in spill.packed:
        for rows in _scatter_lists(folder, spill, name, _blocks(spill, ranks, offsets, rows_at_once)):
            done += rows
            progress(done, passes * spill.rows)


Block = tuple[NDArray[np.int64], list[int], list[int]]  # order of some rows, ends of runs in it, place of each run


def _scatter_lists(folder: Path, spill: Spill, name: str, blocks: Iterable[Block]) -> Iterator[int]:
    """Move the entries of every spilled list to its user's place; gives the numbers of rows that are done."""
    dtype, (_, *inner) = spill.layout[name]
    width = dtype.itemsize * int(np.prod(inner))  # bytes of an entry
    offsets = np.lib.format.open_memmap(folder / f"offsets.{name}.npy", mode="r+")  # sizes, until they are summed here
    for start in range(0, spill.rows, _SUMMED):
        part = offsets[start : start + _SUMMED + 1]
        np.cumsum(part, out=part)
    with ExitStack() as stack:
        sizes_of_rows = stack.enter_context(spill.sizes(name).open("rb"))
        raw = stack.enter_context(spill.field(name).open("rb"))
        out = stack.enter_context((folder / f"values.{name}.npy").open("wb", buffering=0))
        header = _begin_npy(out, dtype, (int(offsets[-1]), *inner))
        for order, breaks, starts in blocks:
            sizes = np.fromfile(sizes_of_rows, np.int64, len(order))
            entries = np.fromfile(raw, np.uint8, int(sizes.sum()) * width).reshape(int(sizes.sum()), width)
            first = np.cumsum(sizes) - sizes
            data = entries[entry_places(first[order], sizes[order])].reshape(-1).data
            ends = offsets_of(sizes[order])[breaks].tolist()
            for index, place in enumerate(offsets[starts].tolist()):
                _write_at(out.fileno(), data[ends[index] * width : ends[index + 1] * width], header + place * width)
            yield len(order)
    offsets.flush()


def _blocks(spill: Spill, ranks: NDArray[np.int64], offsets: NDArray[np.int64], rows_at_once: int) -> Iterator[Block]:
    """Spilled rows some at a time, sorted by user, with the runs of them that stay together in the store."""
    if not spill.rows:
        return
    cursor = offsets[:-1].copy()  # where the next row of each user goes, by rank
    with spill.owners().open("rb") as owners:
        for begin in range(0, spill.rows, rows_at_once):
            rows = min(rows_at_once, spill.rows - begin)
            order, places = _places(ranks[np.fromfile(owners, np.int64, rows)], cursor)
            breaks = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), rows]
            yield order, breaks, places[breaks[:-1]].tolist()


def _places(ranks: NDArray[np.int64], cursor: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The order that sorts rows by user, and the place of each row so sorted, rising; moves `cursor` on."""
    order = np.argsort(ranks, kind="stable")  # stable: a user's own examples keep their order
    ordered = ranks[order]
    first = np.flatnonzero(np.diff(ordered, prepend=-1))
    sizes = np.diff(first, append=len(ordered))
    places = np.arange(len(ordered)) + np.repeat(cursor[ordered[first]] - first, sizes)
    cursor[ordered[first]] += sizes
    return order, places


def _begin_npy(out: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Write the header of a `.npy` file of its final size; gives where the data begin."""
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(out, header)
    begin = int(out.tell())
    out.truncate(begin + dtype.itemsize * int(np.prod(shape)))
    return begin


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    """`os.pwrite` until all is written: one call may write less than it was given."""
    while data:
        written = os.pwrite(descriptor, data, place)
        data, place = data[written:], place + written
