"""From a guarantee to the noise, the rounds or the cohort that it allows. Every search ends on the private side.

A search starts with the quick bound, which errs on the private side. It goes on with the rough bound, which is larger
than the true epsilon by a few parts in ten thousand, and ends with `account` itself. `account` therefore confirms every
answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import SettingError, check_number, check_whole
from .accountant import account, check_delta, quick_epsilon, rough_epsilon
from .events import GaussianEvent, Sampling, sampling_named
from .guarantee import Guarantee
from .ledger import Ledger
from .relations import Relation
from .search import least_whole_within, least_within, most_within

_LEAST, _MOST = 0.05, 1e9  # noise multipliers considered
_SLACK = 2e-5  # how far below its target, relative, an epsilon may end
_ROUGH_SLACK = 5e-4  # the same in tables, of which three digits are printed
_QUICK_SLACK = 1e-3
_MOST_ROUNDS = 10**12
Bounds = tuple[Callable[[Any], float], ...]  # each at or below the one before


def noise_multiplier_for(
    *,
    sampling: Sampling,
    rounds: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    accountant: Callable[..., Guarantee] = account,
    after: Ledger | None = None,
) -> float:
    """The least noise multiplier of the whole round with which `rounds` rounds stay within (epsilon, delta).

    What was released before, `after`, counts too. For the answer `accountant` (`account` or `account_renyi`) gives at
    most `epsilon`, and at least 99.998 percent of it; or else a millionth less noise would give more than `epsilon`.
    The answer is never below 0.05: a target so loose that less noise would do protects nobody. A target that no noise
    reaches is refused.
    """
    check_delta(delta)
    before = Ledger() if after is None else after
    if before.entries and (alone := accountant(before, delta=delta, relation=relation).epsilon) >= epsilon:
        raise SettingError(
            f"{epsilon=} must be above the {alone:.3g} that private statistics took before, at {delta=}: raise "
            "epsilon, or release them with more noise"
        )

    def ledger(noise_multiplier: float) -> Ledger:
        return before.add(GaussianEvent(sampling, noise_multiplier), rounds)

    def spent(noise_multiplier: float) -> float:
        return accountant(ledger(noise_multiplier), delta=delta, relation=relation).epsilon

    bounds: Bounds = _bounds(ledger, delta, relation) if accountant is account else (spent,)
    return _least_noise(bounds, _SLACK, sampling, rounds, epsilon, delta)


def rough_noise_multiplier_for(
    *, sampling: Sampling, rounds: int, epsilon: float, delta: float, relation: Relation
) -> float:
    """A noise multiplier at or above that of `noise_multiplier_for` by a few 10^-4, in a fraction of its time.

    For tables: a table of 24 takes half a second of one core, where the exact one takes two.
    """
    check_delta(delta)
    bounds = _bounds(lambda z: Ledger().add(GaussianEvent(sampling, z), rounds), delta, relation)
    return _least_noise(bounds[:-1], _ROUGH_SLACK, sampling, rounds, epsilon, delta)


def quick_noise_multiplier_for(
    *, sampling: Sampling, rounds: int, epsilon: float, delta: float, relation: Relation
) -> float:
    """A noise multiplier at or above that of `noise_multiplier_for` by a few percent: to compare choices by."""
    bounds = _bounds(lambda z: Ledger().add(GaussianEvent(sampling, z), rounds), delta, relation)
    return _least_noise(bounds[:1], _QUICK_SLACK, sampling, rounds, epsilon, delta)


def _least_noise(bounds: Bounds, slack: float, sampling: Sampling, rounds: int, epsilon: float, delta: float) -> float:
    check_whole("rounds", rounds, at_least=1, way_out="give the number of rounds to train")
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")
    high = 1.0
    while bounds[0](high) > epsilon and bounds[-1](high) > epsilon:
        high *= 4
        if high > _MOST:
            raise SettingError(
                f"{epsilon=} at {delta=} cannot be reached in {rounds} rounds with {sampling}, whatever the noise: "
                "raise epsilon or delta, or lower rounds"
            )
    return least_within(bounds, epsilon, high, _LEAST, slack=min(slack, slack / _SLACK * 5e-5 / epsilon))


def rounds_within(
    event: GaussianEvent,
    *,
    epsilon: float,
    delta: float,
    relation: Relation,
    after: Ledger | None = None,
    at_most: int = _MOST_ROUNDS,
) -> int:
    """The most rounds of `event`, following those of `after`, that stay within (epsilon, delta) all together.

    0 if not even one more does, and never more than `at_most`.
    """
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")
    check_whole("at_most", at_most, at_least=0, way_out="give the number of rounds planned")
    if at_most == 0:
        return 0
    before = Ledger() if after is None else after
    return most_within(_bounds(lambda rounds: before.add(event, rounds), delta, relation), epsilon, 1, at_most)


def least_scale(
    *,
    cohort_size: int,
    noise_multiplier: float,
    population_size: int,
    sampling: str,
    rounds: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> int:
    """The least cohort m' >= m that reaches the target when the noise grows with it, z' = z m' / m.

    The third step of the paper's recipe: the noise on the mean, and with it the quality of the model, stays the same
    while privacy improves. Refused if not even the whole population reaches the target.
    """
    way_out = "give the cohort of the trial"
    m = check_whole("cohort_size", cohort_size, at_least=1, at_most=population_size, way_out=way_out)
    z = check_number("noise_multiplier", noise_multiplier, above=0, way_out="give the noise that the model tolerates")
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")

    def ledger(cohort: int) -> Ledger:
        return Ledger().add(GaussianEvent(sampling_named(sampling, cohort, population_size), z * cohort / m), rounds)

    scaled = least_whole_within(_bounds(ledger, delta, relation), epsilon, m, population_size)
    if scaled is None:
        raise SettingError(
            f"{epsilon=} at {delta=} needs a cohort above the {population_size} users there are, with noise scaled "
            f"along from {noise_multiplier=} at {cohort_size=}: raise epsilon or noise_multiplier, or lower rounds"
        )
    return scaled


def cohort_within(
    *,
    noise_multiplier: float,
    population_size: int,
    sampling: str,
    rounds: int,
    epsilon: float,
    delta: float,
    relation: Relation,
) -> int:
    """The largest cohort that stays within (epsilon, delta) at this noise multiplier; 0 if not even one user does."""
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")

    def ledger(cohort: int) -> Ledger:
        return Ledger().add(GaussianEvent(sampling_named(sampling, cohort, population_size), noise_multiplier), rounds)

    return most_within(_bounds(ledger, delta, relation), epsilon, 1, population_size)


def _bounds(ledger: Callable[[Any], Ledger], delta: float, relation: Relation) -> Bounds:
    """Epsilon of `ledger(number)` as bounds for a search: the quick one, the rough one, and that of `account`."""
    return (
        lambda number: quick_epsilon(ledger(number), delta=delta, relation=relation),
        lambda number: rough_epsilon(ledger(number), delta=delta, relation=relation),
        lambda number: account(ledger(number), delta=delta, relation=relation).epsilon,
    )
