"""Samples the users of a round. Each sampler describes its own sampling, and that is what is accounted."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import check_whole, refuse
from ..privacy.accountant import default_relation
from ..privacy.banded_noise import check_bands
from ..privacy.events import FixedSizeSampling, GroupedPoissonSampling, PoissonSampling, Sampling
from ..privacy.relations import Relation
from ..random.normal_numbers import uniform
from ..random.streams import NormalGenerator, Streams
from ..settings import check


@dataclass(frozen=True, eq=False)
class Cohort:
    """The users of one round, and how they were sampled.

    `users` and their number are private under Poisson sampling; `sampling` is public.
    """

    users: NDArray[np.int64]  # distinct, ascending
    sampling: Sampling

    def __repr__(self) -> str:
        return f"Cohort({self.sampling})"


class Sampler(Protocol):
    """Draws each round's cohort, independently of all other rounds."""

    @property
    def cohort_size(self) -> int:
        """The declared size: a public constant, the divisor of every mean."""
        ...

    @property
    def sampling(self) -> Sampling:
        """What is accounted; known before any draw."""
        ...

    def draw(self, rng: NormalGenerator, round_index: int = 0) -> Cohort:
        """The cohort of one round. The cost grows with the cohort, not with the population."""
        ...


@dataclass(frozen=True)
class FixedSizeSampler:
    """Exactly `cohort_size` distinct users; every such set is equally likely."""

    population_size: int
    cohort_size: int

    def __post_init__(self) -> None:
        _check_sizes(self.population_size, self.cohort_size)

    @property
    def sampling(self) -> FixedSizeSampling:
        """`cohort_size` of `population_size`."""
        return FixedSizeSampling(self.cohort_size, self.population_size)

    def draw(self, rng: NormalGenerator, round_index: int = 0) -> Cohort:
        """`cohort_size` users without replacement."""
        return Cohort(_distinct(rng, self.population_size, self.cohort_size), self.sampling)


@dataclass(frozen=True)
class PoissonSampler:
    """Each user independently with probability `cohort_size / population_size`; the cohort may even be empty.

    `users` is the actual number of users, `population_size` if left out. If given, `population_size` is a number
    declared beforehand: the rate stays the same when a user is added or removed, and a cohort has `cohort_size` users
    on average only if the declared number is right.
    """

    population_size: int
    cohort_size: int
    users: int | None = None

    def __post_init__(self) -> None:
        more = "bring more users" if self.users is None else "declare more users"
        _check_sizes(self.population_size, self.cohort_size, more)
        if self.users is not None:
            check_whole("users", self.users, at_least=1, way_out="give a population with users")

    @property
    def sampling(self) -> PoissonSampling:
        """The probability with which each user takes part."""
        return PoissonSampling(self.cohort_size / self.population_size)

    def draw(self, rng: NormalGenerator, round_index: int = 0) -> Cohort:
        """A coin for each user."""
        users = self.population_size if self.users is None else self.users
        return Cohort(_by_coins(rng, users, self.sampling.rate), self.sampling)


@dataclass(frozen=True, eq=False)
class GroupedPoissonSampler:
    """Poisson sampling from `bands` groups of users in turn: round t draws from group t mod bands.

    So nobody comes twice within `bands` rounds. Everybody of the group comes with probability bands * cohort_size /
    population_size, whatever the group's true size: that a cohort has `cohort_size` users on average is approximate.
    """

    population_size: int
    cohort_size: int
    bands: int
    groups: NDArray[np.int64] = field(repr=False)  # (users,) of each user

    def __post_init__(self) -> None:
        _check_sizes(self.population_size, self.cohort_size)
        check_bands(self.bands, self.cohort_size, self.population_size)

    @classmethod
    def of(
        cls, identities: NDArray[np.uint64], population_size: int, cohort_size: int, bands: int
    ) -> GroupedPoissonSampler:
        """Groups by a hash of each user's own identity and of public numbers: other users change nothing about it."""
        public = f"groups of {population_size} users, {cohort_size} a round, {bands} bands"
        keys = Streams(0).user_keys(public, 0, identities)  # seed 0 stands for no secret: groups are public
        return cls(population_size, cohort_size, bands, (keys % np.uint64(bands)).astype(np.int64))

    @property
    def sampling(self) -> GroupedPoissonSampling:
        """The probability with which each user of a group takes part in the group's rounds."""
        return GroupedPoissonSampling(self.bands * self.cohort_size / self.population_size, self.bands)

    def draw(self, rng: NormalGenerator, round_index: int = 0) -> Cohort:
        """A coin for each user of the group."""
        users = self._members[round_index % self.bands]
        return Cohort(users[_by_coins(rng, len(users), self.sampling.rate)], self.sampling)

    @cached_property
    def _members(self) -> list[NDArray[np.int64]]:
        order, sizes = np.argsort(self.groups, kind="stable"), np.bincount(self.groups, minlength=self.bands)
        return np.split(order, np.cumsum(sizes)[:-1])


KnownSampler = FixedSizeSampler | PoissonSampler | GroupedPoissonSampler


def sampler_named(
    name: str, users: int, cohort_size: int, population_size: int | None = None
) -> FixedSizeSampler | PoissonSampler:
    """The sampler that settings call "poisson" or "fixed", for `users` actual users.

    With a declared `population_size` only the draw itself depends on `users`.
    """
    poisson = check("sampling", name) == "poisson"
    if population_size is None:
        return PoissonSampler(users, cohort_size) if poisson else FixedSizeSampler(users, cohort_size)
    if not poisson:
        raise refuse("population_size", population_size, "left out where sampling='fixed'", FIXED_IS_PUBLIC)
    return PoissonSampler(population_size, cohort_size, users)


class DeclaredUsersWarning(UserWarning):
    """Far more or far fewer users are declared than are there, so that cohorts are not as large as asked for."""


def warn_of_declared_users(population_size: int, users: int, cohort_size: int, stacklevel: int = 4) -> None:
    """A `DeclaredUsersWarning` where more than twice or less than half of the actual `users` are declared."""
    if users / 2 <= population_size <= 2 * users:
        return
    expected = cohort_size * users / population_size
    many = population_size > users
    wrong = "more than twice" if many else "less than half"
    way_out = "raise cohort_size" if many else "lower cohort_size and give delta, which is made for the declared number"
    warnings.warn(
        f"population_size={population_size} is {wrong} the number of users at hand, so that a round has about "
        f"{expected:.2g} users and not cohort_size={cohort_size}: {way_out}, or leave population_size out (the "
        "relation is then zero-out); a number that was taken from the data must not be declared",
        DeclaredUsersWarning,
        stacklevel=stacklevel,
    )


FIXED_IS_PUBLIC = "leave it out, a fixed-size cohort is drawn from the users at hand, whose number is public"


def relation_for(sampling: Sampling, relation: Relation | str | None, *, declared: bool) -> Relation:
    """The neighbouring relation that holds for a training with this sampling, as requested or by default.

    Add-or-remove needs a sampling that is the same for a population with one user less: Poisson sampling at a rate
    that was `declared`. If the number of users is read from the data, it is public and the same for neighbours:
    zero-out by default under Poisson sampling, replace-one for a fixed size.
    """
    fixed = isinstance(sampling, FixedSizeSampling)
    if relation is None:
        return default_relation(sampling) if fixed or declared else Relation.ZERO_OUT
    relation = Relation.named(relation)
    if not relation.sound:
        raise refuse("relation", relation.value, "one that a guarantee can be given for", "leave it out")
    if relation is Relation.ADD_OR_REMOVE and fixed:
        raise refuse("relation", relation.value, "replace-one or zero-out where sampling='fixed'", FIXED_IS_PUBLIC)
    if relation is Relation.ADD_OR_REMOVE and not declared:
        limit = "zero-out or replace-one where the number of users is read from the data"
        raise refuse("relation", relation.value, limit, "declare population_size, or leave relation out")
    return relation


# Either way the cost is that of those who are drawn. A seed's draws are NumPy's; a key's are made of its words.


def _by_coins(rng: NormalGenerator, users: int, rate: float) -> NDArray[np.int64]:
    """Ascending, each of `users` independently with probability `rate`."""
    if isinstance(rng, np.random.Generator):  # a binomial number, then so many without replacement
        return _distinct(rng, users, int(rng.binomial(users, rate)))
    if rate == 1:
        return np.arange(users)
    drawn = [np.array([-1])]
    while drawn[-1][-1] < users:  # the gaps between two heads are geometric
        words = rng.words(int(1.1 * rate * users) + 64)
        gaps = np.log1p(-uniform(words)) / math.log1p(-rate)
        drawn.append(drawn[-1][-1] + np.cumsum(gaps.astype(np.int64) + 1))
    together = np.concatenate(drawn)
    return together[1 : np.searchsorted(together, users)]


def _distinct(rng: NormalGenerator, users: int, count: int) -> NDArray[np.int64]:
    """Ascending, `count` of `users`: every such set is equally likely."""
    if isinstance(rng, np.random.Generator):
        # Floyd's method when few of many are drawn, and a partial shuffle of all only above about one in twenty.
        return np.sort(rng.choice(users, count, replace=False, shuffle=False))
    fewer = min(count, users - count)  # of more than half, those who stay out are drawn
    chosen = np.empty(0, np.int64)
    while missing := fewer - len(chosen):
        words = rng.words(missing)
        words = words[words < (1 << 64) - (1 << 64) % users]  # so that all remainders are equally likely
        chosen = np.sort(np.append(chosen, (words % users).astype(np.int64)))
        chosen = chosen[np.diff(chosen, prepend=-1) > 0]  # NumPy's unique takes ten times as long
    return chosen if fewer == count else np.delete(np.arange(users), chosen)


def _check_sizes(population_size: int, cohort_size: int, more: str = "bring more users") -> None:
    check("population_size", population_size)
    check("cohort_size", cohort_size)
    if cohort_size > population_size:
        limit = f"at most the population, {population_size} users"
        raise refuse("cohort_size", cohort_size, limit, f"lower the cohort or {more}")
