"""Prepares data: from a table or a file of TFF to a store that training reads."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from clipline.data.chunks import Convert, FieldChunk, Progress, Text, converted, existing_file
from clipline.data.column_options import NO_OPTIONS, ColumnOptions
from clipline.data.manifest import Manifest
from clipline.data.readers.tables import read_table
from clipline.data.store import atomic_folder, write_store
from clipline.errors import PopulationError, SettingError, check_choice

from .catalogue import CATALOGUE, TABLE, DataSet, data_set
from .tff_hdf5 import read_tff_hdf5
from .tff_sqlite import decompressed, read_tff_sqlite

StageProgress = Callable[[str, int, int], None]  # what is being done, how much is done, of how much

_HDF5 = (".h5", ".hdf5")
_SQLITE = (".sqlite", ".sqlite.lzma")
SPLITS = ("train", "test")  # what a task needs: users to train on, and examples to measure on


def _no_progress(stage: str, done: int, total: int) -> None:
    pass


def prepare(
    name: str,
    source: str | Path,
    target: str | Path,
    *,
    split: str = "train",
    user_column: str | None = None,
    fields: Sequence[str] | None = None,
    tokenise: Convert | None = None,
    text: Text | None = None,
    options: ColumnOptions = NO_OPTIONS,
    progress: StageProgress = _no_progress,
) -> Manifest:
    """Write the store of one split of a known data set, or of a table of your own (`name="table"`).

    `source` is a TFF file (HDF5, SQLite), a table with a `user_column`, or a folder with a known data set under its
    original file names. Data sets of text need `tokenise`: a chunk with arrays of `str` in, a chunk with numbers out; a
    user's consecutive rows come in one chunk. For tables, `text` turns each column of text into numbers, and `options`
    say what becomes of gaps, categories and timestamps; they are stored.
    """
    with atomic_folder(target) as (folder, scratch):
        return _prepare(
            name, Path(source), folder, scratch, split, user_column, fields, tokenise, text, options, progress
        )


def _prepare(
    name: str, source: Path, folder: Path, scratch: Path, split: str, user_column: str | None,
    fields: Sequence[str] | None, tokenise: Convert | None, text: Text | None, options: ColumnOptions,
    progress: StageProgress,
) -> Manifest:  # fmt: skip
    """What `prepare` does, inside an `atomic_folder`."""
    known = None if name == TABLE else _known(name)
    convert = tokenise if known is None else known.convert or tokenise
    if known is not None and convert is None:
        raise SettingError(
            f"data={name!r} is text and no tokeniser was given: call clipline_paper.data.prepare_tff.prepare "
            "with tokenise=..., or prepare a table of numbers of your own"
        )
    if known is not None and fields is not None:
        raise SettingError(f"fields={','.join(fields)!r} must be left out for {name!r}: its tasks say what they read")
    if known is not None and options != NO_OPTIONS:
        raise SettingError(f"column options must be left out for {name!r}: its tasks say what they read")
    file = known.find(source, split) if known is not None and source.is_dir() else source
    without_rows: list[str] = []
    chunks = _read(
        file, known, split, user_column, fields, text, options, scratch, without_rows.append,
        lambda *now: progress("reading", *now),
    )  # fmt: skip
    with closing(chunks):  # before the scratch folder goes, also after an error
        return write_store(
            folder,
            options.checked(converted(chunks, convert)),
            source=f"{name} from {file.name}" if known is None else f"{known.name} {split} from {file.name}",
            tasks=() if known is None else known.read_by(name),
            origin="own" if known is None else "original",
            shared_users=known is not None and known.shared_users,
            known_users=without_rows,
            progress=lambda *now: progress("grouping", *now),
            scratch=scratch,
            column_options=options.entries(),
        )


def prepare_task(
    name: str,
    source: str | Path,
    target: str | Path,
    *,
    tokenise: Convert | None = None,
    progress: StageProgress = _no_progress,
) -> dict[str, Manifest]:
    """Write what the tasks of a known data set train and measure on: the stores `target/train` and `target/test`.

    `source` is a folder with the original files, an SQLite file, which holds both splits, or the HDF5 file of one
    split with that of the other beside it. `target` is complete or untouched, as with `prepare`.
    """
    known = _known(name)
    with atomic_folder(target) as (folder, scratch):
        files = {split: _file_of(Path(source), known, split) for split in SPLITS}
        with _unpacked(files, scratch, progress) as files:
            return {
                split: _prepare(
                    name, file, folder / split, scratch, split, None, None, tokenise, None, NO_OPTIONS,
                    lambda stage, *now, split=split: progress(f"{split}: {stage}", *now),
                )
                for split, file in files.items()
            }  # fmt: skip


@contextmanager
def _unpacked(files: dict[str, Path], scratch: Path, progress: StageProgress) -> Iterator[dict[str, Path]]:
    """The same files; one `.lzma` with all splits is decompressed once for all of them."""
    packed, *others = set(files.values())
    if others or packed.suffix.lower() != ".lzma":
        yield files
        return
    size = packed.stat().st_size
    with decompressed(packed, scratch, lambda done: progress("decompressing", done, size)) as plain:
        yield dict.fromkeys(files, plain)


def _file_of(source: Path, known: DataSet, split: str) -> Path:
    """The file with one split, given either file or the folder of both."""
    if source.is_dir():
        return known.find(source, split)
    if existing_file(source).name.lower().endswith(_SQLITE) or source.name == known.split(split).hdf5:
        return source
    if source.name not in [part.hdf5 for part in known.splits.values()]:
        names = " and ".join(known.split(split).hdf5 for split in SPLITS)
        raise PopulationError(
            f"{source.name!r} is neither SQLite with all splits nor one of {names}: "
            "give one of these, or prepare one split alone with --split train"
        )
    beside = source.with_name(known.split(split).hdf5)
    if not beside.is_file():
        raise PopulationError(
            f"{str(beside)!r} is missing, the split {split!r} beside {source.name!r}: put it there, "
            "or prepare one split alone with --split"
        )
    return beside


def _known(name: str) -> DataSet:
    check_choice("data", name, [*CATALOGUE, *(task for data in CATALOGUE.values() for task in data.tasks), TABLE])
    return data_set(name)


def _read(
    file: Path, known: DataSet | None, split: str, user_column: str | None, fields: Sequence[str] | None,
    text: Text | None, options: ColumnOptions, scratch: Path, without_rows: Callable[[str], None], progress: Progress,
) -> Generator[FieldChunk, None, None]:  # fmt: skip
    """The reader for a file, chosen by the ending of its name."""
    ending = file.name.lower()
    fields = fields if known is None else known.fields
    if ending.endswith(_SQLITE):
        part = split if known is None else known.split(split).sqlite
        return read_tff_sqlite(file, part, fields=fields, scratch=scratch, without_rows=without_rows, progress=progress)
    if ending.endswith(_HDF5):
        if known is not None:
            _check_split(file, known, split)
        return read_tff_hdf5(file, fields=fields, without_rows=without_rows, progress=progress)
    if user_column is None:
        raise SettingError(
            f"user_column is missing for {str(file)!r}: give --user-column, the column that says whose row"
        )
    return read_table(file, user_column, fields=fields, text=text, options=options, progress=progress)


def _check_split(file: Path, known: DataSet, split: str) -> None:
    """An HDF5 file holds one split, and only its name says which: training data must not become a test set."""
    known.split(split)
    for name, part in known.splits.items():
        if file.name == part.hdf5 and name != split:
            raise PopulationError(f"{file.name!r} holds the split {name!r}, not {split!r}: give --split {name}")
