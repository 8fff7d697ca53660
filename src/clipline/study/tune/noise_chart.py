"""Step 2 as a picture: the metric over the noise, with the limit that is allowed, as inline SVG."""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recipe import Tuned

_WIDTH, _HEIGHT = 520, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 26, 46


def noise_chart(answer: Tuned) -> str:
    """Points joined by a line; the reference is the leftmost. A run that diverged is a cross on the worse edge."""
    metric, rising = answer.metric, sorted(answer.noise.trials, key=lambda trial: trial.noise_multiplier)
    reference = rising[0].value
    sign = 1 if metric.lower_is_better else -1
    limit = reference + sign * answer.question.degradation * abs(reference)
    values = [trial.value for trial in rising if math.isfinite(trial.value)]
    low, high = min(*values, limit, reference), max(*values, limit, reference)
    spread = (high - low) or abs(high) or 1.0
    low, high = low - 0.08 * spread, high + 0.08 * spread
    noises = [trial.noise_multiplier for trial in rising]
    first, last = math.log10(noises[0]) - 0.1, math.log10(noises[-1]) + 0.1

    def x(z: float) -> float:
        return _LEFT + (math.log10(z) - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    worst = _TOP if metric.lower_is_better else bottom
    # On the worse side of the limit, away from the curve, unless the edge of the chart is there.
    below = bottom - y(limit) > 22 if not metric.lower_is_better else y(limit) - _TOP < 22
    parts = [
        f'<line x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" class="axis"/>',
        f'<line x1="{_LEFT}" y1="{_TOP}" x2="{_LEFT}" y2="{bottom}" class="axis"/>',
        f'<line x1="{_LEFT}" y1="{y(limit):.1f}" x2="{right}" y2="{y(limit):.1f}" class="limit"/>',
        f'<text x="{_LEFT + 8}" y="{y(limit) + (15 if below else -6):.1f}" class="limit-text">'
        f"{100 * answer.question.degradation:g}% worse than with little noise</text>",
        f'<text x="{(_LEFT + right) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">noise z of a round of '
        f"{answer.question.target.cohort_size} users</text>",
        f'<text x="{_LEFT - 50}" y="{_TOP - 10}">{html.escape(metric.name)}</text>',
    ]
    digits = max(0, 1 - math.floor(math.log10(0.3 * (high - low))))  # two of the step between two labels
    parts += [
        f'<text x="{_LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.{digits}f}</text>'
        for value in (low + (high - low) * part for part in (0.05, 0.35, 0.65, 0.95))
    ]
    parts += [
        f'<text x="{x(z):.1f}" y="{bottom + 17}" text-anchor="middle">{z:.2g}</text>'
        for place, z in enumerate(noises)
        if place == 0 or x(z) - x(noises[place - 1]) > 26
    ]
    finite = [trial for trial in rising if math.isfinite(trial.value)]
    line = " ".join(f"{x(trial.noise_multiplier):.1f},{y(trial.value):.1f}" for trial in finite)
    parts.append(f'<polyline points="{line}" class="curve"/>')
    for trial in rising:
        chosen = trial == answer.noise.chosen
        title = f"<title>z = {trial.noise_multiplier:.3g}, run {html.escape(trial.run)}</title>"
        if math.isfinite(trial.value):
            across, down = x(trial.noise_multiplier), y(trial.value)
            parts.append(
                f'<circle cx="{across:.1f}" cy="{down:.1f}" r="{7 if chosen else 4}" class="point">{title}</circle>'
            )
            if chosen:
                parts.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="11" class="ring"/>')
        else:
            parts.append(
                f'<text x="{x(trial.noise_multiplier):.1f}" y="{worst:.1f}" text-anchor="middle" class="limit-text">'
                f"diverged{title}</text>"
            )
    label = f"{metric.name} over noise; the chosen noise {answer.noise.chosen.noise_multiplier:.3g} is ringed"
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(label)}" class="noise">'
        f"{''.join(parts)}</svg>"
    )
