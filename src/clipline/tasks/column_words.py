"""Rewords errors about columns for their reader: as flags of `clipline data prepare`, or as keys of `COLUMNS`.

Readers of tables name the options as Python has them, `fill={column: 0}`: there is one reader for all callers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import PopulationError, SettingError

_BY_COLUMN = "fill|categories|timestamps|lengths|scale"
_GIVEN = re.compile(
    rf"""(?<![-\w])({_BY_COLUMN}|missing|pad)=(\{{[^}}]*\}}|"[^"]*"|'[^']*'|[\w.-]+)"""
)  # fill={column: 0}
_ENTRY = re.compile(rf"\b({_BY_COLUMN})\['([^']+)'\]=")  # of a value that was refused: fill['age']='x'
_NAMING = re.compile(rf"\b({_BY_COLUMN}) names '")
_PAIR = re.compile(r"""\{'?(.+?)'?: (.+)\}""")

_Words = Callable[[str, str | None, str], str]  # (option, column or None, value as Python writes it) -> text


@contextmanager
def in_flags() -> Iterator[None]:
    """Turn messages about columns into the words of the command line: --fill COLUMN=0."""
    with _reworded(_flag, "--{}", "--{} {}="):
        yield


@contextmanager
def in_keys_of(path: str) -> Iterator[None]:
    """Turn messages about columns into the words of a task file: "fill": {"km": 0} in COLUMNS of 'rides.py'."""
    with _reworded(_key, 'COLUMNS["{}"]', 'COLUMNS["{}"]["{}"]='):
        try:
            yield
        except (PopulationError, SettingError) as error:
            said = str(error)
            if _GIVEN.search(said):
                raise type(error)(f"{said} (COLUMNS are in {path!r})") from None
            raise


@contextmanager
def _reworded(words: _Words, option: str, entry: str) -> Iterator[None]:
    try:
        yield
    except (PopulationError, SettingError) as error:
        said = _GIVEN.sub(lambda found: words(found[1], *_column_and_value(found[2])), str(error))
        said = _ENTRY.sub(lambda found: entry.format(found[1], found[2]), said)
        said = _NAMING.sub(lambda found: f"{option.format(found[1])} names '", said)
        if said == str(error):
            raise
        raise type(error)(said) from error.__cause__


def _column_and_value(text: str) -> tuple[str | None, str]:
    pair = _PAIR.fullmatch(text)
    return (pair[1], pair[2]) if pair else (None, text)


def _flag(option: str, column: str | None, value: str) -> str:
    plain = "A,B,..." if option == "categories" else value.strip('"')
    if column is None:
        return f"--{option} {plain}"
    named = f"{column.upper() if column in ('column', 'field') else column}={plain}"
    return f'--{option} "{named}"' if " " in named else f"--{option} {named}"


def _key(option: str, column: str | None, value: str) -> str:
    return f'"{option}": {value}' if column is None else f'"{option}": {{"{column}": {value}}}'
