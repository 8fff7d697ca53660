"""How long the noise on the mean update is, in clips, and whether a model can be trained under it.

Each coordinate of the mean update has noise of standard deviation delta_noise_multiplier * clip / cohort_size. Over
P parameters its norm is about sqrt(P) times that (the root of its mean square). No mean update is longer than the clip,
so the norm in clips is the least that noise over signal can be in a round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum

from ...errors import SettingError, check_whole, refuse
from ..guarantee import rounded_up
from ..noise_split import default_count_stddev, split_noise

Parameters = int | Sequence[Sequence[int]]  # how many are trained, or the shape of each tensor of them

# Of two users' updates, after clipping: in the first rounds of generated handwriting (studies/noise_norm.py), where
# users agree more than later on.
TYPICAL_COSINE = 0.02


class Verdict(Enum):
    """Whether training can work, by the norm of the noise on the mean update in clips, up to `most`.

    The limits are evidence, not theory (docs/plan.md). Comfortable: the paper's six tasks lose at most 5% at z*, where
    the norm is 0.20 to 1.10 (Table 1: z* sqrt(P) / 100), so all of them bear 0.2. Feasible: four of these six bear 0.5
    or more, and none was tried beyond 1.1; generated handwriting, a small model, loses 13% at 0.5 and 21% at 1.
    Doubtful: it loses 30% at 2. Hopeless: more than that, at a server rate chosen in hindsight. Something may be
    learned even then, but not a model that one would use.
    """

    COMFORTABLE = "comfortable"
    FEASIBLE = "feasible"
    DOUBTFUL = "doubtful"
    HOPELESS = "hopeless"

    @property
    def most(self) -> float:
        """The largest ratio that has this verdict."""
        return _MOST[self]

    def __str__(self) -> str:
        return self.value


_MOST = {Verdict.COMFORTABLE: 0.2, Verdict.FEASIBLE: 1.0, Verdict.DOUBTFUL: 2.0, Verdict.HOPELESS: math.inf}


def verdict(ratio: float) -> Verdict:
    """The word for noise whose norm on the mean update is `ratio` clips."""
    return next(word for word in Verdict if ratio <= word.most)


def verdict_text(ratio: float) -> str:
    """The verdict with its reason: "hopeless: the noise is 2.7 times the longest possible mean update"."""
    return f"{verdict(ratio)}: the noise is {ratio_text(ratio)} times the longest possible mean update"


def ratio_text(ratio: float, digits: int = 2) -> str:
    """A ratio to print: two digits, rounded up, but not because of the last bits of a float."""
    return rounded_up(ratio * (1 - 1e-12), digits)


def count_parameters(parameters: Parameters) -> int:
    """How many parameters these are: a number as it is, shapes multiplied out and added up."""
    way_out = "give the number of trained parameters, or the shape of each trained tensor"
    if isinstance(parameters, Sequence) and not isinstance(parameters, str):
        try:
            parameters = sum(math.prod(shape) for shape in parameters)
        except TypeError:
            raise refuse("parameters", parameters, "a number or a list of shapes", way_out) from None
    return check_whole("parameters", parameters, at_least=1, way_out=way_out)


def update_noise(noise_multiplier: float, cohort_size: int, count_stddev: float | None) -> float:
    """The noise multiplier of the summed updates, with the count noise that a training would have.

    Where the count would reveal more than the round may, no count can be released: all noise goes to the updates.
    """
    stddev = default_count_stddev(cohort_size, noise_multiplier) if count_stddev is None else count_stddev
    try:
        return float(split_noise(noise_multiplier, stddev))
    except SettingError:
        return noise_multiplier


def noise_norm(delta_noise_multiplier: float, cohort_size: int, parameters: int) -> float:
    """The norm of the noise on the mean update, in clips: the root of its mean square."""
    return delta_noise_multiplier / cohort_size * math.sqrt(parameters)


def most_parameters(delta_noise_multiplier: float, cohort_size: int, ratio: float) -> float:
    """How many parameters can be trained with noise of at most `ratio` clips on the mean update."""
    if delta_noise_multiplier == 0:
        return math.inf
    return (ratio * cohort_size / delta_noise_multiplier) ** 2


def mean_update_norm(cohort_size: int, cosine: float) -> float:
    """The norm of the mean, in clips, of updates as long as the clip of which any two have this cosine.

    1 if all users agree, 1 / sqrt(cohort_size) if their updates have nothing in common.
    """
    return math.sqrt(cosine + (1 - cosine) / cohort_size)


def slowdown(ratio: float) -> float:
    """How many times the rounds training takes at least, at the best server rate, for the same descent.

    Assumes a loss that curves alike in every direction, with curvature L. A step of rate s along a mean g with noise of
    norm R lowers it by s |g|^2 - s^2 L (|g|^2 + R^2) / 2 on average. At the best s that is |g|^2 / (2 L) divided by
    1 + (R / |g|)^2, and |g| is at most the clip.
    """
    return 1 + ratio**2
