"""Delta: the default, and the values that promise nothing."""

from __future__ import annotations

import math
import warnings

from ..settings import LARGEST_DELTA
from .guarantee import delta_rounded_up


class LargeDeltaWarning(UserWarning):
    """Delta is above 1 / (number of users): a mechanism that publishes somebody's data could keep such a promise."""


def default_delta(population_size: int) -> float:
    """population_size^-1.1, as the paper has it: below 1/n for every n; at most 0.1, for fewer than nine users."""
    return min(math.pow(population_size, -1.1), LARGEST_DELTA)


def warn_of_delta(delta: float, population_size: int, stacklevel: int = 3) -> None:
    """A `LargeDeltaWarning` where delta is above 1/n."""
    if delta * population_size > 1:
        warnings.warn(
            f"delta={delta:g} is above 1 / (number of users) = {delta_rounded_up(1 / population_size)}: to publish all "
            "that one user has, drawn at random, would be (0, delta)-DP too; leave delta out for "
            f"{delta_rounded_up(default_delta(population_size))}",
            LargeDeltaWarning,
            stacklevel=stacklevel,
        )
