"""Step 3, the rule: the least multiple of cohort and noise that meets the target, or what could be changed instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import SettingError
from ...privacy.accountant import account
from ...privacy.calibration import least_scale, noise_multiplier_for, rounds_within
from ...privacy.events import GaussianEvent, PoissonSampling
from ...privacy.guarantee import Guarantee, rounded_up
from ...privacy.ledger import Ledger
from ...privacy.relations import Relation

_MOST_USERS = 10**12
_MOST_DEGRADED = 0.99  # of the metric: --degradation is below 100%

Losses = Sequence[tuple[float, float]]  # (noise, degradation) of the trials of step 2


@dataclass(frozen=True)
class Target:
    """What is to be promised for how many users and rounds, and the cohort of the trial, from which it is scaled.

    Sampling is Poisson: of a fixed size the cohort would have to be two to three times as large.
    """

    epsilon: float
    delta: float | None  # None: population_size^-1.1
    population_size: int
    rounds: int
    cohort_size: int
    relation: Relation = Relation.ADD_OR_REMOVE

    @property
    def delta_value(self) -> float:
        """Delta as a number."""
        return self.population_size**-1.1 if self.delta is None else self.delta

    def event(self, cohort_size: int, noise_multiplier: float) -> GaussianEvent:
        """One round of the final training."""
        return GaussianEvent(PoissonSampling(cohort_size / self.population_size), noise_multiplier)

    def guarantee(self, cohort_size: int, noise_multiplier: float) -> Guarantee:
        """What the final training promises with this cohort and this noise."""
        ledger = Ledger().add(self.event(cohort_size, noise_multiplier), self.rounds)
        return account(ledger, delta=self.delta_value, relation=self.relation)

    def enough_noise(self) -> float:
        """The noise with which the cohort of the trial itself meets the target: no scaling is needed then."""
        return self.least_noise(self.cohort_size)

    def least_noise(self, cohort_size: int) -> float:
        """The least noise with which this cohort meets the target."""
        sampling = PoissonSampling(cohort_size / self.population_size)
        return noise_multiplier_for(sampling=sampling, rounds=self.rounds, epsilon=self.epsilon, **self.terms)

    @property
    def terms(self) -> dict[str, Any]:
        """Delta and relation, as the accountant takes them."""
        return {"delta": self.delta_value, "relation": self.relation}


@dataclass(frozen=True)
class Scaled:
    """The final cohort and noise: the trial's, both times `alpha`. Noise on the count grows along, cohort / 20."""

    cohort_size: int
    noise_multiplier: float
    alpha: float
    guarantee: Guarantee


@dataclass(frozen=True)
class Alternative:
    """One change with which the target would be met, and what it means."""

    change: str
    meaning: str


class Unreachable(SettingError):
    """No cohort of the users there are meets the target; `alternatives` are what would."""

    def __init__(self, message: str, alternatives: list[Alternative]) -> None:
        super().__init__(message)
        self.alternatives = alternatives


def scaled(target: Target, noise_multiplier: float, losses: Losses = ()) -> Scaled:
    """The least cohort m' >= m such that (m', z m' / m) meets the target; refused if it would exceed the users.

    `account` confirms the answer. A cohort of one user less would not do, unless m itself meets the target. `losses`
    are those of step 2, by which a refusal says how much more degradation would have to be allowed.
    """
    m, cohort_size = target.cohort_size, least_cohort(target, noise_multiplier)
    if cohort_size is None:
        raise _unreachable(target, noise_multiplier, losses)
    z = noise_multiplier * cohort_size / m
    return Scaled(cohort_size, z, cohort_size / m, target.guarantee(cohort_size, z))


def _unreachable(target: Target, noise_multiplier: float, losses: Losses) -> Unreachable:
    """The refusal, with the nearest changes that would do, each computed with all else kept."""
    n, m = target.population_size, target.cohort_size
    found = alternatives(target, noise_multiplier, losses)
    listed = "".join(f"\n  - {one.change}: {one.meaning}" for one in found)
    return Unreachable(
        f"epsilon={target.epsilon:g} at delta={target.delta_value:.3g} must be met with a cohort of at most the "
        f"{n:,} users there are, and is not: scaled from m={m}, z={noise_multiplier:g} over {target.rounds} rounds, "
        f"all {n:,} users in every round reach epsilon "
        f"{target.guarantee(n, noise_multiplier * n / m).epsilon_text}. Each of these alone would do:{listed}",
        found,
    )


def alternatives(target: Target, noise_multiplier: float, losses: Losses) -> list[Alternative]:
    """The least change of each kind with which the target is met, in the order of what it asks of people."""
    n, m = target.population_size, target.cohort_size
    every = n  # all users in every round: the most private there is
    z = noise_multiplier * every / m
    best = target.guarantee(every, z)
    found = []
    users = _least_users(target, noise_multiplier)
    if users is not None:
        cohort = least_cohort(replace(target, population_size=users), noise_multiplier) or users
        found.append(Alternative(f"--users {users}", f"declared, with {cohort:,} of them a round"))
    if best.private:
        epsilon = rounded_up(best.epsilon, 3)
        found.append(Alternative(f"--epsilon {epsilon}", "all users in every round reach it"))
    terms = target.terms
    rounds = rounds_within(target.event(every, z), epsilon=target.epsilon, at_most=target.rounds, **terms)
    if rounds:
        found.append(Alternative(f"--rounds {rounds}", f"of {target.rounds}; the search is made again with these"))
    try:
        needed = target.least_noise(every) * m / n
    except SettingError:  # not with any noise
        return found
    # All noise below has to count as borne too.
    enough = [(max(loss for z, loss in losses if z <= tried), tried) for tried, _ in losses if tried >= needed]
    enough = sorted(pair for pair in enough if pair[0] <= _MOST_DEGRADED)
    if enough:
        loss, tried = enough[0]
        percent = rounded_up(max(100 * loss, 0.1), 2)
        found.append(Alternative(f"--degradation {percent}%", f"then z = {tried:g} counts as borne, which was tried"))
    else:
        found.append(
            Alternative(f"a model that bears z = {rounded_up(needed, 3)} at m = {m}", "smaller, or with other rates")
        )
    return found


def least_cohort(target: Target, noise_multiplier: float) -> int | None:
    """The least cohort that meets the target when the noise grows with it; None if the users are too few."""
    try:
        return least_scale(
            cohort_size=target.cohort_size,
            noise_multiplier=noise_multiplier,
            population_size=target.population_size,
            sampling="poisson",
            rounds=target.rounds,
            epsilon=target.epsilon,
            **target.terms,
        )
    except SettingError:
        return None


def _least_users(target: Target, noise_multiplier: float) -> int | None:
    """The least population above the present one whose users, all in every round, meet the target.

    The default delta falls with the number of users, slowly: noise in proportion to them always wins.
    """

    def meets(users: int) -> bool:
        larger = replace(target, population_size=users)
        return larger.guarantee(users, noise_multiplier * users / target.cohort_size).epsilon <= target.epsilon

    return _least_above(target.population_size, meets)


def _least_above(start: int, meets: Callable[[int], bool]) -> int | None:
    """The least whole number above `start` with `meets`, which once true stays true; None above a million million."""
    high = min(2 * start, _MOST_USERS)
    while not meets(high):
        if high == _MOST_USERS:
            return None
        high = min(2 * high, _MOST_USERS)
    low = start
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high
