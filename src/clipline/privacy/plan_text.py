"""A plan as one screen of text: the guarantee, the settings, the same run under other terms, epsilon over rounds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .feasibility.remedy_text import Row, noise_rows, remedy_rows, row_lines
from .guarantee import rounded_up
from .noise_split import PAPERS_SHARE, counting_cost
from .relations import Relation

if TYPE_CHECKING:  # `planning` imports this module
    from .planning import Plan


def plan_text(plan: Plan, explain: bool = False) -> str:
    """The whole plan; a ">" marks what was asked for. Epsilons and noise multipliers are rounded up.

    `explain` adds a line of explanation below every line.
    """
    found = {"scale": ("cohort size", "noise multiplier")}.get(plan.found, (plan.found.replace("_", " "),))
    lines = [str(plan.guarantee), *_explained(explain, "epsilon"), ""]
    lines += row_lines(_rows(plan), explain, found)
    if plan.parameters is not None and plan.noise_norm is not None:
        lines += row_lines(noise_rows(plan.noise_norm, plan.parameters, plan.cohort_size), explain)
    if plan.remedies is not None:
        lines += ["", f"  what would bring the noise to {plan.remedies.ratio:g} clip, each alone:"]
        lines += _explained(explain, "remedies")
        lines += row_lines(remedy_rows(plan.remedies, plan.population_size, plan.cohort_size), explain)
    lines += ["", "  the same noise, cohort and rounds under other terms (epsilon):"]
    lines += [*_explained(explain, "terms"), *_comparison(plan)]
    lines += ["", "  epsilon over rounds:", *_explained(explain, "curve"), *text_curve(plan.curve)]
    return "\n".join(lines)


_EXPLANATIONS = {
    "epsilon": "seeing the model changes the odds of any guess on one user by at most e^epsilon, but for delta",
    "remedies": "computed with all else as planned; under noise longer than a clip few models train well",
    "terms": "a relation says what is hidden: a user's presence, data, or exchange; fixed cohorts cost more",
    "curve": "what has been spent after so many rounds: fewer, if their number is fixed beforehand, spend less",
}


def _explained(explain: bool, what: str) -> list[str]:
    return [f"{'':22}{_EXPLANATIONS[what]}"] if explain else []


def _rows(plan: Plan) -> list[Row]:
    return [
        (
            "population size",
            f"{plan.population_size:,}{_declared(plan)}",
            "everybody whose data may be trained on: the more, the less often each one takes part",
        ),
        (
            "cohort size",
            f"{plan.cohort_size:,}{_spread(plan)}, each user with chance {plan.rate:.3g} a round",
            "how many users train in a round; the noise on their mean is divided by it",
        ),
        (
            "rounds",
            f"{plan.rounds:,}, so that a user takes part {plan.rate * plan.rounds:.3g} times on average",
            "each round releases something, so that more rounds need more noise for the same epsilon",
        ),
        (
            "noise multiplier",
            f"{_noise_up(plan.noise_multiplier)} of the whole round",
            "standard deviation of the noise in clips, for updates and count together: what is accounted",
        ),
        (
            "adaptive clip",
            _cost_of_counting(plan),
            "the clip follows a noisy count of updates within it; that count costs the updates some noise",
        ),
        (
            "noise",
            _noise(plan),
            "the clip is the longest that one user's update may be; the mean is the sum divided by the cohort",
        ),
        (
            "accountant",
            _accountants(plan),
            "how epsilon was computed: both ways are bounds that hold, and the smaller one counts",
        ),
    ]


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


def _declared(plan: Plan) -> str:
    """Where the relation needs it: that the number of users is not read from the data."""
    if plan.guarantee.relation is not Relation.ADD_OR_REMOVE or plan.sampling != "poisson":
        return ""
    return " declared beforehand; counted in the data instead, the same epsilon is for zero-out"


def _spread(plan: Plan) -> str:
    if plan.sampling == "fixed":
        return " exactly"
    return f" expected, give or take {math.sqrt(plan.cohort_size * (1 - plan.rate)):.3g} (one standard deviation)"


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


def _noise(plan: Plan) -> str:
    multiplier = plan.update_noise
    return (
        f"{multiplier:.4g} clips a coordinate on the sum, {multiplier / plan.cohort_size:.3g} clips on the mean update"
    )


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
