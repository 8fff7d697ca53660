"""One round, without a lattice: delta(epsilon) = P(L > epsilon) - e^epsilon Q(L > epsilon), in closed form.

The lattices of `composition` are made for sums of losses. A single round that nearly always reveals nothing (a rate of
10^-9, say) has its epsilon where they resolve little; here there is nothing to resolve.
"""

from __future__ import annotations

import numpy as np

from .halves import Array, beyond
from .loss import Direction, reach

# Relative error of a tail, generously: a few units in the last place, and those of its argument y times y^2.
_ROUNDING = 4e-13
_POINTS, _TURNS = 65, 7  # each turn divides the interval by 64: 13 digits


def single_deltas(direction: Direction, epsilons: Array) -> Array:
    """The delta at each epsilon >= 0, rounded up: by 10^-12 of P(L > epsilon), and never to zero."""
    under_p, under_q = beyond(direction.positive, epsilons)
    growth = np.exp(np.minimum(epsilons, 700.0))  # the least of two bounds where e^epsilon would overflow
    result: Array = np.clip((1 + _ROUNDING) * under_p - (1 - _ROUNDING) * growth * under_q, 1e-300, 1.0)
    return result


def single_epsilon(direction: Direction, delta: float) -> float:
    """The least epsilon at `delta`, rounded up; 0 where delta allows that, infinite where none is found."""
    low, high = 0.0, reach(direction, delta, delta)[0]  # delta(epsilon) is at most P(L > epsilon)
    if single_deltas(direction, np.zeros(1))[0] <= delta:
        return 0.0
    if single_deltas(direction, np.array([high]))[0] > delta:
        return float("inf")
    for _ in range(_TURNS):
        places = np.linspace(low, high, _POINTS)
        places[-1] = high
        first = int(np.argmax(single_deltas(direction, places) <= delta))
        low, high = float(places[first - 1]), float(places[first])
    return high
