"""Plans and tables of noise as one screen of text. Epsilons and noise are rounded up, what a model bears down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ..privacy.feasibility import (
    TYPICAL_COSINE,
    NoiseCell,
    NoiseTable,
    Remedies,
    Verdict,
    mean_update_norm,
    rate_text,
    ratio_text,
    verdict,
    verdict_text,
)
from ..privacy.guarantee import delta_rounded_up, rounded_up
from ..privacy.noise_split import PAPERS_SHARE, counting_cost
from ..privacy.planning import Plan
from ..privacy.relations import Relation

_USUAL_EPSILON = 10  # above, a promise is worth little
_MARKS = {Verdict.COMFORTABLE: "+", Verdict.FEASIBLE: " ", Verdict.DOUBTFUL: "?", Verdict.HOPELESS: "x"}
_WIDTH = 12
_EXPLANATIONS = {  # a line below the line of this name, where that is asked for
    "epsilon": "seeing the model changes the odds of any guess on one user by at most e^epsilon, but for delta",
    "population size": "everybody whose data may be trained on: the more, the less often each one takes part",
    "cohort size": "how many users train in a round; the noise on their mean is divided by it",
    "rounds": "each round releases something, so that more rounds need more noise for the same epsilon",
    "noise multiplier": "standard deviation of the noise in clips, for updates and count together: what is accounted",
    "adaptive clip": "the clip follows a noisy count of updates within it; that count costs the updates some noise",
    "noise": "the clip is the longest that one user's update may be; the mean is the sum divided by the cohort",
    "bands": "noise of later rounds cancels some of the earlier, for users drawn from groups in turn (noise.md)",
    "accountant": "how epsilon was computed: both ways are bounds that hold, and the smaller one counts",
    "parameters": "every parameter gets the same noise: its norm grows with the root of their number",
    "can it train?": "no mean is longer than a clip; R clips of noise take 1 + R^2 times the rounds (plan.md)",
    "typical update": "assumed, as measured on handwriting; over rounds noise averages out, what users share adds up",
    "server rate": "SGD's best: 0.3 at 0.5 clips, 0.1 at 1, 0.03 at 2; the normalised server needs none",
    "larger cohort": "the noise is divided by the cohort, and grows more slowly than it: the paper's own remedy",
    "more users": "the same share of more users takes part each round: nearly the same noise, divided by more users",
    "fewer parameters": "a smaller model, or a large one of which most is frozen",
    "adapters": "for a matrix of a rows and b columns, an adapter of rank r trains r (a + b) numbers",
    "weaker promise": "less noise hides a user less; above 10 an epsilon promises little",
    "remedies": "computed with all else as planned; under noise longer than a clip few models train well",
    "terms": "a relation says what is hidden: a user's presence, data, or exchange; fixed cohorts cost more",
    "curve": "what has been spent after so many rounds: fewer, if their number is fixed beforehand, spend less",
}


def plan_text(plan: Plan, explain: bool = False) -> str:
    """The whole plan; a ">" marks what was asked for. `explain` adds a line of explanation below every line."""
    found = {"scale": ("cohort size", "noise multiplier")}.get(plan.found, (plan.found.replace("_", " "),))
    lines = [str(plan.guarantee), *_explained(explain, _EXPLANATIONS["epsilon"]), ""]
    if plan.parameters is not None and plan.noise_norm is not None:
        lines += row_lines(noise_rows(plan.noise_norm, plan.parameters, plan.cohort_size), explain)
    lines += row_lines(_rows(plan), explain, found)
    if plan.remedies is not None:
        lines += ["", f"  what would bring the noise to {plan.remedies.ratio:g} clip, each alone:"]
        lines += _explained(explain, _EXPLANATIONS["remedies"])
        lines += row_lines(remedy_rows(plan.remedies, plan.population_size, plan.cohort_size), explain)
    if plan.comparison:
        lines += ["", "  the same noise, cohort and rounds under other terms (epsilon):"]
        lines += [*_explained(explain, _EXPLANATIONS["terms"]), *_comparison(plan)]
    lines += ["", "  epsilon over rounds:", *_explained(explain, _EXPLANATIONS["curve"]), *text_curve(plan.curve)]
    return "\n".join(lines)


def row_lines(rows: Mapping[str, str], explain: bool, found: tuple[str, ...] = ()) -> list[str]:
    """Lines with the name in a column of its own, each explained below if asked; ">" marks the names in `found`."""
    lines = []
    for name, text in rows.items():
        lines.append(f"{'> ' if name in found else '  '}{name:<18}{text}")
        lines += _explained(explain, _EXPLANATIONS[name])
    return lines


def _explained(explain: bool, words: str) -> list[str]:
    return [f"{'':22}{words}"] if explain else []


def _rows(plan: Plan) -> dict[str, str]:
    exact = plan.sampling == "fixed"
    spread = math.sqrt(plan.cohort_size * (1 - plan.rate))
    cohort = " exactly" if exact else f" expected, give or take {spread:.3g} (one standard deviation)"
    declared = plan.guarantee.relation is Relation.ADD_OR_REMOVE and not exact
    counted = " declared beforehand; counted in the data instead, the same epsilon is for zero-out" * declared
    return {
        "population size": f"{plan.population_size:,}{counted}",
        "cohort size": f"{plan.cohort_size:,}{cohort}, each user with chance {plan.rate:.3g} a round",
        "rounds": f"{plan.rounds:,}, so that a user takes part {plan.rate * plan.rounds:.3g} times on average",
        "noise multiplier": f"{_noise_up(plan.noise_multiplier)} of the whole round",
        "adaptive clip": _cost_of_counting(plan),
        "noise": f"{plan.update_noise:.4g} clips a coordinate on the sum, "
        f"{plan.update_noise / plan.cohort_size:.3g} clips on the mean update",
        "accountant": _accountants(plan),
        **({"bands": _bands(plan)} if plan.bands > 1 else {}),
    }


def _bands(plan: Plan) -> str:
    memory = f", {plan.noise_memory / 1e6:.3g} MB of memory" if plan.noise_memory else ""
    return (
        f"{plan.bands}: {_gain(plan.gain)} times less noise in the models than independent noise leaves; they keep "
        f"{plan.bands - 1} {'vector' if plan.bands == 2 else 'vectors'}, 4 bytes a parameter{memory}"
    )


def _gain(gain: float) -> str:
    """How many times less, rounded down."""
    return f"{math.floor(gain * 100) / 100:.2f}"


def text_curve(points: tuple[tuple[int, float], ...], height: int = 6) -> list[str]:
    """Epsilon over rounds as a bar chart in eighths of a character; the axes are labelled at both ends."""
    if not points:
        return ["    none: not private"]
    top = max(epsilon for _, epsilon in points)
    lines = []
    for row in range(height, 0, -1):
        bar = "".join(5 * _eighths(epsilon / top * height - (row - 1) if top > 0 else 0.0) for _, epsilon in points)
        label = rounded_up(top, 3) if row == height else "0" if row == 1 else ""
        lines.append(f"    {label:>8} |{bar}")
    first, last = f"{points[0][0]}", f"{points[-1][0]} rounds"
    return [*lines, f"    {'':>8} +{first}{'-' * max(1, 5 * len(points) - len(first) - len(last))}{last}"]


def _cost_of_counting(plan: Plan) -> str:
    if plan.delta_noise_multiplier is None:
        needed = f"{plan.noise_multiplier / 2:.3g}"
        return f"not possible with {plan.count_stddev:g} users of noise on the count: it needs more than {needed}"
    if plan.noise_multiplier == 0:
        return "free, as there is no noise at all"
    cost = _percent(counting_cost(plan.noise_multiplier, plan.count_stddev))
    return (
        f"updates get {_noise_up(float(plan.delta_noise_multiplier))} ({cost}), "
        f"the count {plan.count_stddev:.4g} users of noise{_papers_choice(plan)}"
    )


def _papers_choice(plan: Plan) -> str:
    """What the paper's noise on the count would cost, where the plan has another one and it matters."""
    papers = plan.cohort_size / PAPERS_SHARE
    if plan.count_stddev == papers:
        return ""
    cost = counting_cost(plan.noise_multiplier, papers)
    return f" (the paper's {papers:g}: {_percent(cost) if math.isfinite(cost) else 'not possible'})"


def _percent(share: float) -> str:
    return f"+{100 * share:.2g}%" if share < 1 else f"+{100 * share:.0f}%"


def _accountants(plan: Plan) -> str:
    guarantee, by_renyi = plan.guarantee, plan.renyi_epsilon
    if not guarantee.private or not guarantee.sound or by_renyi == 0:
        return f"{guarantee.accountant}"
    if guarantee.accountant == "renyi":
        return "renyi, tighter here than the privacy loss"
    return f"privacy loss, {100 * (1 - guarantee.epsilon / by_renyi):.2g}% below Renyi's {rounded_up(by_renyi, 4)}"


def _comparison(plan: Plan) -> list[str]:
    relations = list(dict.fromkeys(relation for _, relation, _ in plan.comparison))
    lines = ["    " + f"{'':10}" + "".join(f"{relation!s:>16}" for relation in relations)]
    for sampling in dict.fromkeys(sampling for sampling, _, _ in plan.comparison):
        cells = {relation: epsilon for name, relation, epsilon in plan.comparison if name == sampling}
        lines.append("    " + f"{sampling:10}" + "".join(f"{rounded_up(cells[r], 4):>16}" for r in relations))
    return lines


def _noise_up(noise: float) -> str:
    """A noise multiplier to print: six digits, rounded up, but not because of the last bit of a float."""
    return rounded_up(noise * (1 - 1e-12), 6)


def _eighths(part: float) -> str:
    return " ▁▂▃▄▅▆▇█"[round(min(max(part, 0.0), 1.0) * 8)]


def table_text(table: NoiseTable, explain: bool = False) -> str:
    """The noise multipliers, then what they mean for a model, then what to ask next. Noise is rounded up."""
    warning = "" if table.relation.sound else "WARNING, not a guarantee: "
    promise = f"epsilon {ratio_text(table.epsilon, 3)}, delta {delta_rounded_up(table.delta)}"
    sampling = {"poisson": "Poisson", "fixed": "fixed-size"}[table.sampling]
    terms = f"{table.relation.phrase}, {sampling} sampling, {table.population_size:,} users"
    lines = [f"{warning}({promise}) for {terms}"]
    lines += _explained(explain, "smaller is more private; delta is the chance that epsilon does not hold")
    lines += ["", *(_for_any_model(table, explain) if table.parameters is None else _for_model(table, explain))]
    if table.banded:
        lines += ["", "  noise that stays in the models, as the multiplier of independent noise:"]
    else:
        lines += ["", "  noise multiplier of the whole round:"]
    lines += _explained(explain, "standard deviation of the noise on the sum over users, in clips")
    lines += _grid(table, lambda cell: f"{ratio_text(cell.noise_multiplier * cell.lasting_share, 3)} ", explain)
    if table.banded:
        lines += ["", "  bands of the noise, and how many times less of it stays in the models:"]
        lines += _explained(
            explain, "1 is independent noise; the memory is a vector of the model's size for each other"
        )
        lines += _grid(table, lambda cell: f"{cell.bands}, {_gain(cell.gain)}x " if cell.bands > 1 else "1 ", explain)
        lines += ["    later noise cancels part of earlier noise: train with --noise banded"]
    if table.parameters is None:
        one = "--cohort-size, --rounds and --noise banded" if table.banded else "--cohort-size and --rounds"
        lines += ["", f"  for a verdict add --parameters P or --model FILE.py; for one plan in full {one}"]
    return "\n".join(lines)


def _for_any_model(table: NoiseTable, explain: bool) -> list[str]:
    best = table.best
    least = f"the least noise on a mean update here: {best.cohort_size:,} a round, {best.rounds:,} rounds"
    return [
        f"  most parameters for which the noise on the mean update is no longer than {Verdict.FEASIBLE.most:g} clip:",
        *_explained(explain, "no mean update is longer than a clip; models beyond this drown in noise (plan.md)"),
        *_grid(table, lambda cell: f"{_short(cell.most_parameters)} ", explain),
        *_explained(explain, least),
    ]


def _for_model(table: NoiseTable, explain: bool) -> list[str]:
    parameters = table.parameters
    assert parameters is not None

    def norm(cell: NoiseCell) -> str:
        ratio = cell.noise_norm(parameters)
        return ratio_text(ratio) + _MARKS[verdict(ratio)]

    upto = {word: "" if word is Verdict.HOPELESS else f" to {word.most:g}" for word in Verdict}
    legend = ", ".join(f"{_MARKS[word].strip() or 'no mark'} is {word}{upto[word]}" for word in Verdict)
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


def _grid(table: NoiseTable, text: Callable[[NoiseCell], str], explain: bool) -> list[str]:
    """A head of rounds and a line for every cohort. Each text ends with a mark or a space."""
    lines = [f"    {'users a round':<14}" + "".join(f"{f'{rounds:,} rounds':>{_WIDTH}} " for rounds in table.rounds)]
    for cohort in table.cohorts:
        cells = [text(cell) for cell in table.cells if cell.cohort_size == cohort]
        lines.append(f"    {cohort:>13,} " + "".join(f"{cell:>{_WIDTH + 1}}" for cell in cells))
        lines += _explained(explain, f"each user takes part with chance {cohort / table.population_size:.3g} a round")
    return [line.rstrip() for line in lines]


def _short(number: int) -> str:
    """Two digits, rounded down: 1,206,590 is 1.2M."""
    for size, letter in ((10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            digits = 1 if number < 10 * size else 0
            step = size // 10**digits
            return f"{number // step * step / size:.{digits}f}{letter}"
    return f"{number:,}"


def noise_rows(ratio: float, parameters: int, cohort_size: int) -> dict[str, str]:
    """The verdict on noise of `ratio` clips on the mean update, and the noise against a typical update."""
    typical = mean_update_norm(cohort_size, TYPICAL_COSINE)
    rows = {
        "can it train?": verdict_text(ratio),
        "parameters": f"{parameters:,} trained, so that the noise on the mean update is {ratio_text(ratio)} clips long",
        "typical update": f"the noise is {ratio_text(ratio / typical)} times a mean update of {typical:.2g} clips, if "
        f"two users' have a cosine of {TYPICAL_COSINE:g}",
    }
    if (rate := rate_text(ratio)) is not None:
        rows["server rate"] = f"SGD's {rate}"
    return rows


def remedy_rows(remedies: Remedies, population_size: int, cohort_size: int) -> dict[str, str]:
    """What would bring the noise down, each alone, rounded to the safe side."""
    cohort, users, adapters = remedies.cohort_size, remedies.users, remedies.adapters
    rows = {
        "larger cohort": f"none is enough: not even all {population_size:,} users in every round",
        "more users": "no number is enough",
        "fewer parameters": "no number is enough",
        "adapters": "low-rank ones on a frozen model, if they have no more parameters than that",
        "weaker promise": f"epsilon {rounded_up(remedies.epsilon, 3)}",
    }
    if cohort is not None:
        work = f"{math.ceil(10 * cohort / cohort_size) / 10:g} times the work"
        rows["larger cohort"] = f"of {_up(cohort)} of the same {population_size:,} users: {work}"
    if users is not None:
        rows["more users"] = f"{_up(users[0])}, with {_up(users[1])} a round"
    if remedies.parameters:
        rows["fewer parameters"] = f"at most {_down(remedies.parameters)} trained"
    if adapters is not None:
        of = f"of rank {adapters.rank} on its {adapters.matrices} matrices, the rest frozen"
        rows["adapters"] = f"{of}: {adapters.parameters:,} trained"
    if remedies.epsilon > _USUAL_EPSILON:
        rows["weaker promise"] += ", which promises little"
    return rows


def _up(number: int) -> str:
    """Three digits, rounded up: 12,345 is 12,400."""
    unit = 10 ** max(len(str(number)) - 3, 0)
    return f"{-(-number // unit) * unit:,}"


def _down(number: int) -> str:
    unit = 10 ** max(len(str(number)) - 3, 0)
    return f"{number // unit * unit:,}"
