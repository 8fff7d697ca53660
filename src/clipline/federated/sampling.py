"""Who takes part in a round. Each sampler says what it did in its own words, and that is what is accounted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import check_choice, check_whole, refuse
from ..privacy.events import FixedSizeSampling, PoissonSampling, Sampling


@dataclass(frozen=True, eq=False)
class Cohort:
    """The users of one round, and how they were chosen.

    `users` and their number are private under Poisson sampling; `sampling` is public.
    """

    users: NDArray[np.int64]  # distinct, ascending
    sampling: Sampling

    def __repr__(self) -> str:
        return f"Cohort({self.sampling})"


class Sampler(Protocol):
    """Draws each round's cohort from the whole population, independently of all other rounds."""

    @property
    def cohort_size(self) -> int:
        """The declared size: a public constant, the divisor of every mean."""
        ...

    @property
    def sampling(self) -> Sampling:
        """What is accounted, known before anybody is drawn."""
        ...

    def draw(self, rng: np.random.Generator) -> Cohort:
        """The cohort of one round, at a cost that grows with the cohort and not with the population."""
        ...


@dataclass(frozen=True)
class FixedSizeSampler:
    """Exactly `cohort_size` distinct users, every such set equally likely."""

    population_size: int
    cohort_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.population_size, self.cohort_size)

    @property
    def sampling(self) -> FixedSizeSampling:
        """`cohort_size` of `population_size`."""
        return FixedSizeSampling(self.cohort_size, self.population_size)

    def draw(self, rng: np.random.Generator) -> Cohort:
        """`cohort_size` users without replacement."""
        return Cohort(_distinct(rng, self.population_size, self.cohort_size), self.sampling)


@dataclass(frozen=True)
class PoissonSampler:
    """Each user independently with probability `cohort_size / population_size`; the cohort may even be empty."""

    population_size: int
    cohort_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.population_size, self.cohort_size)

    @property
    def sampling(self) -> PoissonSampling:
        """The rate with which each user takes part."""
        return PoissonSampling(self.cohort_size / self.population_size)

    def draw(self, rng: np.random.Generator) -> Cohort:
        """A binomial number of users, then that many without replacement: the same law as a coin for every user."""
        count = int(rng.binomial(self.population_size, self.sampling.rate))
        return Cohort(_distinct(rng, self.population_size, count), self.sampling)


def sampler_named(name: str, population_size: int, cohort_size: int) -> FixedSizeSampler | PoissonSampler:
    """The sampler that settings call "poisson" or "fixed"."""
    kind = PoissonSampler if check_choice("sampling", name, ("poisson", "fixed")) == "poisson" else FixedSizeSampler
    return kind(population_size, cohort_size)


def _distinct(rng: np.random.Generator, population_size: int, count: int) -> NDArray[np.int64]:
    # NumPy takes Floyd's method when few of many are wanted, and a partial shuffle of everybody only when a good share
    # (about one in twenty) is: either way the cost is O(count).
    return np.sort(rng.choice(population_size, count, replace=False, shuffle=False))


def _check_sizes(population_size: int, cohort_size: int) -> None:
    check_whole("population_size", population_size, at_least=1, way_out="give a population with users")
    check_whole("cohort_size", cohort_size, at_least=1, way_out="sample at least one user a round")
    if cohort_size > population_size:
        limit = f"at most the population, {population_size} users"
        raise refuse("cohort_size", cohort_size, limit, "lower the cohort or bring more users")
