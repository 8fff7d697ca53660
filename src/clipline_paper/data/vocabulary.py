"""Stack Overflow's word and tag lists, which say how many users used each."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from clipline.data import existing_file, short
from clipline.errors import PopulationError

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
