"""What can go wrong through no fault of ours, and the checks that say so.

Every message names the thing, its value, the limit and a way out, in one sentence.
"""

from __future__ import annotations

import difflib
import errno
import math
import numbers
from collections.abc import Iterable
from pathlib import Path, PurePath

__all__ = [
    "CliplineError", "ModuleError", "PopulationError", "PrivateError", "RunError", "SettingError", "WorkerError",
    "check_choice", "nearest", "refuse",
]  # fmt: skip

# What to do after an error in the middle of a run.
GO_ON = "resume the run (one that has no checkpoint has to start again)"
_MOST_SHOWN = 20  # entries of a list or dict in a message
_LONGEST = 20_000  # letters of a message
_LONGEST_WORD, _MOST_WORDS = 80, 100  # of names that may be meant
_WHOLE_LIMIT = 2**63  # whole numbers beyond 64 bits are no setting, and neither NumPy nor torch take them


class CliplineError(Exception):
    """Everything that clipline refuses on purpose. The command line prints it and exits with code 2.

    Args:
      message: What was given and what is allowed.
      hint: What to do. It stands at the end of the text. Control characters are written as Python writes them.

    Example:
      >>> try: training.run()
      ... except cl.CliplineError as error: print(error.hint)
    """

    def __init__(self, message: str = "", hint: str = "") -> None:
        super().__init__(_bounded(f"{message}: {hint}" if hint else message))
        self.hint = _bounded(hint)


class SettingError(CliplineError, ValueError):
    """A setting is outside its limits, unknown, or contradicts another one. It is a `ValueError` too.

    Args:
      message: What was given and what is allowed.
      hint: What to do.

    Example:
      >>> try: cl.QuantileClip(quantile=2.0)
      ... except cl.SettingError as error: print(error)
    """


class PopulationError(CliplineError, ValueError):
    """The users' data cannot be read as a population."""


class ModuleError(CliplineError, TypeError):
    """A model cannot be trained privately as it is."""


class RunError(CliplineError, RuntimeError):
    """A run directory cannot be used."""


class PrivateError(CliplineError, RuntimeError):
    """A private number was asked for before it was released."""


class WorkerError(CliplineError, RuntimeError):
    """A worker process failed, was ended or cannot be reached."""


class HopelessNoiseWarning(UserWarning):
    """The noise on the mean update is longer than 2 clips, so that hardly any training learns something useful.

    It comes before the first round and rests on public numbers alone: noise multiplier, cohort size, parameters.

    Example:
      >>> warnings.simplefilter("error", cl.HopelessNoiseWarning)  # stop instead
    """


def regular(path: Path) -> Path:
    """The path, unless a pipe or a device is there: reading it could wait without end, or never stop."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "no regular file but a pipe or a device", str(path))
    return path


def printable(text: str) -> str:
    """The text as a terminal may show it: line ends stay, and control characters are written as Python writes them."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)


def _bounded(text: str) -> str:
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...")


def refuse(name: str, value: object, limit: str, way_out: str) -> SettingError:
    """The error to raise for a setting outside its limit, such as `refuse("clip", -1, "above 0", "give more")`.

    Whatever might hold data, such as an array or a dataframe, is shown by its type alone: messages end up in logs.
    """
    return SettingError(f"{name}={shown(value)} must be {limit}", way_out)


def shown(value: object, depth: int = 2) -> str:
    """A value as Python writes it if it is of the kind that settings are made of; otherwise `<its type>`."""
    kind = type(value)
    if value is None or isinstance(value, str | numbers.Number | PurePath):
        return repr(value)
    if kind.__module__ == "torch" and kind.__name__ in ("device", "dtype"):  # without importing torch
        return repr(value)
    if kind in (list, tuple, dict) and depth and len(value) <= _MOST_SHOWN:  # type: ignore[arg-type]
        if isinstance(value, dict):
            pairs = (f"{shown(key, 0)}: {shown(one, depth - 1)}" for key, one in value.items())
            return f"{{{', '.join(pairs)}}}"
        inner = ", ".join(shown(one, depth - 1) for one in value)  # type: ignore[attr-defined]
        return f"[{inner}]" if kind is list else f"({inner}{',' if len(value) == 1 else ''})"  # type: ignore[arg-type]
    return f"<{kind.__name__}>"


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    infinite: bool = False,
    way_out: str,
) -> float:
    """`value` as a float within the limits. NaN, bool and text are refused; infinity too unless `infinite`.

    Whole numbers of more than 64 bits are refused as well: a caller may go on with `value` itself.
    """
    limits = [
        f"{word} {bound:g}"
        for word, bound in (("above", above), ("at least", at_least), ("below", below), ("at most", at_most))
        if bound is not None
    ]
    limit = f"{'a number' if infinite else 'a finite number'} {' and '.join(limits)}".rstrip()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise refuse(name, value, limit, way_out)
    try:
        number = float(value)
    except OverflowError:
        raise refuse(name, "a number of too many digits", limit, way_out) from None
    if isinstance(value, numbers.Integral) and abs(int(value)) >= _WHOLE_LIMIT:
        raise refuse(name, "a number of too many digits", limit, way_out)
    inside = (
        (infinite or math.isfinite(number))
        and not math.isnan(number)
        and (above is None or number > above)
        and (at_least is None or number >= at_least)
        and (below is None or number < below)
        and (at_most is None or number <= at_most)
    )
    if not inside:
        raise refuse(name, value, limit, way_out)
    return number


def check_whole(
    name: str, value: object, *, at_least: int | None = None, at_most: int | None = None, way_out: str
) -> int:
    """`value` as an int within the limits, and 64 bits unless more are allowed (3.0 and True are no whole numbers)."""
    limits = [f"{word} {bound}" for word, bound in (("at least", at_least), ("at most", at_most)) if bound is not None]
    if (
        isinstance(value, bool)
        or not isinstance(value, numbers.Integral)
        or (at_least is not None and int(value) < at_least)
        or int(value) > (_WHOLE_LIMIT - 1 if at_most is None else at_most)
        or int(value) <= -_WHOLE_LIMIT
    ):
        told = "a number of too many digits" if isinstance(value, int) and abs(value) >= _WHOLE_LIMIT else value
        raise refuse(name, told, f"a whole number {' and '.join(limits)}".rstrip(), way_out)
    return int(value)


def failed(what: str, error: Exception, fields: Iterable[str], way_out: str) -> ModuleError:
    """The error to raise from one of a caller's own function, which was given a batch with these fields."""
    known = list(map(str, fields))
    said = first_line(error) if str(error).strip() else ""
    if isinstance(error, KeyError) and error.args and error.args[0] not in known:
        way_out = nearest(error.args[0], known)
    held = f"; the batch has the fields {', '.join(known)}" if known else ""
    return ModuleError(f"{what} fails ({type(error).__name__}{f': {said}' if said else ''}){held}", way_out)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; of one that says nothing, its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def check_choice(name: str, value: object, choices: Iterable[str]) -> str:
    """`value` if it is one of `choices`; otherwise an error that names the nearest one."""
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    meant = nearest(value, known) if isinstance(value, str) else ""
    way_out = meant if meant.endswith("?") else f"take {known[0]}, say"  # the list stands in the limit already
    raise refuse(name, value, f"one of {', '.join(known)}", way_out)


def nearest(value: object, known: Iterable[str]) -> str:
    """A way out for a misspelt word: the closest known one, or the list."""
    words = [str(word) for word in known]
    close = difflib.get_close_matches(str(value)[:_LONGEST_WORD], words, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]!r}?"
    listed = [printable(word[:_LONGEST_WORD]).replace("\n", "\\n") for word in words[:_MOST_WORDS]]
    more = [f"{len(words) - _MOST_WORDS} more"] if len(words) > _MOST_WORDS else []
    return f"choose among {', '.join(listed + more)}" if words else "there is none to choose"
