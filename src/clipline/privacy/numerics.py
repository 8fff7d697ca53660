"""The normal law: its tails, and the exact cost of Gaussian noise without sampling.

**Tails** are accurate to about fourteen digits. SciPy has them too, but importing it takes longer than most answers of
the accountant. For x >= 0 the function (1 + 2 x) exp(x^2) erfc(x) is smooth and lies between 1 and about 1.2. In
t = (x - 3.75) / (x + 3.75), which runs from -1 to 1, a polynomial of degree 25 approximates it to float64 precision.
(The substitution is that of Shepherd and Laframboise 1981; the coefficients were computed with 40 digits for this
file.)

**Cost.** Rounds without sampling are exact: T Gaussians at distances mu_1, ..., mu_T, in units of their noise, compose
to one Gaussian at distance sqrt(mu_1^2 + ... + mu_T^2), for which

    delta(epsilon) = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu)              Balle and Wang 2018

It is computed as a density times a difference of Mills ratios M(x) = (1 - Phi(x)) / phi(x). That does not overflow, and
for mu above 10^-4 it does not cancel. For smaller mu the difference divided by mu is bounded by 1 - x M(x), which is
minus the derivative of M at the left end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import check_number

Array = NDArray[np.float64]

_MIDDLE = 3.75
_COEFFICIENTS = (
    1.23751263083782758, -0.140240598585547018, 0.00358541548546442937, 0.082276738490151024, -0.108803930141748857,
    0.0923043211601983343, -0.0586933985896367741, 0.0283622774215155971, -0.00974657955802927553,
    0.00175562583242175281, 0.00029371366559134482, -0.00029015397928986766, 0.0000516490988926824034,
    0.0000223839120365506791, -0.0000114441462377005234, -9.72849582211122029e-7, 1.75163764884906214e-6,
    -5.8262810788007771e-8, -2.58668507161558854e-7, 2.42897629254887075e-8, 3.86753342422223568e-8,
    -4.38928415998632844e-9, -5.17399021401130962e-9, 5.45715730470468809e-10, 4.25147144479638976e-10,
    -3.75315827795962063e-11,
)  # fmt: skip
_ROOT_HALF = math.sqrt(0.5)
_GREATEST = 40.0  # beyond it the tail is zero in float64
_SMALL_MU = 1e-4
_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def normal_tail(x: Array) -> Array:
    """The probability that a standard normal exceeds each x; infinite x are allowed."""
    distance = np.minimum(np.abs(x), _GREATEST)
    upper: Array = 0.5 * _gauss(distance) * _erfcx(distance * _ROOT_HALF)
    return np.where(x >= 0, upper, 1 - upper)


def mills_ratio(x: float) -> float:
    """(1 - Phi(x)) / phi(x), the tail over the density, for x above about -37."""
    at = abs(x)
    ratio = math.sqrt(math.pi / 2) * float(_erfcx(at * _ROOT_HALF))
    if x >= 0:
        return ratio
    return math.sqrt(2 * math.pi) / float(_gauss(np.float64(at))) - ratio  # the two tails add up to one


def gaussian_delta(mu: float, epsilon: float) -> float:
    """The delta at `epsilon` of two Gaussians at distance `mu` in units of their noise."""
    return math.exp(min(_log_delta(mu, epsilon), 0.0))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon at `delta`, rounded up by less than 10^-12 of it; 0 where delta allows that."""
    log_delta = math.log(delta)
    if _log_delta(mu, 0.0) <= log_delta:
        return 0.0
    # The loss L = log P/Q is N(mu^2/2, mu^2) and delta(epsilon) <= P(L > epsilon), which is at most delta at `high`.
    high = mu * mu / 2 + mu * math.sqrt(2 * -log_delta)
    return _least(lambda epsilon: _log_delta(mu, epsilon) <= log_delta, 0.0, max(high, 1e-300))


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The mu whose Gaussian trade-off curve passes through (epsilon, delta): the greatest that still allows it.

    It restates one point of a guarantee for readers used to Gaussian differential privacy. It does not say that the
    whole run is mu-GDP. Rounded up. An infinite epsilon gives infinity.
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
    """The least number for which `met` holds, to 10^-13 and from above; `met` is monotone and holds at `high`."""
    for _ in range(200):
        middle = (low + high) / 2
        if high - low <= 1e-13 * high or not low < middle < high:
            break
        low, high = (low, middle) if met(middle) else (middle, high)
    return high


def _log_delta(mu: float, epsilon: float) -> float:
    """The logarithm of delta(epsilon), see the module docstring."""
    if mu == 0:
        return -math.inf
    x = epsilon / mu - mu / 2
    log_density = -0.5 * x * x - _LOG_SQRT_2PI
    if x < -30:  # the density underflows: delta is nearly 1, and its complement is computed instead
        return math.log1p(-math.exp(log_density + math.log(mills_ratio(-x) + mills_ratio(x + mu))))
    # Below x = 50 little cancels; above, 1 / x^2 is an upper bound.
    descent = 1 - x * mills_ratio(x) if x < 50 else 1 / (x * x)
    if mu < _SMALL_MU:
        return log_density + math.log(mu * descent)
    difference = mills_ratio(x) - mills_ratio(x + mu)
    return log_density + math.log(min(difference, mu * descent) if difference > 0 else mu * descent)


def _gauss(x: Any) -> Any:
    """exp(-x^2 / 2) to full precision: x is split into a short part, whose square is exact, and a small rest."""
    short = np.round(x * 16) / 16
    return np.exp(-0.5 * short * short) * np.exp(-0.5 * (x - short) * (x + short))


def _erfcx(x: Any) -> Any:
    """exp(x^2) erfc(x) for x >= 0, by Horner's rule."""
    t = (x - _MIDDLE) / (x + _MIDDLE)
    value = np.full_like(t, _COEFFICIENTS[-1])
    for coefficient in _COEFFICIENTS[-2::-1]:
        value *= t
        value += coefficient
    return value / (1 + 2 * x)
