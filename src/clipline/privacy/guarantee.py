"""What a run promises: epsilon and delta, with everything needed to quote them."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Literal

from ..settings import LARGEST_DELTA
from .events import SamplingName
from .numerics import gaussian_mu
from .relations import Relation

AccountantName = Literal["renyi", "privacy loss"]

SAMPLERS = {
    "none": "no sampling",
    "poisson": "Poisson sampling",
    "grouped-poisson": "Poisson sampling from groups in turn, banded noise",
    "truncated-poisson": "Poisson sampling with a cap",
    "fixed": "fixed-size sampling",
    "mixed": "mixed sampling",
}
KNOWN_SEED = "noise from a seed: whoever knows it can subtract the noise"
SHOWN_ERRORS = "errors of users are shown (on_error='raise'), which it does not cover"
ACCOUNTANTS = {"renyi": "Renyi accountant", "privacy loss": "privacy-loss accountant"}


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) differential privacy for one user. Printing it gives the whole sentence.

    Args:
      epsilon: The privacy loss that `delta` is for. Infinity where nothing is promised.
      delta: The chance that is left for a larger loss.
      relation: Which two populations are neighbours.
      sampler: "none", "poisson", "grouped-poisson", "truncated-poisson" or "fixed"; "mixed" if rounds differ.
      accountant: Which of the two accountants gave epsilon.
      order: The Renyi order that gave epsilon. None for the privacy-loss accountant.
      rounds: How many rounds are covered.
      noisy: Whether every round had noise.
      from_seed: Whether cohorts and noise come from a seed. The promise then holds for those who do not know it.
      statistics: Names of private statistics that were released beside the rounds. Epsilon and delta cover them.
      example_level: Whether each user is one example (`Population.one_each`).
      shows_errors: Whether a user's error would have ended the run (`on_error="raise"`). Nothing covers that.

    Example:
      >>> result.guarantee.epsilon <= 4.0
      True
    """

    epsilon: float
    delta: float
    relation: Relation
    sampler: SamplingName | Literal["mixed"]
    accountant: AccountantName
    order: float | None
    rounds: int
    noisy: bool = True
    from_seed: bool = False
    statistics: tuple[str, ...] = ()
    example_level: bool = False
    shows_errors: bool = False

    @property
    def private(self) -> bool:
        """Whether epsilon is finite, that is, whether anything is guaranteed at all."""
        return math.isfinite(self.epsilon)

    @property
    def sound(self) -> bool:
        """Whether this may be claimed. False for the paper's convention, which only reproduces a table."""
        return self.relation.sound

    @property
    def mu(self) -> float:
        """The Gaussian-DP mu whose trade-off curve passes through (epsilon, delta); see `gaussian_mu`."""
        return gaussian_mu(self.epsilon, self.delta)

    def __str__(self) -> str:
        """One sentence to quote; epsilon and delta are rounded up at the last digit printed."""
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        terms = f"{SAMPLERS[self.sampler]}, {rounds}, {ACCOUNTANTS[self.accountant]}"
        if self.statistics:
            terms += f", private statistics included: {'; '.join(self.statistics)}"
        if not self.private and self.noisy:
            return f"no finite epsilon: the noise is too small for float64 to account ({terms})"
        if not self.private:
            return f"not private: no noise was added ({terms})"
        promise = f"(epsilon {self.epsilon_text}, delta {self.delta_text})"
        if not self.sound:
            return (
                f"WARNING, not a guarantee: {promise} in the paper's convention, which takes the exchange of a user to "
                f"move the sum by one clip norm where it moves it by two ({terms})"
            )
        but = f"; {KNOWN_SEED}" if self.from_seed else ""
        but += f"; {SHOWN_ERRORS}" if self.shows_errors else ""
        if self.example_level:
            one_example = f"{self.relation.phrase_for('example')}, where each user is one example"
            return f"{promise}-DP for {one_example}, {terms}{but}"
        return f"{promise}-DP for {self.relation.phrase}, {terms}{but}"

    @property
    def epsilon_text(self) -> str:
        """Epsilon to print: three digits, rounded up; "infinite" where there is no guarantee."""
        if not self.private:
            return "infinite (not private)"
        return rounded_up(self.epsilon, 3)

    @property
    def delta_text(self) -> str:
        """Delta to print: three digits, rounded up."""
        return delta_rounded_up(self.delta)


def delta_rounded_up(delta: float) -> str:
    """A delta to print: three digits, never below itself."""
    # Delta is given, not computed: rounding up its shortest decimal form keeps 1e-05 as 1e-05.
    return f"{float(_rounded_up(Decimal(repr(delta)), 3)):.3g}"


def rounded_up(value: float, digits: int) -> str:
    """A number to print, never below itself: 3.961 at three digits is 3.97."""
    if not math.isfinite(value):
        return "infinite"
    rounded = _rounded_up(Decimal(value), digits)
    return f"{rounded:f}" if rounded < 1_000_000 else f"{float(rounded):.{digits}g}"


def _rounded_up(value: Decimal, digits: int) -> Decimal:
    """`value` at `digits` significant digits, never below itself: 3.961 becomes 3.97."""
    return Context(prec=digits, rounding=ROUND_CEILING).plus(value)


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
