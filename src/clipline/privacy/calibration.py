"""From a guarantee to the noise, the rounds or the cohort that it allows. Every search ends on the private side.

Each search begins where the quick bound puts it, which is on the private side, and then closes in on the edge with
`account` itself: whatever is answered, `account` confirms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from ..errors import SettingError, check_number, check_whole
from .accountant import account, check_delta, quick_epsilon
from .events import GaussianEvent, Sampling, sampling_named
from .guarantee import Guarantee
from .ledger import Ledger
from .relations import Relation

_LEAST, _MOST = 0.05, 1e9  # noise multipliers considered
_SLACK = 2e-5  # how far below its target, relative, an epsilon may be left
_MOST_ROUNDS = 10**12

Epsilon = Callable[[float], float]


class Accountant(Protocol):
    """`account` or `account_renyi`."""

    def __call__(self, ledger: Ledger, *, delta: float, relation: Relation) -> Guarantee:
        """The guarantee of a ledger."""
        ...


def noise_multiplier_for(
    *,
    sampling: Sampling,
    rounds: int,
    epsilon: float,
    delta: float,
    relation: Relation,
    accountant: Accountant = account,
) -> float:
    """The least noise multiplier of the whole round with which `rounds` rounds stay within (epsilon, delta).

    `accountant` (`account`, or `account_renyi`) gives at most `epsilon` for the answer itself, and less by at most
    0.002 percent. Never below 0.05: a target so loose that less noise would do protects nobody. A target that no noise
    reaches is refused.
    """
    check_whole("rounds", rounds, at_least=1, way_out="give the number of rounds to train")
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")

    def ledger(noise_multiplier: float) -> Ledger:
        return Ledger().add(GaussianEvent(sampling, noise_multiplier), rounds)

    def spent(noise_multiplier: float) -> float:
        return accountant(ledger(noise_multiplier), delta=delta, relation=relation).epsilon

    def bound(noise_multiplier: float) -> float:
        return quick_epsilon(ledger(noise_multiplier), delta=delta, relation=relation)

    quick = bound if accountant is account else spent
    check_delta(delta)
    high = 1.0
    while quick(high) > epsilon and spent(high) > epsilon:
        high *= 4
        if high > _MOST:
            raise SettingError(
                f"{epsilon=} at {delta=} cannot be reached in {rounds} rounds with {sampling}, whatever the noise: "
                "raise epsilon or delta, or lower rounds"
            )
    low = max(high / 4, _LEAST)
    while quick(low) <= epsilon and low > _LEAST:
        high, low = low, max(low / 4, _LEAST)
    if quick(low) > epsilon:
        high = _edge(quick, epsilon, low, high, slack=_slack(epsilon) if quick is spent else 0.1)
    if quick is spent:
        return high
    # The truth lies below the quick bound, so that `high` is private and less may be. Epsilon falls with about the
    # third power of the noise: step to where it would meet the target.
    low = high
    while (value := spent(low)) <= epsilon:
        if low == _LEAST:
            return _LEAST
        high, low = low, max(low / min(max((epsilon / max(value, 1e-9)) ** (1 / 3), 1.01), 1.5), _LEAST)
    return _edge(spent, epsilon, low, high, slack=_slack(epsilon))


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
    before = Ledger() if after is None else after

    def spent(rounds: int) -> float:
        return account(before.add(event, rounds), delta=delta, relation=relation).epsilon

    def quick(rounds: int) -> float:
        return quick_epsilon(before.add(event, rounds), delta=delta, relation=relation)

    if at_most == 0 or spent(1) > epsilon:
        return 0
    if spent(at_most) <= epsilon:
        return at_most
    enough, too_many = 1, at_most
    while too_many - enough > max(1, enough // 20):  # where the quick bound puts the edge, which is not above it
        middle = min(2 * enough, (enough + too_many) // 2)
        enough, too_many = (middle, too_many) if quick(middle) <= epsilon else (enough, middle)
    while enough > 1 and spent(enough) > epsilon:  # never with a quick bound that is one, but it costs nothing to look
        enough //= 2
    stride = max(1, enough // 16)
    too_many = min(enough + stride, at_most)
    while too_many < at_most and spent(too_many) <= epsilon:
        stride *= 2
        enough, too_many = too_many, min(too_many + stride, at_most)
    return _most(spent, epsilon, enough, too_many)


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

    The third step of the paper's recipe: the noise on the mean stays what it was, so that the model stays as good,
    while privacy improves. Refused if not even the whole population reaches the target.
    """
    m = check_whole(
        "cohort_size", cohort_size, at_least=1, at_most=population_size, way_out="give the cohort of the trial"
    )
    z = check_number("noise_multiplier", noise_multiplier, above=0, way_out="give the noise that the model tolerates")
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")

    def spent(cohort: int) -> float:
        event = GaussianEvent(sampling_named(sampling, cohort, population_size), z * cohort / m)
        return account(Ledger().add(event, rounds), delta=delta, relation=relation).epsilon

    if spent(m) <= epsilon:
        return m
    too_small, enough = m, min(2 * m, population_size)
    while spent(enough) > epsilon:
        if enough == population_size:
            raise SettingError(
                f"{epsilon=} at {delta=} needs a cohort above the {population_size} users there are, with noise scaled "
                f"along from {noise_multiplier=} at {cohort_size=}: raise epsilon or noise_multiplier, or lower rounds"
            )
        too_small, enough = enough, min(2 * enough, population_size)
    return -_most(lambda cohort: spent(-cohort), epsilon, -enough, -too_small)


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

    def spent(cohort: int) -> float:
        event = GaussianEvent(sampling_named(sampling, cohort, population_size), noise_multiplier)
        return account(Ledger().add(event, rounds), delta=delta, relation=relation).epsilon

    if spent(1) > epsilon:
        return 0
    if spent(population_size) <= epsilon:
        return population_size
    enough, too_many = 1, min(2, population_size)
    while spent(too_many) <= epsilon:
        enough, too_many = too_many, min(2 * too_many, population_size)
    return _most(spent, epsilon, enough, too_many)


def _slack(epsilon: float) -> float:
    """How far below its target, relative, an epsilon may be left: _SLACK, and never more than 5e-5 in all."""
    return min(_SLACK, 5e-5 / epsilon)


def _edge(spent: Epsilon, epsilon: float, low: float, high: float, slack: float) -> float:
    """A private number between `low`, which is not private, and `high`, which is, with epsilon within `slack`.

    By secants through the two points nearest to the target, on logarithms, since epsilon is not far from a power law;
    every fourth step halves, so that it ends whatever the curve.
    """
    aim = epsilon * (1 - slack / 2)
    above = spent(high)
    points = [(math.log(x), math.log(min(max(y, 1e-300), 1e300) / aim)) for x, y in ((low, spent(low)), (high, above))]
    for turn in range(1, 81):
        if above >= epsilon * (1 - slack) or high <= low * (1 + 1e-9):
            break
        (x, error), (other, other_error) = sorted(points, key=lambda point: abs(point[1]))[:2]
        middle = 0.5 * (math.log(low) + math.log(high))
        if turn % 4 and error != other_error:
            guess = x - error * (other - x) / (other_error - error)
            middle = guess if math.log(low) < guess < math.log(high) else middle
        value = spent(math.exp(middle))
        points.append((middle, math.log(min(max(value, 1e-300), 1e300) / aim)))
        if value <= epsilon:
            high, above = math.exp(middle), value
        else:
            low = math.exp(middle)
    return high


def _most(spent: Callable[[int], float], epsilon: float, enough: int, too_many: int) -> int:
    """The last whole number from `enough`, which is within epsilon, up to `too_many`, which is not."""
    below, above = spent(enough), spent(too_many)
    for turn in range(200):
        if too_many - enough <= 1:
            break
        middle = (enough + too_many) // 2
        if turn % 3 < 2 and math.isfinite(above) and above > below:
            guess = enough + (epsilon - below) / (above - below) * (too_many - enough)
            # One step to the side that would end the search if the guess is right.
            middle = min(max(math.floor(guess) + turn % 3, enough + 1), too_many - 1)
        value = spent(middle)
        enough, below, too_many, above = (
            (middle, value, too_many, above) if value <= epsilon else (enough, below, middle, value)
        )
    return enough
