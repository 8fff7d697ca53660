"""Tails of the normal distribution, to about fourteen digits, without SciPy, whose import takes longer than an answer.

For x >= 0 the function (1 + 2 x) exp(x^2) erfc(x) is smooth and lies between 1 and 1.2 or so; in
t = (x - 3.75) / (x + 3.75), which runs from -1 to 1, a polynomial of degree 25 meets it to float64 (the substitution is
that of Shepherd and Laframboise 1981; the coefficients were computed with 40 digits for this file).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def tail(x: Array) -> Array:
    """The probability that a standard normal exceeds each x; infinities are welcome."""
    distance = np.minimum(np.abs(x), _GREATEST)
    upper: Array = 0.5 * _gauss(distance) * _erfcx(distance * _ROOT_HALF)
    return np.where(x >= 0, upper, 1 - upper)


def mills(x: float) -> float:
    """(1 - Phi(x)) / phi(x), for x above about -37: the tail over the density."""
    at = abs(x)
    ratio = math.sqrt(math.pi / 2) * float(_erfcx(at * _ROOT_HALF))
    if x >= 0:
        return ratio
    return math.sqrt(2 * math.pi) / float(_gauss(np.float64(at))) - ratio  # the two tails add up to one


def _gauss(x: Any) -> Any:
    """exp(-x^2 / 2) to full precision: the square of a short number is exact, and the rest is small."""
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
