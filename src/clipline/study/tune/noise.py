"""Step 2, the rule: how much noise the model bears at the cohort of the trial.

Noise is raised step by step until the metric has degraded by more than is allowed, relative to the run with the least
noise. One more run halfway back (in the logarithm) then narrows it down: the final cohort is in inverse proportion to
the noise that is found, so that a factor of 1.8 in noise is one of 1.8 in the work of the final training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST = 0.01  # of the search for rates; the paper's
GRID = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_SHORT_STEP = 1.5  # a step by less than this factor is not halved


@dataclass(frozen=True)
class NoiseTrial:
    """One run of step 2: its noise multiplier and its converged metric, which is not finite where it diverged."""

    noise_multiplier: float
    value: float
    run: str = ""  # its identity in the study


def degradation(reference: float, value: float, *, lower_is_better: bool) -> float:
    """By how much `value` is worse than `reference`, relative to it: 0.05 is 5%; below 0 it is better.

    Infinite for a run that diverged. A reference of zero cannot be worsened relatively: any loss from it is infinite.
    """
    if not math.isfinite(value):
        return math.inf
    loss = value - reference if lower_is_better else reference - value
    if reference == 0:
        return math.inf if loss > 0 else 0.0
    return loss / abs(reference)


def change_in_words(loss: float) -> str:
    """What `degradation` gave, for people: 5.0% worse, 0.3% better, or no change."""
    if abs(loss) < 0.0005:
        return "no change"
    return f"{100 * abs(loss):.1f}% {'worse' if loss > 0 else 'better'}"


def borne(trials: Sequence[NoiseTrial], allowed: float, *, lower_is_better: bool) -> NoiseTrial:
    """The most noise before the first, from the least upwards, that degrades the metric by more than `allowed`.

    The trial with the least noise is the reference. A run with more noise that happens to recover does not count: the
    metric has begun to degrade before it.
    """
    rising = sorted(trials, key=lambda trial: trial.noise_multiplier)
    chosen = rising[0]
    for trial in rising[1:]:
        if degradation(rising[0].value, trial.value, lower_is_better=lower_is_better) > allowed:
            break
        chosen = trial
    return chosen


def next_noises(
    trials: Sequence[NoiseTrial],
    allowed: float,
    *,
    enough: float,
    most: float,
    lower_is_better: bool,
    at_once: int = 1,
) -> list[float]:
    """The noises to try next, `at_once` of them at most; none if step 2 is at its end.

    `enough` is the noise that meets the target without a larger cohort: more than that buys nothing and is not tried.
    `most` is the largest noise that the cohort of the trial can have.
    """
    rising = sorted(trial.noise_multiplier for trial in trials)
    chosen = borne(trials, allowed, lower_is_better=lower_is_better).noise_multiplier
    limit = min(enough, most)
    if chosen == rising[-1]:  # not degraded yet
        return sorted({z for z in (*GRID, limit) if chosen < z <= limit})[:at_once]
    above = min(z for z in rising if z > chosen)
    # One run between points of the grid is enough: a second one would be told apart by chance alone.
    middle = float(f"{math.sqrt(chosen * above):.3g}")
    on_grid = chosen in (*GRID, rising[0]) and above in (*GRID, limit)
    return [middle] if on_grid and above > _SHORT_STEP * chosen else []
