"""What a ledger means for an attacker who guesses whether a user took part: the trade-off of his two kinds of error.

f(a) is the least share of members that any attacker misses who accuses at most a share a of the others. Every pair
(epsilon, delta) that holds is a line below f, and f is the greatest function above all of them (Wasserman and Zhou
2010; Dong, Roth and Su 2022).

One number can stand for the curve: the mu of the Gaussian mechanism whose curve lies below f wherever both errors are
at least 1e-10. `regret` says how much is lost by telling mu alone: by so much, in both errors, the Gaussian's curve may
lie below f (Gomez et al. 2026, "Gaussian DP for Reporting Differential Privacy Guarantees in Machine Learning").
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from .accountant import delta_at
from .ledger import Ledger
from .numerics import Array, gaussian_delta, gaussian_mu
from .relations import Relation

LEAST_ERROR = 1e-10
_POINTS, _BETWEEN = 49, 25  # deltas that are accounted, and lines drawn between two of them


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The trade-off curve of a run, by lines of slope -exp(epsilon) and their mirror images."""

    epsilons: Array
    deltas: Array
    mu: float
    regret: float

    def missed(self, false_positives: float) -> float:
        """f: the least share of members that an attacker misses at this rate of false accusations."""
        steep = 1 - self.deltas - np.exp(self.epsilons) * false_positives
        flat = np.exp(-self.epsilons) * (1 - self.deltas - false_positives)
        return max(float(steep.max()), float(flat.max()), 0.0)

    def true_positives(self, false_positives: float) -> float:
        """The greatest share of members that any attacker finds at this rate of false accusations."""
        return 1 - self.missed(false_positives)


def trade_off(ledger: Ledger, *, epsilon: float, relation: Relation) -> TradeOff:
    """The curve of all rounds, from below: attackers do no better than it says. `epsilon` is where the search begins.

    Deltas are accounted at 49 epsilons. Each of these points lies on a Gaussian's curve, and the mu of that
    rises or falls from one to the next. Between two of them the greater mu is taken, which errs upwards.
    """
    last = max(epsilon, 1e-3)
    while _accused(ledger, last, relation) > LEAST_ERROR:
        last *= 1.5
    low = 0.0
    for _ in range(10):
        middle = (low + last) / 2
        low, last = (middle, last) if _accused(ledger, middle, relation) > LEAST_ERROR else (low, middle)
    # Closer together where the curve bends: near epsilon 0 if there is little privacy loss.
    points = last * np.linspace(0.0, 1.0, _POINTS) ** 2.5
    accounted = [_delta(ledger, float(x), relation) for x in points]
    mus = [gaussian_mu(float(x), one) for x, one in zip(points, accounted, strict=True)]
    pairs = zip(points[:-1], points[1:], map(max, mus[:-1], mus[1:]), strict=True)
    between = [(float(x), one) for low, high, one in pairs for x in np.linspace(low, high, _BETWEEN)]
    deltas = np.array([gaussian_delta(one, x) for x, one in between])
    curve = TradeOff(np.array([x for x, _ in between]), deltas, math.nan, math.nan)
    mu = max(_mu_at(curve, float(rate)) for rate in np.geomspace(LEAST_ERROR, 0.5, 60))
    gaussian = np.array([gaussian_delta(mu, float(x)) for x in points])
    return replace(curve, mu=mu, regret=float(np.max((gaussian - accounted) / (1 + np.exp(points)))))


def _mu_at(curve: TradeOff, rate: float) -> float:
    """The mu of the Gaussian curve through one point of this one: G(a) = Phi(Phi^-1(1 - a) - mu)."""
    from scipy.special import ndtri

    missed = curve.missed(rate)
    return float(-ndtri(rate) - ndtri(missed)) if missed >= LEAST_ERROR else 0.0


def _accused(ledger: Ledger, epsilon: float, relation: Relation) -> float:
    """What share of the others an attacker accuses where the curve has slope -exp(epsilon)."""
    step = 0.01
    fall = _delta(ledger, epsilon, relation) - _delta(ledger, epsilon + step, relation)
    return fall / (math.exp(epsilon) * math.expm1(step))


def _delta(ledger: Ledger, epsilon: float, relation: Relation) -> float:
    return max(delta_at(ledger, epsilon=epsilon, relation=relation), 1e-300)
