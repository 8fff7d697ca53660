"""Rounds without sampling, exactly: T Gaussians at distances mu_1, ..., mu_T are one at sqrt(mu_1^2 + ... + mu_T^2).

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)              Balle and Wang 2018

computed as density times a difference of Mills ratios M(x) = (1 - Phi(x)) / phi(x), which neither overflows nor, for
mu above 10^-4, cancels. Below, the difference over mu is at most minus the slope of M at its start, 1 - x M(x).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..errors import check_number
from .normal import mills

_SMALL = 1e-4
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta at `epsilon` of two Gaussians at distance `mu` in units of their noise."""
    return math.exp(min(_log_delta(mu, epsilon), 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon at `delta`, rounded up by less than 10^-12 of it; 0 where delta allows that."""
    log_delta = math.log(delta)
    if _log_delta(mu, 0.0) <= log_delta:
        return 0.0
    # Two Gaussians at distance mu: log P/Q is N(mu^2/2, mu^2), and P(L > epsilon) is at least delta.
    high = mu * mu / 2 + mu * math.sqrt(2 * -log_delta)
    return _least(lambda epsilon: _log_delta(mu, epsilon) <= log_delta, 0.0, max(high, 1e-300))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian trade-off curve passes through (epsilon, delta): the greatest that still allows it.

    A way to read one point of a guarantee, for those who think in Gaussian differential privacy; it does not say that
    the whole run is mu-GDP. Rounded up. Zero has no noise to speak of; infinite epsilon gives infinity.
    """
    if epsilon == math.inf:
        return math.inf
    check_number("epsilon", epsilon, at_least=0, way_out="give the epsilon of a guarantee")
    log_delta = math.log(check_number("delta", delta, above=0, below=1, way_out="give the delta of a guarantee"))
    high = 1.0
    while _log_delta(high, epsilon) <= log_delta:
        high *= 2
    return _least(lambda mu: _log_delta(mu, epsilon) > log_delta, 0.0, high)


def _least(met: Callable[[float], bool], low: float, high: float) -> float:
    """The least number that meets it, to 10^-13 and from above, given that `high` does and that it is monotone."""
    for _ in range(200):
        middle = (low + high) / 2
        if high - low <= 1e-13 * high or not low < middle < high:
            break
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _log_delta(mu: float, epsilon: float) -> float:
    if mu == 0:
        return -math.inf
    x = epsilon / mu - mu / 2
    log_density = -0.5 * x * x - _LOG_SQRT_2PI
    if x < -30:  # the density underflows, and all but nothing lies on the other side
        return math.log1p(-math.exp(log_density + math.log(mills(-x) + mills(x + mu))))
    slope = 1 - x * mills(x) if x < 50 else 1 / (x * x)  # below x = 50 little cancels; above, an upper bound
    if mu < _SMALL:
        return log_density + math.log(mu * slope)
    difference = mills(x) - mills(x + mu)
    return log_density + math.log(min(difference, mu * slope) if difference > 0 else mu * slope)
