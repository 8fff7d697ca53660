"""Writes a stored population from chunks in any order of users, without ever holding all examples.

`grouping` brings each user's rows together. Everything is made in a hidden folder beside the target and renamed at the
end.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PopulationError
from .chunks import FieldChunk, Progress, Text, no_progress, short
from .column_options import NO_OPTIONS, ZERO_UPDATE, ColumnOptions
from .grouping import MEMORY_BYTES, Rows
from .manifest import Manifest, Origin, packed_entry, write_manifest
from .packed_field import PackedField, offsets_of, stored_values
from .readers.tables import read_table

StageProgress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much


def no_stages(stage: str, done: int, total: int) -> None:
    """The default for `progress`: nothing is shown."""


def prepare_table(
    source: str | Path,
    target: str | Path,
    user_column: str,
    *,
    fields: Sequence[str] | None = None,
    text: Text | None = None,
    options: ColumnOptions = NO_OPTIONS,
    progress: StageProgress = no_stages,
) -> Manifest:
    """Write the store of a table of your own, however large it is.

    Args:
      source: The table: Parquet, CSV, TSV, JSONL or NPZ.
      target: The folder to write, new or empty. It is complete or, after an error, untouched.
      user_column: The column that says whose row it is.
      fields: Columns to keep; all others are by default.
      text: Turns each column of text into numbers.
      options: What becomes of gaps, categories and timestamps. They are stored.
      progress: Called with what is being done, how much of it is done, of how much.

    Returns:
      What the store holds.

    Raises:
      PopulationError: If the table cannot be read or the folder cannot be written.

    """
    file = Path(source)

    def reading(done: int, total: int) -> None:
        progress("reading", done, total)

    def grouping(done: int, total: int) -> None:
        progress("grouping", done, total)

    chunks = read_table(file, user_column, fields=fields, text=text, options=options, progress=reading)
    with closing(chunks):
        return write_store(
            target, options.checked(chunks), source=f"table from {file.name}", progress=grouping,
            column_options=options.entries(),
        )  # fmt: skip


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
    memory_bytes: int = MEMORY_BYTES,
    scratch: Path | None = None,
    column_options: Mapping[str, Any] | None = None,
) -> Manifest:
    """Group the rows of all chunks by user and store them in `folder` for `Population.open`.

    Users may come in any order and as often as they like; they are stored sorted by id, and the order of a user's own
    examples is kept. Working memory is a few times `memory_bytes`, one chunk, and the list of users. The folder must
    not exist yet or be empty; it is complete or, after an error or an interruption, untouched. `known_users`, which is
    read after the chunks, adds users without any example. `tasks`, `origin`, `shared_users` and `column_options` go
    into the manifest. NaN and infinity are refused unless options say `missing="zero-update"`.
    `progress` counts rows as they find their user.

    A caller who is inside an `atomic_folder` already hands on its `scratch` folder: then `folder` is written in place.
    """
    new = Path(folder)
    with ExitStack() as stack:
        if scratch is None:
            new, scratch = stack.enter_context(atomic_folder(folder))
        new.mkdir(exist_ok=True)
        options = dict(column_options or {})
        rows = stack.enter_context(Rows(scratch, memory_bytes, finite=options.get("missing") != ZERO_UPDATE))
        rows.take_in(chunks, known_users, source)
        write_arrays(new, rows, progress)
        return write_manifest(
            new, fields=list(rows.form), user_ids=True, users=len(rows.user_ids), examples=rows.count, source=source,
            tasks=list(tasks), origin=origin, shared_users=shared_users, column_options=options,
            packed={name: packed_entry(f.width, f.pad) for name, f in rows.form.items() if isinstance(f, PackedField)},
        )  # fmt: skip


def write_arrays(folder: Path, rows: Rows, progress: Progress = no_progress) -> None:
    """Write the arrays of a store: offsets, ids, and each field in one file or, of lists, two."""
    with ExitStack() as stack:

        def file(name: str, like: NDArray[Any], length: int) -> IO[bytes]:
            """An `.npy` file for so many rows like these, without the rows."""
            opened = stack.enter_context((folder / f"{name}.npy").open("wb"))
            shape = (length, *like.shape[1:])
            header = {"descr": np.lib.format.dtype_to_descr(like.dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(opened, header)
            return opened

        values = {
            name: file(f"{'values' if isinstance(form, PackedField) else 'field'}.{name}", stored_values(form),
                       rows.entries[name])
            for name, form in rows.form.items()
        }  # fmt: skip
        offsets = {
            name: file(f"offsets.{name}", form.offsets, rows.count + 1)
            for name, form in rows.form.items() if isinstance(form, PackedField)
        }  # fmt: skip
        counts, begun = [], dict.fromkeys(offsets, 0)
        for one in offsets.values():
            one.write(bytes(8))
        for count, fields in rows.parts(progress):
            counts.append(count)
            for name, field in fields.items():
                _append(values[name], stored_values(field))
                if isinstance(field, PackedField):
                    _append(offsets[name], field.offsets[1:] + begun[name])
                    begun[name] += len(field.values)
    np.save(folder / "offsets.npy", offsets_of(np.concatenate(counts)))
    np.save(folder / "user_ids.npy", rows.user_ids)


def _append(file: IO[bytes], array: NDArray[Any]) -> None:
    file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
