"""The Renyi divergence that one round costs, as a curve over real orders above 1.

Normalise so that one user moves the sum by 1 and the noise has standard deviation `stddev`. With x standard normal
and r = 1 - q + q exp((2 stddev x - 1) / (2 stddev^2)), the likelihood ratio of "the user is there with probability q"
to "the user is not there", the curves are (order a, b = a - 1):

    no sampling                 a / (2 stddev^2)
    Poisson sampling            log(1 + E[r^a - 1 - a (r - 1)]) / b                         Mironov, Talwar, Zhang 2019
    fixed size, replace one     log(1 + E[1{r > 1} (r^a + r^(1-a) - r - 1)]) / b            docs/guarantees.md

Both expectations are of terms that are never negative, so that a cost of 10^-30 is computed as well as one of 10^3.
Which pair of sampling and relation has which curve is said in `pairs`, and nowhere else.
"""

from __future__ import annotations

import math

import numpy as np

from .quadrature import Array, log_integral

# The sampled curves grow with the rate and fall with the noise, so that using the nearest limit here can only overstate
# the cost. Below the least stddev the quadrature would need too many nodes, and sampling is not counted at all.
_LEAST_RATE, _MOST_STDDEV, _LEAST_STDDEV = 1e-12, 1e12, 1e-3
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_curve(stddev: float, orders: Array) -> Array:
    """Without sampling: a / (2 stddev^2)."""
    with np.errstate(over="ignore"):  # infinite beyond 10^308, as it should be
        return 0.5 * (orders / stddev) / stddev


def discrete_gaussian_curve(stddev: float, orders: Array) -> Array:
    """The same for noise drawn from the discrete Gaussian on the integers and integer sums that move by at most 1.

    Canonne, Kamath and Steinke (2020, Proposition 5): the divergence of a discrete Gaussian from itself shifted by an
    integer is at most that of the continuous one with the same parameter, at every order and every parameter. Vectors
    follow coordinate by coordinate, with the Euclidean norm of the shift. A bound for rounds without sampling; with
    Poisson sampling `poisson_curve_at_whole_orders` holds for it too, since the binomial sum uses nothing but moments.
    """
    return gaussian_curve(stddev, orders)


def poisson_curve(rate: float, stddev: float, orders: Array) -> Array:
    """Poisson sampling at `rate`; of the two directions, the user present against absent, which costs more."""
    if rate == 1 or stddev < _LEAST_STDDEV:
        return gaussian_curve(stddev, orders)
    rate, stddev = max(rate, _LEAST_RATE), min(stddev, _MOST_STDDEV)
    middle = 0.5 / stddev  # where r = 1

    def log_integrand(x: Array, order: Array) -> Array:
        return _log_convex_excess(_log_ratio((x - middle) / stddev, rate), order - 1) - 0.5 * x * x

    summits = _summits(rate, stddev, orders)
    right = np.maximum(orders, 2) / stddev + 10
    # The branch points of r^a lie at distance pi * stddev from the real line, which sets the step when stddev < 1.
    step = 0.4 * min(1.0, stddev)
    log_excess = log_integral(log_integrand, orders, summits=summits, left=-10.0, right=right, step=step)
    return np.logaddexp(0.0, log_excess - _LOG_SQRT_2PI) / (orders - 1)


def poisson_curve_at_whole_orders(rate: float, stddev: float, orders: Array) -> Array:
    """`poisson_curve` at whole orders by the binomial sum: the plain version, one term for each k up to the order."""
    costs = []
    for order in orders.astype(int).tolist():
        k = np.arange(2, order + 1)
        log_choose = np.array([math.lgamma(order + 1) - math.lgamma(j + 1) - math.lgamma(order - j + 1) for j in k])
        exponent = k * (k - 1) / (2 * stddev**2)
        log_growth = exponent + np.log(-np.expm1(-exponent))  # log(e^exponent - 1); the terms 0 and 1 have none
        terms = log_choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + log_growth
        costs.append(np.logaddexp(0.0, np.logaddexp.reduce(terms)) / (order - 1))
    return np.array(costs)


def fixed_size_curve(rate: float, stddev: float, orders: Array) -> Array:
    """Fixed-size sampling, replace one; the distance between two users' contributions is 1, so `stddev` is z / 2."""
    if rate == 1 or stddev < _LEAST_STDDEV:
        return gaussian_curve(stddev, orders)
    rate, stddev = max(rate, _LEAST_RATE), min(stddev, _MOST_STDDEV)
    middle, scale = 0.5 / stddev, min(1.0, stddev)

    def log_integrand(v: Array, order: Array) -> Array:
        # The integral runs over x > middle. Putting x = middle + scale * log(1 + exp(.)) makes it one over the whole
        # line that vanishes at both ends, as the trapezoid rule wants it.
        v = (v - middle) / scale
        beyond = scale * np.logaddexp(0.0, v)
        log_slope = -np.logaddexp(0.0, -v)
        u = _log_ratio(beyond / stddev, rate)
        # r^a + r^(1-a) - r - 1 = r^a (1 - r^-a) (1 - r^(1-a)), which has nothing to cancel.
        product = np.expm1(-order * u) * np.expm1(-(order - 1) * u)
        logs: Array = order * u + np.log(product) - 0.5 * (middle + beyond) ** 2 + log_slope
        return logs

    summits = _summits(rate, stddev, orders)
    right = np.maximum(orders, 2) / stddev + 10
    left = middle - 15 * scale  # there the integrand is exp(-45) of what it is at the middle
    log_excess = log_integral(log_integrand, orders, summits=summits, left=left, right=right, step=0.4 * scale)
    return np.logaddexp(0.0, log_excess - _LOG_SQRT_2PI) / (orders - 1)


def _log_ratio(t: Array, rate: float) -> Array:
    """The log of r, log(1 - rate + rate e^t), without cancellation near t = 0 and without overflow."""
    near = np.log1p(rate * np.expm1(np.minimum(t, 500.0)))
    return np.where(t < 500.0, near, t + math.log(rate))


def _log_convex_excess(u: Array, b: Array) -> Array:
    """The log of r^a - 1 - a (r - 1) for r = e^u and a = b + 1: how far r^a lies above its tangent at 1.

    Written as r (expm1(b u) + b expm1(-u)), whose two terms cancel when u is small; there its Taylor series serves.
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
    """Sum expm1(y) + b expm1(-u), y = b u, for |u| and |y| below 0.1: y times the sum of (y^j - (-u)^j) / (j + 1)!.

    Nine terms leave a relative error under 10^-15.
    """
    total, y_power, u_power = np.zeros_like(u), y, -u
    for k in range(2, 11):
        total += (y_power - u_power) / math.factorial(k)
        y_power, u_power = y_power * y, u_power * -u
    return y * total


def _summits(rate: float, stddev: float, orders: Array) -> Array:
    """(orders, 4) places near which the integrand of either sampled curve may have a narrow maximum.

    Near 0 and near 2 / stddev, where the excess is quadratic in r - 1; elsewhere it is r^a, and r^a exp(-x^2/2) is
    stationary at x = (a / stddev) p(x), with p the posterior probability that the user was sampled. p rises, so
    iterating from 0 climbs to the least such x, and from a / stddev descends to the greatest.
    """
    top = orders / stddev
    log_odds, middle = math.log(rate) - math.log1p(-rate), 0.5 / stddev
    x = np.stack([np.zeros_like(top), top])
    for _ in range(30):
        before, x = x, top / (1 + np.exp(np.minimum(-log_odds - (x - middle) / stddev, 700.0)))
        if np.all(np.abs(x - before) < 0.1):  # a probe stands every 0.6
            break
    return np.stack([np.zeros_like(top), np.full_like(top, 2 / stddev), x[0], x[1]], axis=1)
