"""Prepares files of TFF: from HDF5 or SQLite to the stores that training reads, text by the lists of words and tags."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from clipline.data import (
    Chunk,
    Convert,
    Manifest,
    Progress,
    StageProgress,
    atomic_folder,
    converted,
    existing_file,
    no_stages,
    short,
    write_store,
)
from clipline.errors import PopulationError

from .. import preprocessing
from .tff_files import decompressed, read_tff_hdf5, read_tff_sqlite

if TYPE_CHECKING:
    from .catalogue import DataSet

WORD_LIST, TAG_LIST = "stackoverflow.word_count", "stackoverflow.tag_count"  # as TFF names them
_WAY_OUT = "download it again with clipline data fetch stackoverflow"


def read_words(path: str | Path, size: int) -> list[str]:
    """The first `size` words of `stackoverflow.word_count` (plain or `.tar.bz2`): a word and a count on each line.

    The file is sorted already, and its order is kept.
    """
    lines = _content(path).splitlines()
    words = []
    for number, line in enumerate(lines[: _size(path, size, len(lines))], start=1):
        word, _, count = line.rpartition(" ")
        if not word or not count.isdigit():
            raise PopulationError(f"{str(path)!r} has no word and count in line {number}: {_WAY_OUT}")
        words.append(word.strip())
    return words


def read_tags(path: str | Path, size: int) -> list[str]:
    """The `size` tags of most users in `stackoverflow.tag_count` (plain or `.tar.bz2`): a JSON object tag to count.

    Tags of equal counts keep the order of the file.
    """
    content = _content(path)
    try:
        counts = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise PopulationError(f"{str(path)!r} is no list of tags ({short(error)}): {_WAY_OUT}") from None
    if not isinstance(counts, dict) or not all(isinstance(count, int) for count in counts.values()):
        raise PopulationError(f"{str(path)!r} is no list of tags (it holds no JSON object of counts): {_WAY_OUT}")
    return sorted(counts, key=lambda tag: -counts[tag])[: _size(path, size, len(counts))]


def find_list(folder: Path, name: str) -> Path:
    """A list by its original name in a folder, plain or packed."""
    for file in (folder / name, folder / f"{name}.tar.bz2"):
        if file.is_file():
            return file
    raise PopulationError(
        f"{str(folder)!r} holds neither {name} nor {name}.tar.bz2: put one there, or say where it is with "
        f"--{'words' if name == WORD_LIST else 'tags'} FILE"
    )


def _size(path: str | Path, size: int, there: int) -> int:
    if not 1 <= size <= there:
        raise PopulationError(f"{str(path)!r} has {there} entries but the first {size} are needed: {_WAY_OUT}")
    return size


def _content(path: str | Path) -> str:
    file = existing_file(path)
    try:
        if file.suffixes[-2:] != [".tar", ".bz2"]:
            return file.read_text(encoding="utf-8")
        with tarfile.open(file) as archive:
            member = archive.extractfile(file.name.removesuffix(".tar.bz2"))
            if member is None:
                raise KeyError("not a file inside")
            return member.read().decode()
    except (OSError, EOFError, KeyError, tarfile.TarError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read ({short(error)}): {_WAY_OUT}") from None


_HDF5 = (".h5", ".hdf5")
_SQLITE = (".sqlite", ".sqlite.lzma")
SPLITS = ("train", "test")  # what a task needs: users to train on, and examples to measure on


def prepare(
    data: DataSet,
    source: Path,
    target: Path,
    *,
    task: str | None = None,
    split: str | None = None,
    lists: Mapping[str, Path] | None = None,
    tokenise: Convert | None = None,
    progress: StageProgress = no_stages,
) -> dict[str, Manifest]:
    """Write what tasks train and measure on, the stores `target/train` and `target/test`; or one split as `target`.

    `source` is a folder with the original files, an SQLite file, which holds all splits, or the HDF5 file of one split
    with that of the other beside it. Text is cut for `task`, or for all tasks of the data set, by the lists of words
    and tags, or else by `tokenise`: a chunk with arrays of `str` in, a chunk with numbers out, where a user's
    consecutive rows come in one chunk. `target` is complete or untouched.
    """
    task = task or data.name
    convert = data.convert or tokenise or _tokeniser(task, source, lists or {})
    with atomic_folder(target) as (folder, scratch):
        if split is not None:
            file = data.find(source, split) if source.is_dir() else source
            return {".": _write(data, task, file, folder, scratch, split, convert, progress)}
        with _unpacked({name: _file_of(source, data, name) for name in SPLITS}, scratch, progress) as files:
            return {
                name: _write(
                    data, task, file, folder / name, scratch, name, convert,
                    lambda stage, *now, name=name: progress(f"{name}: {stage}", *now),
                )
                for name, file in files.items()
            }  # fmt: skip


def _tokeniser(name: str, source: Path, lists: Mapping[str, Path]) -> Convert:
    """What turns the text of this data set or task into numbers."""
    if name == "shakespeare":
        return preprocessing.snippets
    beside = source if source.is_dir() else existing_file(source).parent
    words = read_words(lists.get("words") or find_list(beside, WORD_LIST), preprocessing.WORDS)
    if name == "so_nwp":
        return preprocessing.sentences(words)
    tags = read_tags(lists.get("tags") or find_list(beside, TAG_LIST), preprocessing.TAGS)
    tagged = preprocessing.tagged_posts(words, tags)
    return tagged if name == "so_lr" else preprocessing.together(preprocessing.sentences(words), tagged)


def _write(
    data: DataSet, task: str, file: Path, folder: Path, scratch: Path, split: str, convert: Convert,
    progress: StageProgress,
) -> Manifest:  # fmt: skip
    """The store of one split, in an `atomic_folder`."""
    without_rows: list[str] = []
    chunks = _read(file, data, split, scratch, without_rows.append, lambda *now: progress("reading", *now))
    with closing(chunks):  # before the scratch folder goes, also after an error
        return write_store(
            folder,
            converted(chunks, convert),
            source=f"{data.name} {split} from {file.name}",
            tasks=data.read_by(task),
            origin="original",
            shared_users=data.shared_users,
            known_users=without_rows,
            progress=lambda *now: progress("grouping", *now),
            scratch=scratch,
        )


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


def _read(
    file: Path, known: DataSet, split: str, scratch: Path, without_rows: Callable[[str], None], progress: Progress
) -> Generator[Chunk, None, None]:
    """The reader for a file, chosen by the ending of its name."""
    ending = existing_file(file).name.lower()
    if ending.endswith(_SQLITE):
        part = known.split(split).sqlite
        return read_tff_sqlite(
            file, part, fields=known.fields, scratch=scratch, without_rows=without_rows, progress=progress
        )
    if ending.endswith(_HDF5):
        _check_split(file, known, split)
        return read_tff_hdf5(file, fields=known.fields, without_rows=without_rows, progress=progress)
    raise PopulationError(
        f"{str(file)!r} is no file of {known.name}: give one that ends in {', '.join(_SQLITE + _HDF5)}"
    )


def _check_split(file: Path, known: DataSet, split: str) -> None:
    """An HDF5 file holds one split, and only its name says which: training data must not become a test set."""
    known.split(split)
    for name, part in known.splits.items():
        if file.name == part.hdf5 and name != split:
            raise PopulationError(f"{file.name!r} holds the split {name!r}, not {split!r}: give --split {name}")
