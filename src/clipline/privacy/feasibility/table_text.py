"""A table of noise as one screen of text: cohorts down, rounds across."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..guarantee import delta_rounded_up
from .noise_norm import Verdict, ratio_text, verdict
from .remedy_text import noise_rows, remedy_rows, row_lines

if TYPE_CHECKING:  # `noise_table` imports this module
    from .noise_table import NoiseCell, NoiseTable

_MARKS = {Verdict.COMFORTABLE: "+", Verdict.FEASIBLE: " ", Verdict.DOUBTFUL: "?", Verdict.HOPELESS: "x"}
_WIDTH = 12


def table_text(table: NoiseTable, explain: bool = False) -> str:
    """The noise multipliers, then what they mean for a model, then what to ask next. Noise is rounded up."""
    lines = _promise(table)
    lines += _explained(explain, "smaller is more private; delta is the chance that epsilon does not hold")
    lines += ["", "  noise multiplier of the whole round:"]
    lines += _explained(explain, "standard deviation of the noise on the sum over users, in clips")
    lines += _grid(table, lambda cell: f"{ratio_text(cell.noise_multiplier, 3)} ", explain)
    lines.append("")
    lines += _for_any_model(table, explain) if table.parameters is None else _for_model(table, explain)
    return "\n".join(lines)


def _promise(table: NoiseTable) -> list[str]:
    promise = f"epsilon {ratio_text(table.epsilon, 3)}, delta {delta_rounded_up(table.delta)}"
    warning = "" if table.relation.sound else "WARNING, not a guarantee: "
    sampling = {"poisson": "Poisson", "fixed": "fixed-size"}[table.sampling]
    first = f"{warning}({promise}) for {table.relation.phrase}, {sampling} sampling, {table.population_size:,} users"
    return [first]


def _for_any_model(table: NoiseTable, explain: bool) -> list[str]:
    most = f"  most parameters for which the noise on the mean update is no longer than {Verdict.FEASIBLE.most:g} clip:"
    best = table.best
    return [
        most,
        *_explained(
            explain, "no mean update is longer than one clip; models beyond this drown in noise (docs/plan.md)"
        ),
        *_grid(table, lambda cell: f"{_short(cell.most_parameters)} ", explain),
        "",
        "  add --parameters P or --model FILE.py for a verdict, --cohort-size and --rounds for one plan in full",
        *_explained(
            explain, f"the least noise on a mean update here: {best.cohort_size:,} a round, {best.rounds:,} rounds"
        ),
    ]


def _for_model(table: NoiseTable, explain: bool) -> list[str]:
    parameters = table.parameters
    assert parameters is not None

    def norm(cell: NoiseCell) -> str:
        ratio = cell.noise_norm(parameters)
        return ratio_text(ratio) + _MARKS[verdict(ratio)]

    legend = ", ".join(f"{_MARKS[word].strip() or 'no mark:'} {word}" + _range(word) for word in Verdict)
    lines = [f"  noise on the mean update of {parameters:,} parameters, in clips (the longest that an update may be):"]
    lines += _explained(explain, "no mean update is longer than one clip, which it is where all users agree")
    lines += [*_grid(table, norm, explain), f"    {legend}", ""]
    found = {rounds: table.least_feasible(rounds) for rounds in table.rounds}
    cells = [cell for cell in found.values() if cell is not None]
    if cells:
        lines.append("  the least cohort of these that is feasible:")
        lines += _explained(explain, "more rounds train further but need more noise, and so a larger cohort")
        lines += [f"    {cell.rounds:,} rounds: {cell.cohort_size:,} users a round" for cell in cells]
        return lines
    best = table.best
    lines += [f"  none is feasible. The least noise, {best.cohort_size:,} users a round for {best.rounds:,} rounds:"]
    lines += row_lines(noise_rows(best.noise_norm(parameters), parameters, best.cohort_size), explain)
    if table.remedies is not None:
        lines += ["", f"  what would bring that to {table.remedies.ratio:g} clip, each alone:"]
        lines += row_lines(remedy_rows(table.remedies, table.population_size, best.cohort_size), explain)
    return lines


def _range(word: Verdict) -> str:
    if word is Verdict.HOPELESS:
        return ""
    return f" to {word.most:g}"


def _grid(table: NoiseTable, text: Callable[[NoiseCell], str], explain: bool) -> list[str]:
    """A head of rounds and a line for every cohort. Each text ends with a mark or a space."""
    lines = [f"    {'users a round':<14}" + "".join(f"{f'{rounds:,} rounds':>{_WIDTH}} " for rounds in table.rounds)]
    for cohort in table.cohorts:
        cells = [text(cell) for cell in table.cells if cell.cohort_size == cohort]
        lines.append(f"    {cohort:>13,} " + "".join(f"{cell:>{_WIDTH + 1}}" for cell in cells))
        lines += _explained(explain, f"each user takes part with chance {cohort / table.population_size:.3g} a round")
    return [line.rstrip() for line in lines]


def _explained(explain: bool, words: str) -> list[str]:
    return [f"{'':22}{words}"] if explain else []


def _short(number: int) -> str:
    """Two digits, rounded down: 1,206,590 is 1.2M."""
    for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            digits = 1 if number < 10 * size else 0
            step = size // 10**digits
            return f"{number // step * step / size:.{digits}f}{letter}"
    return f"{number:,}"
