"""The privacy loss of one round in closed form: its tails, how far it reaches, and the exact epsilon of one round.

Everything is in units of the noise: the noise is N(0, 1), and `shift` is how far one user moves the sum. With q the
rate and y the released number, there are four pairs (P, Q), all mixtures of normals around the places shown:

    REMOVE    (1-q) N(0) + q N(s)     against   N(0)                     a user who may be there, against nobody
    ADD       N(0)                    against   (1-q) N(0) + q N(s)      the same in the reverse direction
    REPLACE   (1-q) N(0) + q N(s)     against   (1-q) N(0) + q N(-s)     one user replaced, Poisson sampling
    ZERO_OUT  (1-q) N(0) + q N(2s)    against   (1-q) N(0) + q N(s)      one user zeroed out, fixed-size sampling

The loss is L = log(dP/dQ). Only its positive part, L > 0, is described: the negative part of a pair is the positive
part of the reverse pair. For l >= 0 the event {L > l} is a half-line of y in all four pairs, and its end has a closed
form. REPLACE and ZERO_OUT solve a quadratic equation in exp(s y), written so that nothing cancels.

A single round needs no lattice: delta(epsilon) = P(L > epsilon) - e^epsilon Q(L > epsilon). That matters at rates such
as 10^-9, where the lattices of `compose`, made for sums of losses, resolve little.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

from ..numerics import Array, normal_tail

# Losses at which tails are tabulated: 5 percent apart, and 2 percent where the product of a loss and an order is rarely
# small.
COARSE_LOSSES: Array = np.concatenate(
    [
        [0.0],
        np.logspace(-15, -2, 13 * 48, endpoint=False),
        np.logspace(-2, 3, 5 * 120, endpoint=False),
        np.logspace(3, 8, 5 * 48 + 1),
    ]
)

# Relative error of a tail, generously: a few units in the last place, and those of its argument y times y^2.
_TAIL_ERROR = 4e-13
_POINTS, _TURNS = 65, 7  # each turn divides the interval by 64: 13 digits


class MixturePair(Enum):
    """Which of the four pairs."""

    REMOVE = "remove"
    ADD = "add"
    REPLACE = "replace"
    ZERO_OUT = "zero-out"


@dataclass(frozen=True)
class PositiveLossPart:
    """`weight` times the part L > 0 of one pair."""

    pair: MixturePair
    rate: float
    shift: float
    weight: float = 1.0

    def tails(self, losses: Array) -> tuple[Array, Array]:
        """(P(L > l), Q(L > l)) for each l >= 0 of `losses`, times the weight. Both are relatively precise."""
        under_p, under_q = _TAILS[self.pair](losses, self.rate, self.shift)
        return self.weight * under_p, self.weight * under_q


PositiveLoss = tuple[PositiveLossPart, ...]  # a mixture: the weights add up to one


def loss_tails(parts: PositiveLoss, losses: Array) -> tuple[Array, Array]:
    """(P(L > l), Q(L > l)) of a mixture whose component is revealed: profiles are averaged."""
    under_p, under_q = np.zeros_like(losses), np.zeros_like(losses)
    for part in parts:
        more_p, more_q = part.tails(losses)
        under_p, under_q = under_p + more_p, under_q + more_q
    return under_p, under_q


@dataclass(frozen=True)
class Direction:
    """A dominating pair in one direction. `negative` is the positive part of the reverse pair."""

    positive: PositiveLoss
    negative: PositiveLoss

    @property
    def reverse(self) -> Direction:
        """The same pair in the other direction."""
        return Direction(self.negative, self.positive)


Rounds = tuple[tuple[Direction, int], ...]  # how often each pair occurs, all in the same direction


def loss_range(direction: Direction, above: float, below: float) -> tuple[float, float]:
    """How far the positive and the negative losses reach, except for P-masses `above` and `below`."""
    p, reverse_q = _coarse_tails(direction)
    return _first_below(p, above), _first_below(reverse_q, below)


@lru_cache(maxsize=256)
def _coarse_tails(direction: Direction) -> tuple[Array, Array]:
    return loss_tails(direction.positive, COARSE_LOSSES)[0], loss_tails(direction.negative, COARSE_LOSSES)[1]


def _first_below(tail: Array, limit: float) -> float:
    inside = np.nonzero(tail > limit)[0]
    last = min(int(inside[-1]) + 1, len(COARSE_LOSSES) - 1) if len(inside) else 1
    return float(COARSE_LOSSES[last])


def one_round_deltas(direction: Direction, epsilons: Array) -> Array:
    """The delta of one round at each epsilon >= 0, rounded up: by 10^-12 of P(L > epsilon), and never to zero."""
    under_p, under_q = loss_tails(direction.positive, epsilons)
    growth = np.exp(np.minimum(epsilons, 700.0))  # where e^epsilon would overflow, a smaller factor: an upper bound
    result: Array = np.clip((1 + _TAIL_ERROR) * under_p - (1 - _TAIL_ERROR) * growth * under_q, 1e-300, 1.0)
    return result


def one_round_epsilon(direction: Direction, delta: float) -> float:
    """The least epsilon of one round at `delta`, rounded up; 0 where delta allows it, infinite where none is found."""
    low, high = 0.0, loss_range(direction, delta, delta)[0]  # delta(epsilon) is at most P(L > epsilon)
    if one_round_deltas(direction, np.zeros(1))[0] <= delta:
        return 0.0
    if one_round_deltas(direction, np.array([high]))[0] > delta:
        return float("inf")
    for _ in range(_TURNS):
        places = np.linspace(low, high, _POINTS)
        places[-1] = high
        first = int(np.argmax(one_round_deltas(direction, places) <= delta))
        low, high = float(places[first - 1]), float(places[first])
    return high


def _remove(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    y = _log_odds_above(losses, rate) / shift + shift / 2
    absent = normal_tail(y)
    return (1 - rate) * absent + rate * normal_tail(y - shift), absent


def _add(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    y = _log_odds_below(losses, rate) / shift + shift / 2
    absent = normal_tail(-y)
    return absent, (1 - rate) * absent + rate * normal_tail(shift - y)


def _replace(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    # (1-q) + c u = e^l ((1-q) + c / u), with u = exp(s y) and c = q exp(-s^2 / 2)
    log_sinh = losses / 2 + np.log(-np.expm1(-np.maximum(losses, 1e-300)) / 2)
    log_ratio = math.log1p(-rate) + log_sinh - math.log(rate) + shift**2 / 2 if rate < 1 else np.full_like(losses, -1e3)
    # asinh(x) = log(2 x) where exp would overflow
    arc = np.where(log_ratio > 300, log_ratio + math.log(2), np.arcsinh(np.exp(np.minimum(log_ratio, 300))))
    y = (losses / 2 + arc) / shift
    unsampled = (1 - rate) * normal_tail(y)
    return unsampled + rate * normal_tail(y - shift), unsampled + rate * normal_tail(y + shift)


def _zero_out(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    # (1-q) + A u^2 = e^l ((1-q) + B u), with u = exp(s y), A = q exp(-2 s^2), B = q exp(-s^2 / 2)
    x = 4 * (1 - rate) / rate * math.exp(-(shift**2)) * -np.expm1(-losses) * np.exp(-losses)
    y = (losses + 1.5 * shift**2 + np.log1p(np.sqrt(1 + x)) - math.log(2)) / shift
    unsampled = (1 - rate) * normal_tail(y)
    return unsampled + rate * normal_tail(y - 2 * shift), unsampled + rate * normal_tail(y - shift)


_TAILS: dict[MixturePair, Callable[[Array, float, float], tuple[Array, Array]]] = {
    MixturePair.REMOVE: _remove,
    MixturePair.ADD: _add,
    MixturePair.REPLACE: _replace,
    MixturePair.ZERO_OUT: _zero_out,
}


def _log_odds_above(losses: Array, rate: float) -> Array:
    """log(1 + (e^l - 1) / q), without overflow."""
    near = np.log1p(np.expm1(np.minimum(losses, 30.0)) / rate)
    far = losses - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-losses))
    return np.where(losses < 30, near, far)


def _log_odds_below(losses: Array, rate: float) -> Array:
    """log(1 + (e^-l - 1) / q): minus infinity from -log(1 - q) on, the largest loss that ADD can have."""
    if rate == 1:
        return -losses
    possible = losses < -math.log1p(-rate)
    inside = np.where(possible, losses, 0.0)
    fall = np.expm1(-inside)
    odds = fall / rate
    near = np.log1p(np.maximum(odds, -0.5))
    # e^-l - (1 - q): where q is tiny so is l, and a difference of two numbers near one would lose all digits.
    gap = fall + rate if rate < 0.5 else np.exp(-inside) - (1 - rate)
    far = np.log(np.maximum(gap, 1e-16 * (1 - rate))) - math.log(rate)
    return np.where(possible, np.where(odds > -0.5, near, far), -np.inf)
