"""The privacy loss of one round as masses on a lattice, by connect-the-dots (Doroshenko et al. 2022).

The mass P(l < L < l') between two neighbouring points is divided between them so that its total under P and under Q
stays what it is. The hockey-stick profile of the result interpolates the true one linearly in exp(l), and since a
profile is convex the result lies above it: an upper bound, and one that is exact to second order in the spacing.
What lies beyond the last point counts as an infinite loss; what lies below the first is raised to it.

Masses are differences of tails and not second differences of the profile, so that a spacing of 10^-8 loses nothing:
rounding errors telescope, and the share that goes up is raised by as much as rounding can have lowered it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .halves import Array, Halves, beyond

_BLOCK = 1 << 17  # numbers that a table of moments works on at once: a megabyte, which stays in the cache
_MOST_EXPONENT = 3e4
_ROUNDING = 16 * np.finfo(np.float64).eps  # relative error of a tail, generously


@dataclass(frozen=True)
class Direction:
    """A dominating pair read in one direction: where its loss is positive, and where that of the reverse pair is."""

    positive: Halves
    negative: Halves

    @property
    def reverse(self) -> Direction:
        """The same pair, read the other way."""
        return Direction(self.negative, self.positive)


@dataclass(frozen=True, eq=False)
class Masses:
    """P-probability `mass` at each of the ascending `losses`, and `infinite` at an infinite loss: total one."""

    losses: Array
    mass: Array
    infinite: float

    def log_moments(self, slopes: Array) -> Array:
        """Log of E[exp(slope L); L finite] for each slope, without overflow, raised by what rounding may have cost.

        For slopes so high that nothing but the greatest loss counts, the bound slope times that loss.
        """
        (kept,) = np.nonzero(self.mass)
        losses, mass = self.losses[kept], self.mass[kept]
        exponents = slopes * max(float(losses.max(initial=0.0)), 0.0)
        result: Array = exponents.copy()
        for method, rows in (
            (_log_sums, exponents <= 600),
            (_scaled_log_sums, (exponents > 600) & (exponents <= _MOST_EXPONENT)),
        ):
            (chosen,) = np.nonzero(rows)
            for block in np.array_split(chosen, -(-len(chosen) * len(kept) // _BLOCK) or 1):
                if len(block):
                    result[block] = method(np.multiply.outer(slopes[block], losses), mass)
        # A product of matrices adds up in at least eight parts.
        return result + np.finfo(np.float64).eps * (16 + len(kept) / 8 + 4 * np.abs(result))


def _log_sums(exponents: Array, mass: Array) -> Array:
    """Log of the sum of mass exp(exponent), for each row; the exponents, of which none may overflow, are used up."""
    return np.log(np.exp(exponents, out=exponents) @ mass)


def _scaled_log_sums(exponents: Array, mass: Array) -> Array:
    """The same for exponents that would overflow."""
    exponents += np.log(mass)
    top: Array = exponents.max(axis=1)
    exponents -= top[:, None]
    return top + np.log(np.exp(exponents, out=exponents).sum(axis=1))  # type: ignore[no-any-return]


def masses_on(direction: Direction, positive: Array, negative: Array) -> Masses:
    """The pair on the lattice -negative[-1] ... 0 ... positive[-1]; both arrays ascend from 0."""
    p, q = beyond(direction.positive, positive)
    up, stay = _divide(p[:-1] - p[1:], q[:-1] - q[1:], positive[:-1], np.diff(positive), p[:-1])
    reverse_p, reverse_q = beyond(direction.negative, negative)
    steps = np.diff(negative)
    raised, kept = _divide(
        reverse_q[:-1] - reverse_q[1:], reverse_p[:-1] - reverse_p[1:], -negative[1:], steps, reverse_q[:-1]
    )
    above, below = np.zeros(len(positive)), np.zeros(len(negative))
    above[1:] += up
    above[:-1] += stay
    below[:-1] += raised
    below[1:] += kept
    below[-1] += reverse_q[-1]
    # What no half describes has no loss at all. A glued profile has an atom there, any other a rounding error.
    above[0] += below[0] + max(1 - p[0] - reverse_q[0], 0.0)
    return Masses(np.concatenate([-negative[:0:-1], positive]), np.concatenate([below[:0:-1], above]), float(p[-1]))


def _divide(under_p: Array, under_q: Array, lower: Array, steps: Array, tail: Array) -> tuple[Array, Array]:
    """Each cell's P-mass as (what goes to its upper end, what to its lower end)."""
    under_p = np.maximum(under_p, 0.0)
    some = under_p > 0
    span = -np.expm1(-steps)
    share = np.ones_like(under_p)  # where nothing is known, all goes up
    known = some & (lower < 700)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # where a mass is next to nothing
        excess = under_p - under_q * np.exp(np.minimum(lower, 700)) + _ROUNDING * tail
        share[known] = excess[known] / (under_p * span)[known]
    share = np.clip(share, 0.0, 1.0)
    up = under_p * share
    return up, under_p - up


# 5 percent apart, and 2 percent where a loss times an order is rarely small
_COARSE: Array = np.concatenate(
    [
        [0.0],
        np.logspace(-15, -2, 13 * 48, endpoint=False),
        np.logspace(-2, 3, 5 * 120, endpoint=False),
        np.logspace(3, 8, 5 * 48 + 1),
    ]
)
_LEAST_MASS = 1e-60

# Orders less one that curves and Chernoff bounds are looked up at: 16 a decade where answers mostly lie, 4 elsewhere.
SLOPES: Array = np.concatenate(
    [np.logspace(-4, -2, 8, endpoint=False), np.logspace(-2, 4, 6 * 16, endpoint=False), np.logspace(4, 12, 33)]
)


@lru_cache(maxsize=256)
def coarse_log_moments(direction: Direction) -> tuple[Array, float]:
    """Log E[exp(slope L)] at each of `SLOPES`, from a lattice 2 to 10 percent apart, and the mass left out at infinity.

    An upper bound; divergences are within a few thousandths of the truth at low orders and a few hundredths at high
    ones. It serves to find where to look. The mass left out is below 10^-60.
    """
    positive, negative = reach(direction, _LEAST_MASS, _LEAST_MASS)
    masses = masses_on(direction, _thinned(positive), _thinned(negative))
    moments = masses.log_moments(SLOPES)
    moments.flags.writeable = False
    return moments, masses.infinite


def _thinned(far: float) -> Array:
    """The coarse lattice up to `far`: every second point below a thousandth of that, none below 10^-10 of it."""
    near, middle, last = np.searchsorted(_COARSE, (1e-10 * far, 1e-3 * far, far))
    return np.concatenate([_COARSE[:1], _COARSE[max(near, 1) : middle : 2], _COARSE[max(middle, 1) : last + 1]])


def coarse_curve(direction: Direction, orders: Array) -> Array:
    """The Renyi divergence at any orders above 1 from the same lattice, without the mass left out."""
    curve: Array = np.maximum(coarse_masses(direction).log_moments(orders - 1), 0.0) / (orders - 1)
    return curve


@lru_cache(maxsize=64)
def coarse_masses(direction: Direction) -> Masses:
    """One round on the coarse lattice."""
    positive, negative = reach(direction, _LEAST_MASS, _LEAST_MASS)
    return masses_on(direction, _COARSE[positive >= _COARSE], _COARSE[negative >= _COARSE])


def reach(direction: Direction, above: float, below: float) -> tuple[float, float]:
    """How far the positive and the negative losses reach, but for P-masses `above` and `below`."""
    p, reverse_q = _coarse_tails(direction)
    return _first_below(p, above), _first_below(reverse_q, below)


@lru_cache(maxsize=256)
def _coarse_tails(direction: Direction) -> tuple[Array, Array]:
    return beyond(direction.positive, _COARSE)[0], beyond(direction.negative, _COARSE)[1]


def _first_below(tail: Array, limit: float) -> float:
    inside = np.nonzero(tail > limit)[0]
    last = min(int(inside[-1]) + 1, len(_COARSE) - 1) if len(inside) else 1
    return float(_COARSE[last])
