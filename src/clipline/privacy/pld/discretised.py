"""The privacy loss of one round as masses on a lattice, by connect-the-dots (Doroshenko et al. 2022).

The mass P(l < L < l') between two neighbouring points is divided between them so that its total under P and its total
under Q stay the same. The hockey-stick profile of the result interpolates the true one linearly in exp(l). A profile is
convex, so the result lies above it: an upper bound, whose error is of second order in the spacing. Losses beyond the
last point count as infinite; losses below the first point are raised to it.

Masses are differences of tails and not second differences of the profile, so that a spacing of 10^-8 costs no
precision. Rounding errors telescope, and the share that goes to the upper point is raised by as much as rounding may
have lowered it.

A *tilt* t is a factor exp(t L) on the masses (exponential tilting). E[exp(t L)] is the moment that the Renyi divergence
of order t + 1 is made of.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..numerics import Array
from .one_round import COARSE_LOSSES, Direction, loss_range, loss_tails

_BLOCK = 1 << 17  # numbers that a table of moments works on at once: a megabyte, which stays in the cache
_MOST_EXPONENT = 3e4
_LEFT_OUT = 1e-60  # mass that the coarse lattice may leave out at either end
_ROUNDING = 16 * np.finfo(np.float64).eps  # relative error of a tail, generously


@dataclass(frozen=True, eq=False)
class DiscretisedLoss:
    """P-probability `mass` at each of the ascending `losses`, and `infinity_mass` at an infinite loss: total one."""

    losses: Array
    mass: Array
    infinity_mass: float

    def log_moments(self, tilts: Array) -> Array:
        """Log of E[exp(tilt L); L finite] for each tilt, without overflow, raised by what rounding may have cost.

        For tilts so high that only the greatest loss matters it is the bound tilt times that loss.
        """
        (kept,) = np.nonzero(self.mass)
        losses, mass = self.losses[kept], self.mass[kept]
        exponents = tilts * max(float(losses.max(initial=0.0)), 0.0)
        result: Array = exponents.copy()
        for method, rows in (
            (_log_sums, exponents <= 600),
            (_scaled_log_sums, (exponents > 600) & (exponents <= _MOST_EXPONENT)),
        ):
            (chosen,) = np.nonzero(rows)
            for block in np.array_split(chosen, -(-len(chosen) * len(kept) // _BLOCK) or 1):
                if len(block):
                    result[block] = method(np.multiply.outer(tilts[block], losses), mass)
        # Rounding of a sum: a matrix product adds in at least eight parallel parts, so len / 8 units in the last place.
        return result + np.finfo(np.float64).eps * (16 + len(kept) / 8 + 4 * np.abs(result))


def _log_sums(exponents: Array, mass: Array) -> Array:
    """Log of the sum of mass exp(exponent), for each row, or of what is too small for float64 an upper bound.

    Overwrites `exponents`, none of which may overflow.
    """
    return np.log(np.maximum(np.exp(exponents, out=exponents) @ mass, np.finfo(np.float64).tiny))


def _scaled_log_sums(exponents: Array, mass: Array) -> Array:
    """The same for exponents that would overflow. Overwrites `exponents`."""
    exponents += np.log(mass)
    top: Array = exponents.max(axis=1)
    exponents -= top[:, None]
    return top + np.log(np.exp(exponents, out=exponents).sum(axis=1))  # type: ignore[no-any-return]


def discretise(direction: Direction, positive: Array, negative: Array) -> DiscretisedLoss:
    """The loss on the lattice -negative[-1] ... 0 ... positive[-1]; both arrays ascend from 0."""
    p, q = loss_tails(direction.positive, positive)
    up, stay = _divide(p[:-1] - p[1:], q[:-1] - q[1:], positive[:-1], np.diff(positive), p[:-1])
    reverse_p, reverse_q = loss_tails(direction.negative, negative)
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
    # Mass that is neither positive nor negative loss is at loss 0: an atom if the profile is glued from two pairs (see
    # docs/explanation/proofs.md), otherwise a rounding error.
    above[0] += below[0] + max(1 - p[0] - reverse_q[0], 0.0)
    losses, mass = np.concatenate([-negative[:0:-1], positive]), np.concatenate([below[:0:-1], above])
    return DiscretisedLoss(losses, mass, float(p[-1]))


def _divide(under_p: Array, under_q: Array, lower: Array, steps: Array, tail: Array) -> tuple[Array, Array]:
    """The P-mass of each cell as (what goes to its upper end, what goes to its lower end)."""
    under_p = np.maximum(under_p, 0.0)
    some = under_p > 0
    span = -np.expm1(-steps)
    share = np.ones_like(under_p)  # where it cannot be computed all mass goes up, which errs towards privacy
    known = some & (lower < 700)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):  # where a mass is nearly zero
        excess = under_p - under_q * np.exp(np.minimum(lower, 700)) + _ROUNDING * tail
        share[known] = excess[known] / (under_p * span)[known]
    share = np.clip(share, 0.0, 1.0)
    up = under_p * share
    return up, under_p - up


# Tilts (orders less one) at which moments and Chernoff bounds are tabulated: 16 a decade where answers mostly lie, 4
# elsewhere.
TILTS: Array = np.concatenate(
    [np.logspace(-4, -2, 8, endpoint=False), np.logspace(-2, 4, 6 * 16, endpoint=False), np.logspace(4, 12, 33)]
)


@lru_cache(maxsize=256)
def coarse_log_moments(direction: Direction) -> tuple[Array, float]:
    """Log E[exp(tilt L)] at each of `TILTS`, from a lattice 2 to 10 percent apart, and the mass at infinity.

    An upper bound. Divergences are within a few thousandths of the truth at low orders and a few hundredths at high
    ones, which is enough to choose a window. The mass at infinity is below 10^-60.
    """
    positive, negative = loss_range(direction, _LEFT_OUT, _LEFT_OUT)
    loss = discretise(direction, _thinned(positive), _thinned(negative))
    moments = loss.log_moments(TILTS)
    moments.flags.writeable = False
    return moments, loss.infinity_mass


def _thinned(far: float) -> Array:
    """The coarse lattice up to `far`: every second point below a thousandth of that, none below 10^-10 of it."""
    near, middle, last = np.searchsorted(COARSE_LOSSES, (1e-10 * far, 1e-3 * far, far))
    dense, sparse = COARSE_LOSSES[max(middle, 1) : last + 1], COARSE_LOSSES[max(near, 1) : middle : 2]
    return np.concatenate([COARSE_LOSSES[:1], sparse, dense])


def coarse_curve(direction: Direction, orders: Array) -> Array:
    """The Renyi divergence at any orders above 1 from the coarse lattice, without the mass at infinity."""
    curve: Array = np.maximum(coarse_loss(direction).log_moments(orders - 1), 0.0) / (orders - 1)
    return curve


@lru_cache(maxsize=64)
def coarse_loss(direction: Direction) -> DiscretisedLoss:
    """One round on the coarse lattice."""
    positive, negative = loss_range(direction, _LEFT_OUT, _LEFT_OUT)
    return discretise(direction, COARSE_LOSSES[positive >= COARSE_LOSSES], COARSE_LOSSES[negative >= COARSE_LOSSES])
