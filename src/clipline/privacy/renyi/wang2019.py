"""Theorem 27 of Wang, Balle and Kasiviswanathan (2019): the Renyi curve that the paper used for fixed-size sampling.

For whole orders a, with q the rate and s the noise over what an exchange moves,

    (a - 1) R(a) = log( 1 + q^2 C(a,2) min(4 (e^(1/s^2) - 1), 2 e^(1/s^2))
                          + sum over j = 3..a of q^j C(a,j) min(4 sqrt(B(j') B(j'')), 2 e^(j (j-1) / (2 s^2))) )

with j' and j'' the even numbers next to j, below and above. B(l) is a forward difference of order l: an alternating sum
that loses all digits at high orders. For even l it equals E[(r - 1)^l], with r the likelihood ratio of two Gaussians.
That is the mean of something positive, and it is what is computed here. Between whole orders (a - 1) R(a) is
interpolated linearly, which is an upper bound because it is convex in a.

The bound is sound with s = z / 2; the paper used s = z. `fixed_size_curve` in `curves` is tight and lies below. This
one is for comparison and reproduction.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from ..numerics import Array
from ..numerics.quadrature import log_integral

MOST_ORDER = 256
PAPER_ORDERS: Array = np.array([*(k / 10 for k in range(11, 110)), *range(11, MOST_ORDER + 1)])


def wang2019_curve(rate: float, stddev: float, orders: Array) -> Array:
    """The divergence of one round at each order above 1; infinite above order 256."""
    logs = _log_moments(rate, stddev)
    reachable = np.minimum(orders, MOST_ORDER)
    interpolated = np.interp(reachable, np.arange(1, MOST_ORDER + 1), logs) / (reachable - 1)
    return np.where(orders <= MOST_ORDER, interpolated, np.inf)


@lru_cache(maxsize=64)
def _log_moments(rate: float, stddev: float) -> Array:
    """(a - 1) R(a) at a = 1, 2, ..., 256."""
    j = np.arange(2, MOST_ORDER + 1)
    plain = math.log(2) + j * (j - 1) / (2 * stddev**2)
    evens = log_even_differences(stddev, np.arange(2, MOST_ORDER + 1, 2, dtype=np.float64))
    differences = math.log(4) + 0.5 * (evens[j // 2 - 1] + evens[(j + 1) // 2 - 1])
    terms = j * math.log(rate) + np.minimum(plain, differences)
    totals = np.logaddexp.reduce(_log_binomials()[:, 1:] + terms, axis=1)
    return np.concatenate([[0.0], np.logaddexp(0.0, totals)])


def log_even_differences(stddev: float, powers: Array) -> Array:
    """The log of B(l) = E[(r - 1)^l] for even `powers` l, such as B(2) = e^(1/stddev^2) - 1.

    Here log r = x / stddev - 1 / (2 stddev^2), with x standard normal.
    """
    middle = 0.5 / stddev

    def log_integrand(x: Array, power: Array) -> Array:
        t = (x - middle) / stddev
        with np.errstate(divide="ignore"):
            distance = np.maximum(t, 0.0) + np.log(-np.expm1(-np.abs(t)))
        logs: Array = power * np.maximum(distance, -1e300) - 0.5 * x * x
        return logs

    width = np.sqrt(powers)
    peaks = np.stack([-width, np.zeros_like(width), width, middle + width, powers / stddev], axis=1)
    right = powers / stddev + width + 12
    step = 0.2 * min(1.0, stddev)
    left = -float(width.max()) - 12
    logs = log_integral(log_integrand, powers, peaks=peaks, left=left, right=right, step=step)
    return logs - 0.5 * math.log(2 * math.pi)


@lru_cache(maxsize=1)
def _log_binomials() -> Array:
    """(255, 256) of log C(a, j) for a = 2..256 and j = 1..256; minus infinity for j > a."""
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, MOST_ORDER + 1)))])
    a, j = np.arange(2, MOST_ORDER + 1)[:, None], np.arange(1, MOST_ORDER + 1)
    values = log_factorials[a] - log_factorials[j] - log_factorials[np.maximum(a - j, 0)]
    return np.where(j <= a, values, -np.inf)
