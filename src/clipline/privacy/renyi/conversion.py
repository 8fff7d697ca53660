"""From a Renyi curve to epsilon at delta (Canonne, Kamath and Steinke 2020, Proposition 12).

Every order gives a valid epsilon, so that a search over orders can only lose tightness, never soundness. Orders run
from 1.0001, for runs with a huge epsilon, to a million, for runs with a tiny one: at delta = 10^-6.6 a list that ends
at order 256 cannot report less than 0.034.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ..numerics import Array

# Orders are 1 + 10^(i / per_decade). The finest ones are fixed too, and not wherever a minimiser ends: the curve is
# then evaluated at the same orders round after round, and its cache answers.
_LEAST_DECADE, _MOST_DECADE = -4, 6
_PER_DECADE, _REFINEMENT, _LEVELS = 2, 12, 3  # 2, 24, 288, 3456 orders a decade


def epsilon_at(curve: Callable[[tuple[float, ...]], Array], delta: float) -> tuple[float, float]:
    """The least epsilon over real orders, and the order that gives it.

    `curve` maps orders to the Renyi divergence of everything released. The orders tried lie 0.07 percent apart near the
    best one, which costs about 10^-7 of epsilon. Never negative; infinite if the curve is infinite at every order.
    """
    per_decade = _PER_DECADE
    epsilon, best = _least(curve, delta, per_decade, _LEAST_DECADE * per_decade, _MOST_DECADE * per_decade)
    for _ in range(_LEVELS):
        per_decade, best = per_decade * _REFINEMENT, best * _REFINEMENT
        first = max(best - _REFINEMENT, _LEAST_DECADE * per_decade)
        last = min(best + _REFINEMENT, _MOST_DECADE * per_decade)
        epsilon, best = _least(curve, delta, per_decade, first, last)
    return max(epsilon, 0.0), _order(best, per_decade)


def epsilons(divergences: Array, orders: Array, delta: float) -> Array:
    """The epsilon that each order gives; any of them is valid once raised to 0 where negative."""
    bound: Array = divergences + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return bound


def deltas(divergences: Array, orders: Array, epsilon: float) -> Array:
    """The delta that each order gives at `epsilon`. Any of them is valid, also one above 1, which says nothing."""
    exponents = (orders - 1) * (divergences - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    result: Array = np.exp(np.minimum(exponents, 1.0))
    return result


def _least(
    curve: Callable[[tuple[float, ...]], Array], delta: float, per_decade: int, first: int, last: int
) -> tuple[float, int]:
    orders = _orders(per_decade, first, last)
    bounds = epsilons(curve(orders), np.array(orders), delta)
    best = int(np.argmin(bounds))
    return float(bounds[best]), first + best


@lru_cache(maxsize=256)
def _orders(per_decade: int, first: int, last: int) -> tuple[float, ...]:
    return tuple(_order(index, per_decade) for index in range(first, last + 1))


def _order(index: int, per_decade: int) -> float:
    return 1.0 + math.pow(10.0, index / per_decade)
