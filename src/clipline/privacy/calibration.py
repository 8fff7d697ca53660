"""From a guarantee to the noise or the number of rounds that it allows. Both searches end on the private side."""

from __future__ import annotations

import math

from ..errors import SettingError, check_number, check_whole
from .accountant import account
from .events import GaussianEvent, Sampling
from .ledger import Ledger
from .relations import Relation

_LEAST, _MOST = 0.05, 1e9  # noise multipliers considered
_PRECISION = 1e-5  # of the noise multiplier, relative
_MOST_ROUNDS = 10**12


def noise_multiplier_for(*, sampling: Sampling, rounds: int, epsilon: float, delta: float, relation: Relation) -> float:
    """The least noise multiplier of the whole round with which `rounds` rounds stay within (epsilon, delta).

    `account` gives at most `epsilon` for the answer itself, which lies at most 0.001 percent above the least one. Never
    below 0.05: a target so loose that less noise would do protects nobody. A target that no noise reaches is refused.
    """
    check_whole("rounds", rounds, at_least=1, way_out="give the number of rounds to train")
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")

    def met(noise_multiplier: float) -> bool:
        ledger = Ledger().add(GaussianEvent(sampling, noise_multiplier), rounds)
        return account(ledger, delta=delta, relation=relation).epsilon <= epsilon

    high = 1.0
    while not met(high):
        high *= 4
        if high > _MOST:
            raise SettingError(
                f"{epsilon=} at {delta=} cannot be reached in {rounds} rounds with {sampling}, whatever the noise: "
                "raise epsilon or delta, or lower rounds"
            )
    low = high / 4
    while met(low):
        if low <= _LEAST:
            return _LEAST
        high, low = low, max(low / 4, _LEAST)
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def rounds_within(event: GaussianEvent, *, epsilon: float, delta: float, relation: Relation) -> int:
    """The most rounds of `event` that stay within (epsilon, delta): 0 if not even one does, at most 10**12."""
    check_number("epsilon", epsilon, above=0, way_out="give a target such as 5")

    def met(rounds: int) -> bool:
        return account(Ledger().add(event, rounds), delta=delta, relation=relation).epsilon <= epsilon

    too_many = 1
    while met(too_many):
        if too_many >= _MOST_ROUNDS:
            return _MOST_ROUNDS
        too_many *= 2
    enough = too_many // 2
    while too_many - enough > 1:
        middle = (enough + too_many) // 2
        enough, too_many = (middle, too_many) if met(middle) else (enough, middle)
    return enough
