"""`clipline plan` without typer, whose start takes longer than most plans: the answer, and questions in plain form."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import RunError, SettingError, refuse

_WHOLE, _NUMBER, _WORD = (
    re.compile("[0-9]{1,15}"),
    re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?"),
    re.compile(r"[^-].*"),
)
_PLAIN: dict[str, tuple[re.Pattern[str], type]] = {
    "users": (_WHOLE, int), "cohort": (_WHOLE, int), "rounds": (_WHOLE, int), "epsilon": (_NUMBER, float),
    "noise_multiplier": (_NUMBER, float), "delta": (_NUMBER, float), "count_stddev": (_NUMBER, float),
    "sampling": (_WORD, str), "relation": (_WORD, str), "scale": (_WORD, str),
}  # fmt: skip


def answered(arguments: list[str]) -> bool:
    """Answer `plan --users 40000 ...` if every word is a known option, given once, with a value of its type.

    Anything else, a mistake or --help or a rarer option, is left to typer, and nothing is printed.
    """
    question = _plain_question(arguments)
    if question is None:
        return False
    as_json, scale = question.pop("json"), question.pop("scale", None)
    print(answer(question, scale, None, as_json), flush=True)
    return True


def _plain_question(arguments: list[str]) -> dict[str, Any] | None:
    if arguments[:1] != ["plan"] or len(arguments) == 1:
        return None
    question: dict[str, Any] = {"json": False}
    words = iter(arguments[1:])
    for word in words:
        if word == "--json":
            question["json"] = True
            continue
        name = word.removeprefix("--").replace("-", "_")
        value = next(words, "")
        if word != "--" + name.replace("_", "-") or name not in _PLAIN or name in question:
            return None
        pattern, kind = _PLAIN[name]
        if not pattern.fullmatch(value):
            return None
        question[name] = kind(value)
    return question


def answer(settings: dict[str, Any], scale: str | None, plot: Path | None, as_json: bool) -> str:
    """The plan as text or JSON, and as a figure if `plot` is given. `settings` are those of `clipline.plan`."""
    from ..privacy.planning import plan

    if "users" not in settings:
        raise SettingError("users is missing: give --users, the number of users in the population")
    if plot is not None and (plot.exists() or plot.suffix != ".png"):
        raise RunError(f"plot={str(plot)!r} must be a new file that ends in .png: give another name")
    with _patience():
        result = plan(**settings, scale=None if scale is None else _parse_scale(scale))
    if plot is not None:
        _draw(result, plot)
    return json.dumps(result.to_json(), allow_nan=False) if as_json else str(result)


@contextmanager
def _patience() -> Iterator[None]:
    """Say on standard error that a search is still on, every two seconds from the first on; most end before."""
    done = threading.Event()

    def tell() -> None:
        seconds = 1
        while not done.wait(1 if seconds == 1 else 2):
            print(f"searching, {seconds} s so far ...", file=sys.stderr, flush=True)
            seconds += 2

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()


def _parse_scale(text: str) -> tuple[int, float]:
    match = re.fullmatch(r"\s*m\s*=\s*(\d+)\s*,\s*z\s*=\s*([0-9.eE+-]+)\s*", text)
    try:
        if match:
            return int(match[1]), float(match[2])
    except ValueError:
        pass
    raise refuse("scale", text, "of the form m=100,z=0.03", "give the cohort and noise that the trial bore")


def _draw(result: Any, path: Path) -> None:
    from ..plotting import new_figure, save_figure

    figure, (axis,) = new_figure(1, 1, width=7.5, height=4.2)
    axis.plot([rounds for rounds, _ in result.curve], [epsilon for _, epsilon in result.curve])
    axis.set(xlabel="rounds", ylabel=f"epsilon at delta {result.guarantee.delta_text}", ylim=(0, None), xlim=(0, None))
    axis.set_title(str(result.guarantee), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(figure, path)
