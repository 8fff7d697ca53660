"""Renyi accounting: the Renyi divergence of one round as a function of its order, and epsilon from it.

**Curves** are over real orders above 1. Which round has which is said in `dominating_pairs`. Units are chosen so that
one user moves the sum by 1 and the noise has standard deviation `stddev`. Let x be standard normal and
r = 1 - q + q exp((2 stddev x - 1) / (2 stddev^2)), the likelihood ratio of "the user is there with probability q" to
"the user is not there". With order a and b = a - 1 they are:

    no sampling                 a / (2 stddev^2)
    Poisson sampling            log(1 + E[r^a - 1 - a (r - 1)]) / b                         Mironov, Talwar, Zhang 2019
    fixed size, replace one     log(1 + E[1{r > 1} (r^a + r^(1-a) - r - 1)]) / b            proofs.md

Both expectations are of terms that are never negative, so that a divergence of 10^-30 is computed as precisely as one
of 10^3. `wang2019_curve` is the looser curve that the paper used, kept to reproduce its tables.

**Epsilon** at delta follows by Proposition 12 of Canonne, Kamath and Steinke 2020. Every order gives a valid epsilon,
so that a search over orders can only lose tightness, never soundness. Orders run from 1.0001, for runs with a huge
epsilon, to a million, for runs with a tiny one: at delta = 10^-6.6 a list that ends at order 256 cannot report less
than 0.034.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .numerics import Array

# The sampled curves grow with the rate and fall with the noise, so that moving either to these limits can only
# overstate the cost. Below the least stddev the quadrature would need too many nodes, and the curve without sampling is
# used.
_LEAST_RATE, _MOST_STDDEV, _LEAST_STDDEV = 1e-12, 1e12, 1e-3
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)

MOST_ORDER = 256  # of the curve that the paper used
PAPER_ORDERS: Array = np.array([*(k / 10 for k in range(11, 110)), *range(11, MOST_ORDER + 1)])

# Orders are 1 + 10^(i / per_decade). The finest ones are fixed too, and not wherever a minimiser ends: the curve is
# then evaluated at the same orders round after round, and its cache answers.
_LEAST_DECADE, _MOST_DECADE = -4, 6
_PER_DECADE, _REFINEMENT, _LEVELS = 2, 12, 3  # 2, 24, 288, 3456 orders a decade

LogIntegrand = Callable[[Array, Array], Array]  # (rows, nodes) points, (rows, 1) orders -> (rows, nodes) logarithms

_DEPTH = 42.0  # what lies a factor exp(42) = 10^18 below the highest peak is left out
_FIRST_OFFSET, _OFFSET_RATIO = 0.6, 1.6  # distances of probes from a peak: 0.6, 0.96, ..., until they span everything
_BLOCK = 1 << 18  # points evaluated at once: a few megabytes
_MOST_NODES = 1 << 20


def gaussian_curve(stddev: float, orders: Array) -> Array:
    """Without sampling: a / (2 stddev^2)."""
    with np.errstate(over="ignore"):  # infinite beyond 10^308, which is right
        return 0.5 * (orders / stddev) / stddev


def poisson_curve(rate: float, stddev: float, orders: Array) -> Array:
    """Poisson sampling at `rate`: of the two directions the user present against absent, which costs more."""
    if rate == 1 or stddev < _LEAST_STDDEV:
        return gaussian_curve(stddev, orders)
    rate, stddev = max(rate, _LEAST_RATE), min(stddev, _MOST_STDDEV)
    middle = 0.5 / stddev  # where r = 1

    def log_integrand(x: Array, order: Array) -> Array:
        return _log_convex_excess(_log_ratio((x - middle) / stddev, rate), order - 1) - 0.5 * x * x

    peaks = _peaks(rate, stddev, orders)
    right = np.maximum(orders, 2) / stddev + 10
    # The branch points of r^a lie at distance pi * stddev from the real line. They limit the step when stddev < 1.
    step = 0.4 * min(1.0, stddev)
    log_excess = log_integral(log_integrand, orders, peaks=peaks, left=-10.0, right=right, step=step)
    return np.logaddexp(0.0, log_excess - _LOG_SQRT_2PI) / (orders - 1)


def fixed_size_curve(rate: float, stddev: float, orders: Array) -> Array:
    """Fixed-size sampling, replace one. Two users' contributions differ by at most 1, so that `stddev` is z / 2."""
    if rate == 1 or stddev < _LEAST_STDDEV:
        return gaussian_curve(stddev, orders)
    rate, stddev = max(rate, _LEAST_RATE), min(stddev, _MOST_STDDEV)
    middle, scale = 0.5 / stddev, min(1.0, stddev)

    def log_integrand(v: Array, order: Array) -> Array:
        # The integral runs over x > middle. Substituting x = middle + scale * log(1 + exp(v)) makes it an integral over
        # the whole line whose integrand vanishes at both ends, which the trapezoid rule needs.
        v = (v - middle) / scale
        beyond = scale * np.logaddexp(0.0, v)
        log_slope = -np.logaddexp(0.0, -v)
        u = _log_ratio(beyond / stddev, rate)
        # r^a + r^(1-a) - r - 1 = r^a (1 - r^-a) (1 - r^(1-a)), which has nothing to cancel.
        product = np.expm1(-order * u) * np.expm1(-(order - 1) * u)
        logs: Array = order * u + np.log(product) - 0.5 * (middle + beyond) ** 2 + log_slope
        return logs

    peaks = _peaks(rate, stddev, orders)
    right = np.maximum(orders, 2) / stddev + 10
    left = middle - 15 * scale  # there the integrand is exp(-45) of its value at `middle`
    log_excess = log_integral(log_integrand, orders, peaks=peaks, left=left, right=right, step=0.4 * scale)
    return np.logaddexp(0.0, log_excess - _LOG_SQRT_2PI) / (orders - 1)


def _log_ratio(t: Array, rate: float) -> Array:
    """The log of r, log(1 - rate + rate e^t), without cancellation near t = 0 and without overflow."""
    near = np.log1p(rate * np.expm1(np.minimum(t, 500.0)))
    return np.where(t < 500.0, near, t + math.log(rate))


def _log_convex_excess(u: Array, b: Array) -> Array:
    """The log of r^a - 1 - a (r - 1) for r = e^u and a = b + 1: how far r^a lies above its tangent at 1.

    Written as r (expm1(b u) + b expm1(-u)). Its two terms cancel when u is small; the Taylor series is used there.
    Minus infinity at u = 0.
    """
    y = b * u
    full = np.expm1(np.minimum(y, 700.0)) + b * np.expm1(-u)
    small = (np.abs(u) < 0.1) & (np.abs(y) < 0.1)
    if small.any():
        full[small] = _excess_series(u[small], y[small])
    with np.errstate(divide="ignore"):
        log_full = np.log(full)
    return u + np.where(y > 700.0, y, log_full)


def _excess_series(u: Array, y: Array) -> Array:
    """expm1(y) + b expm1(-u), y = b u, for |u| and |y| below 0.1: y times the sum of (y^j - (-u)^j) / (j + 1)!.

    Nine terms leave a relative error under 10^-15.
    """
    total, y_power, u_power = np.zeros_like(u), y, -u
    for k in range(2, 11):
        total += (y_power - u_power) / math.factorial(k)
        y_power, u_power = y_power * y, u_power * -u
    return y * total


def _peaks(rate: float, stddev: float, orders: Array) -> Array:
    """(orders, 4) places near which the integrand of either sampled curve may have a narrow maximum.

    Two are 0 and 2 / stddev, where the excess is quadratic in r - 1. Elsewhere the excess is about r^a, and
    r^a exp(-x^2/2) is stationary at x = (a / stddev) p(x), with p the posterior probability that the user was sampled.
    p rises with x, so that iterating from 0 climbs to the least such x, and iterating from a / stddev descends to the
    greatest.
    """
    top = orders / stddev
    log_odds, middle = math.log(rate) - math.log1p(-rate), 0.5 / stddev
    x = np.stack([np.zeros_like(top), top])
    for _ in range(30):
        before, x = x, top / (1 + np.exp(np.minimum(-log_odds - (x - middle) / stddev, 700.0)))
        if np.all(np.abs(x - before) < 0.1):  # close enough: the quadrature probes every 0.6 around a peak
            break
    return np.stack([np.zeros_like(top), np.full_like(top, 2 / stddev), x[0], x[1]], axis=1)


def wang2019_curve(rate: float, stddev: float, orders: Array) -> Array:
    """Theorem 27 of Wang, Balle and Kasiviswanathan (2019) for fixed-size sampling; infinite above order 256.

    For whole orders a, with q the rate and s the noise over what an exchange moves,

        (a - 1) R(a) = log( 1 + q^2 C(a,2) min(4 (e^(1/s^2) - 1), 2 e^(1/s^2))
                              + sum over j = 3..a of q^j C(a,j) min(4 sqrt(B(j') B(j'')), 2 e^(j (j-1) / (2 s^2))) )

    with j' and j'' the even numbers next to j, below and above. B(l) is a forward difference of order l: an alternating
    sum that loses all digits at high orders. For even l it equals E[(r - 1)^l], the mean of something positive, and
    that is computed here. Between whole orders (a - 1) R(a) is interpolated linearly, which is an upper bound because
    it is convex in a. The bound is sound with s = z / 2; the paper used s = z.
    """
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


def log_integral(
    log_integrand: LogIntegrand, orders: Array, *, peaks: Array, left: float, right: Array, step: float
) -> Array:
    """Logarithm of the integral of exp(log_integrand(x, order)) over [left, right], one for each order.

    The integrands are a power of a likelihood ratio times exp(-x^2/2): smooth peaks, each at least about one unit wide,
    near 0, near a / stddev (which may be 10^7), or at both with nothing in between. For these the trapezoid rule
    converges faster than any power of its step, once the peaks are found.

    `peaks` (orders, k) are guesses of the local maxima. Every narrow maximum must be near one of them; a broad one need
    not be. `left` and `right` (orders,) may be generous. `step` is the widest step that the trapezoid rule allows.
    Where more than a million nodes would be needed the answer is infinity, which errs towards privacy.
    """
    low, high = _intervals(log_integrand, orders, peaks, left, right)
    steps = np.ceil((high - low) / step)
    # Powers of two, so that orders of similar width share one matrix. Rounding up only makes the step finer.
    nodes = np.exp2(np.ceil(np.log2(np.clip(steps, 32, None))))
    result = np.full(orders.shape, np.inf)
    for count in np.unique(nodes[nodes <= _MOST_NODES]).astype(int):
        (rows,) = np.nonzero(nodes == count)
        for block in np.array_split(rows, -(-len(rows) * count // _BLOCK)):
            width = (high[block] - low[block]) / count
            points = low[block, None] + width[:, None] * np.arange(count + 1)
            result[block] = _log_sum(log_integrand(points, orders[block, None])) + np.log(width)
    return result


def _intervals(
    log_integrand: LogIntegrand, orders: Array, peaks: Array, left: float, right: Array
) -> tuple[Array, Array]:
    """For each order, the smallest interval found outside of which the integrand is negligible."""
    reach = max(float(right.max()) - left, 2.0)
    count = int(np.ceil(np.log(reach / _FIRST_OFFSET) / np.log(_OFFSET_RATIO)))
    offsets = _FIRST_OFFSET * _OFFSET_RATIO ** np.arange(count)
    offsets = np.concatenate([-offsets, [0.0], offsets])
    probes = (peaks[:, :, None] + offsets).reshape(len(orders), -1)
    probes = np.clip(probes, left, right[:, None])
    heights = log_integrand(probes, orders[:, None])
    kept = heights > heights.max(axis=1, keepdims=True) - _DEPTH
    first = np.where(kept, probes, np.inf).min(axis=1)
    last = np.where(kept, probes, -np.inf).max(axis=1)
    # One probe further out on either side: between two neighbouring probes the integrand is monotone, or its peak is
    # known.
    low = np.where(probes < first[:, None], probes, left).max(axis=1)
    high = np.where(probes > last[:, None], probes, right[:, None]).min(axis=1)
    return low, high


def _log_sum(logs: Array) -> Array:
    """log(sum(exp(row))) for each row, without overflow."""
    top = logs.max(axis=1)
    total: Array = top + np.log(np.exp(logs - top[:, None]).sum(axis=1))
    return total
