"""The Renyi divergence of one round, as a curve over real orders above 1.

Units are chosen so that one user moves the sum by 1 and the noise has standard deviation `stddev`. Let x be standard
normal and r = 1 - q + q exp((2 stddev x - 1) / (2 stddev^2)), the likelihood ratio of "the user is there with
probability q" to "the user is not there". The curves are (order a, b = a - 1):

    no sampling                 a / (2 stddev^2)
    Poisson sampling            log(1 + E[r^a - 1 - a (r - 1)]) / b                         Mironov, Talwar, Zhang 2019
    fixed size, replace one     log(1 + E[1{r > 1} (r^a + r^(1-a) - r - 1)]) / b            docs/guarantees.md

Both expectations are of terms that are never negative, so that a divergence of 10^-30 is computed as precisely as one
of 10^3. Which sampling and relation have which curve is said in `dominating_pairs`, and nowhere else.
"""

from __future__ import annotations

import math

import numpy as np

from ..numerics import Array
from ..numerics.quadrature import log_integral

# The sampled curves grow with the rate and fall with the noise, so that moving either to these limits can only
# overstate the cost. Below the least stddev the quadrature would need too many nodes, and the curve without sampling is
# used.
_LEAST_RATE, _MOST_STDDEV, _LEAST_STDDEV = 1e-12, 1e12, 1e-3
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_curve(stddev: float, orders: Array) -> Array:
    """Without sampling: a / (2 stddev^2)."""
    with np.errstate(over="ignore"):  # infinite beyond 10^308, which is right
        return 0.5 * (orders / stddev) / stddev


def discrete_gaussian_curve(stddev: float, orders: Array) -> Array:
    """The same for noise from the discrete Gaussian on the integers, and integer sums that move by at most 1.

    Canonne, Kamath and Steinke (2020, Proposition 5): the divergence of a discrete Gaussian from itself shifted by an
    integer is at most that of the continuous one with the same parameter, at every order and every parameter. Vectors
    follow coordinate by coordinate, with the Euclidean norm of the shift. This bounds rounds without sampling. With
    Poisson sampling `poisson_curve_at_whole_orders` holds too, since its binomial sum uses nothing but moments.
    """
    return gaussian_curve(stddev, orders)


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


def poisson_curve_at_whole_orders(rate: float, stddev: float, orders: Array) -> Array:
    """`poisson_curve` at whole orders by the binomial sum, one term for each k up to the order: the plain version."""
    costs = []
    for order in orders.astype(int).tolist():
        k = np.arange(2, order + 1)
        log_choose = np.array([math.lgamma(order + 1) - math.lgamma(j + 1) - math.lgamma(order - j + 1) for j in k])
        exponent = k * (k - 1) / (2 * stddev**2)
        log_growth = exponent + np.log(-np.expm1(-exponent))  # log(e^exponent - 1), which is 0 for k = 0 and k = 1
        terms = log_choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + log_growth
        costs.append(np.logaddexp(0.0, np.logaddexp.reduce(terms)) / (order - 1))
    return np.array(costs)


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
