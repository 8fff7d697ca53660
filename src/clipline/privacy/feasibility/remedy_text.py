"""The noise of a mean update and what would make it shorter, in words: rows of a name, a text and an explanation."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..guarantee import rounded_up
from .noise_norm import TYPICAL_COSINE, Verdict, mean_update_norm, ratio_text, slowdown, verdict_text
from .remedies import Remedies

Row = tuple[str, str, str]  # name, text, one line of explanation

_USUAL_EPSILON = 10  # above, a promise is worth little


def row_lines(rows: Iterable[Row], explain: bool, found: tuple[str, ...] = ()) -> list[str]:
    """Lines with the name in a column of its own, each explained below if asked; ">" marks the names in `found`."""
    lines = []
    for name, text, explanation in rows:
        lines.append(f"{'> ' if name in found else '  '}{name:<18}{text}")
        if explain:
            lines.append(f"{'':22}{explanation}")
    return lines


def noise_rows(ratio: float, parameters: int, cohort_size: int) -> list[Row]:
    """The verdict on noise of `ratio` clips on the mean update, and the noise against a typical update."""
    typical = mean_update_norm(cohort_size, TYPICAL_COSINE)
    rows = [
        (
            "parameters",
            f"{parameters:,} trained, so that the noise on the mean update is {ratio_text(ratio)} clips long",
            "every parameter gets the same noise: its norm grows with the root of their number",
        ),
        (
            "can it train?",
            verdict_text(ratio),
            f"no mean is longer than a clip; in theory it takes {ratio_text(slowdown(ratio))} times the rounds or more "
            "(docs/plan.md)",
        ),
        (
            "typical update",
            f"the noise is {ratio_text(ratio / typical)} times a mean update of {typical:.2g} clips, if two users' "
            f"have a cosine of {TYPICAL_COSINE:g}",
            "an assumption, measured on handwriting; over rounds noise averages out, what users share adds up",
        ),
    ]
    if ratio > Verdict.COMFORTABLE.most:
        rows.append(
            (
                "server rate",
                "may have to be lower: at 0.5 clips handwriting learns at rate 0.3, and nothing at rate 1",
                "its best rates: 0.3 at 0.5 clips, 0.1 at 1, 0.03 at 2; clipline tune searches yours",
            )
        )
    return rows


def remedy_rows(remedies: Remedies, population_size: int, cohort_size: int) -> list[Row]:
    """What would bring the noise down, each alone, rounded to the safe side."""
    cohort, users = remedies.cohort_size, remedies.users
    rows = [
        (
            "larger cohort",
            f"of {_up(cohort)} of the same {population_size:,} users: {_times(cohort, cohort_size)} the work"
            if cohort is not None
            else f"none is enough: not even all {population_size:,} users in every round",
            "the noise is divided by the cohort, and grows more slowly than it: the paper's own remedy",
        ),
        (
            "more users",
            f"{_up(users[0])}, with {_up(users[1])} a round" if users is not None else "no number is enough",
            "the same share of more users takes part each round: nearly the same noise, divided by more users",
        ),
        (
            "fewer parameters",
            f"at most {_down(remedies.parameters)} trained" if remedies.parameters else "no number is enough",
            "a smaller model, or a large one of which most is frozen",
        ),
    ]
    if remedies.adapters is not None:
        adapters = remedies.adapters
        rows.append(
            (
                "adapters",
                f"of rank {adapters.rank} on its {adapters.matrices} matrices, the rest frozen: "
                f"{adapters.parameters:,} trained",
                "for a matrix of a rows and b columns, an adapter of rank r trains r (a + b) numbers",
            )
        )
    else:
        rows.append(
            (
                "adapters",
                "low-rank ones on a frozen model, if they have no more parameters than that",
                "for a matrix of a rows and b columns, an adapter of rank r trains r (a + b) numbers",
            )
        )
    weak = ", which promises little" if remedies.epsilon > _USUAL_EPSILON else ""
    rows.append(
        (
            "weaker promise",
            f"epsilon {rounded_up(remedies.epsilon, 3)}{weak}",
            "less noise hides a user less; above 10 an epsilon promises little",
        )
    )
    return rows


def _up(number: int) -> str:
    """Three digits, rounded up: 12,345 is 12,400."""
    unit = 10 ** max(len(str(number)) - 3, 0)
    return f"{-(-number // unit) * unit:,}"


def _down(number: int) -> str:
    unit = 10 ** max(len(str(number)) - 3, 0)
    return f"{number // unit * unit:,}"


def _times(number: int, before: int) -> str:
    return f"{math.ceil(10 * number / before) / 10:g} times"
