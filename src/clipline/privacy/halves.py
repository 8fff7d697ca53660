"""Closed forms of one round: how much of the privacy loss lies beyond a value, under either of the two outputs.

Everything is in units of the noise: the noise is N(0, 1) and `shift` is how far one user moves the sum. With q the rate
and y the released number, the four pairs (P, Q) are mixtures of normals at the places shown:

    LEAVE    (1-q) N(0) + q N(s)     against   N(0)                     somebody's presence
    JOIN     N(0)                    against   (1-q) N(0) + q N(s)      the same, read the other way
    SWAP     (1-q) N(0) + q N(s)     against   (1-q) N(0) + q N(-s)     one user exchanged, Poisson sampling
    SILENCE  (1-q) N(0) + q N(2s)    against   (1-q) N(0) + q N(s)      one user silenced, fixed-size sampling

The loss is L = log(dP/dQ). Only the half L > 0 is described; the half L < 0 is the half L > 0 of the reverse pair.
For l >= 0 the event {L > l} is a half-line of y in all four, and its end has a closed form: SWAP and SILENCE solve a
quadratic in exp(s y), written so that nothing cancels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from .normal import tail

Array = NDArray[np.float64]


class Kind(Enum):
    """Which of the four pairs."""

    LEAVE = "leave"
    JOIN = "join"
    SWAP = "swap"
    SILENCE = "silence"


@dataclass(frozen=True)
class Half:
    """`weight` times the half L > 0 of one pair."""

    kind: Kind
    rate: float
    shift: float
    weight: float = 1.0

    def beyond(self, losses: Array) -> tuple[Array, Array]:
        """(P(L > l), Q(L > l)) for each l >= 0 of `losses`, each to its own relative precision, times the weight."""
        under_p, under_q = _BEYOND[self.kind](losses, self.rate, self.shift)
        return self.weight * under_p, self.weight * under_q


Halves = tuple[Half, ...]  # a mixture: the weights add up to one


def beyond(halves: Halves, losses: Array) -> tuple[Array, Array]:
    """(P(L > l), Q(L > l)) of a mixture whose component is revealed, which is what mixing profiles means."""
    under_p, under_q = np.zeros_like(losses), np.zeros_like(losses)
    for half in halves:
        more_p, more_q = half.beyond(losses)
        under_p, under_q = under_p + more_p, under_q + more_q
    return under_p, under_q


def _leave(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    y = _log_odds_above(losses, rate) / shift + shift / 2
    absent = tail(y)
    return (1 - rate) * absent + rate * tail(y - shift), absent


def _join(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    y = _log_odds_below(losses, rate) / shift + shift / 2
    absent = tail(-y)
    return absent, (1 - rate) * absent + rate * tail(shift - y)


def _swap(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    # (1-q) + c u = e^l ((1-q) + c / u), with u = exp(s y) and c = q exp(-s^2 / 2)
    log_sinh = losses / 2 + np.log(-np.expm1(-np.maximum(losses, 1e-300)) / 2)
    log_ratio = math.log1p(-rate) + log_sinh - math.log(rate) + shift**2 / 2 if rate < 1 else np.full_like(losses, -1e3)
    # asinh(x) = log(2 x) beyond the reach of exp
    arc = np.where(log_ratio > 300, log_ratio + math.log(2), np.arcsinh(np.exp(np.minimum(log_ratio, 300))))
    y = (losses / 2 + arc) / shift
    unsampled = (1 - rate) * tail(y)
    return unsampled + rate * tail(y - shift), unsampled + rate * tail(y + shift)


def _silence(losses: Array, rate: float, shift: float) -> tuple[Array, Array]:
    # (1-q) + A u^2 = e^l ((1-q) + B u), with u = exp(s y), A = q exp(-2 s^2), B = q exp(-s^2 / 2)
    x = 4 * (1 - rate) / rate * math.exp(-(shift**2)) * -np.expm1(-losses) * np.exp(-losses)
    y = (losses + 1.5 * shift**2 + np.log1p(np.sqrt(1 + x)) - math.log(2)) / shift
    unsampled = (1 - rate) * tail(y)
    return unsampled + rate * tail(y - 2 * shift), unsampled + rate * tail(y - shift)


_BEYOND: dict[Kind, Callable[[Array, float, float], tuple[Array, Array]]] = {
    Kind.LEAVE: _leave,
    Kind.JOIN: _join,
    Kind.SWAP: _swap,
    Kind.SILENCE: _silence,
}


def _log_odds_above(losses: Array, rate: float) -> Array:
    """Compute log(1 + (e^l - 1) / q) without overflow."""
    near = np.log1p(np.expm1(np.minimum(losses, 30.0)) / rate)
    far = losses - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-losses))
    return np.where(losses < 30, near, far)


def _log_odds_below(losses: Array, rate: float) -> Array:
    """Compute log(1 + (e^-l - 1) / q): minus infinity from the largest loss on that JOIN can have, -log(1 - q)."""
    if rate == 1:
        return -losses
    possible = losses < -math.log1p(-rate)
    inside = np.where(possible, losses, 0.0)
    fall = np.expm1(-inside)
    odds = fall / rate
    near = np.log1p(np.maximum(odds, -0.5))
    # e^-l - (1 - q): where q is tiny so is l, and a difference of numbers near one would have no digits left.
    gap = fall + rate if rate < 0.5 else np.exp(-inside) - (1 - rate)
    far = np.log(np.maximum(gap, 1e-16 * (1 - rate))) - math.log(rate)
    return np.where(possible, np.where(odds > -0.5, near, far), -np.inf)
