"""Stack Overflow's word and tag lists, which say how many users used each."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from ..errors import PopulationError, check_whole
from .chunks import existing_file, short

_WAY_OUT = "download it again with clipline data fetch stackoverflow"


def read_words(path: str | Path, size: int) -> list[str]:
    """The first `size` words of `stackoverflow.word_count` (plain or `.tar.bz2`): a word and a count on each line.

    The file is sorted already, and its order is kept.
    """
    lines = _content(path).splitlines()
    words = []
    for number, line in enumerate(lines[: _size(size, len(lines))], start=1):
        word, _, count = line.rpartition(" ")
        if not word or not count.isdigit():
            raise PopulationError(f"{str(path)!r} has no word and count in line {number}: {_WAY_OUT}")
        words.append(word.strip())
    return words


def read_tags(path: str | Path, size: int) -> list[str]:
    """The `size` tags of most users in `stackoverflow.tag_count` (plain or `.tar.bz2`): a JSON object tag to count.

    Tags of equal counts keep the order of the file.
    """
    try:
        counts = dict(json.loads(_content(path)))
    except (ValueError, TypeError) as error:
        raise PopulationError(f"{str(path)!r} is no list of tags ({short(error)}): {_WAY_OUT}") from None
    return sorted(counts, key=lambda tag: -int(counts[tag]))[: _size(size, len(counts))]


def _size(size: int, there: int) -> int:
    return check_whole("size", size, at_least=1, at_most=there, way_out="the file has no more")


def _content(path: str | Path) -> str:
    file = existing_file(path)
    try:
        if file.suffixes[-2:] != [".tar", ".bz2"]:
            return file.read_text()
        with tarfile.open(file) as archive:
            member = archive.extractfile(file.name.removesuffix(".tar.bz2"))
            if member is None:
                raise KeyError("not a file inside")
            return member.read().decode()
    except (OSError, EOFError, KeyError, tarfile.TarError, UnicodeDecodeError) as error:
        raise PopulationError(f"{str(file)!r} cannot be read ({short(error)}): {_WAY_OUT}") from None
