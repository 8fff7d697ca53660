"""Exact draws of the discrete Gaussian: whole numbers k with probability in proportion to exp(-k^2 / (2 stddev^2)).

The rejection sampler of Canonne, Kamath and Steinke (2020), with arrays. It needs coins that fall with probability
exp(-g). Such a coin is the comparison of a uniform number with exp(-g), which nearly always is decided by the number's
first 64 bits, in float64. Where it is not, more bits are drawn and compared in decimal arithmetic. So the law is
exact: it is no float64 approximation, and nothing is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal, localcontext
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from ..errors import check_number
from .normal_numbers import SystemNormal

Words = Callable[[int], NDArray[np.uint64]]  # a number -> as many independent uniform words

LARGEST_STDDEV = 2.0**40  # the bound on rounding below holds up to here, and every number fits into an int64
_AT_ONCE = 1 << 16  # candidates made together: their arrays fit into a core's cache
# Relative error of exp(-g) in float64. Where exp(-g) is above 2^-64, |Y - stddev^2 / t| is below 10 stddev and Y below
# 12 stddev: g is off by less than 2^-43. For smaller exp(-g) only the words 0 and 1 matter, and they count as close.
_CLOSE = 2.0**-40


def words_of(rng: np.random.Generator | SystemNormal) -> Words:
    """The words of a generator of noise."""
    if isinstance(rng, SystemNormal):
        return rng.words
    return lambda count: rng.integers(0, 1 << 64, count, dtype=np.uint64)


def discrete_gaussian(count: int, stddev: float, words: Words) -> NDArray[np.int64]:
    """(count,) independent draws. `stddev` is taken as the exact rational number that a float64 is."""
    check_number("stddev", stddev, above=0, at_most=LARGEST_STDDEV, way_out="choose another scale of the numbers")
    made, have = [np.empty(0, np.int64)], 0
    while have < count:
        made.append(_candidates(min(_AT_ONCE, int((count - have) * 2.6) + 64), stddev, words))
        have += len(made[-1])
    return np.concatenate(made)[:count]


def _candidates(count: int, stddev: float, words: Words) -> NDArray[np.int64]:
    """What `count` tries give, each accepted or not whatever the others are.

    A try is a discrete Laplace number of scale t, a power of two near `stddev`: a sign, and U + t V with P(U = u) in
    proportion to exp(-u / t) for u < t, and P(V >= v) = exp(-v).
    """
    variance = Fraction(stddev) ** 2
    scale = 1 << max(0, round(math.log2(stddev)))
    first = words(count)
    negative = (first & np.uint64(1)).astype(np.bool_)
    low = ((first >> np.uint64(1)) & np.uint64(scale - 1)).astype(np.int64)
    kept = coins(low / float(scale), lambda i: Fraction(int(low[i]), scale), words)
    low, negative = low[kept], negative[kept]
    size = low + scale * geometric(len(low), words)
    kept = ~(negative & (size == 0))  # zero has one sign
    size, negative = size[kept], negative[kept]
    centre = variance / scale
    far = size - float(centre)
    kept = coins(far * far / (2 * float(variance)), lambda i: (int(size[i]) - centre) ** 2 / (2 * variance), words)
    size, negative = size[kept], negative[kept]
    signed: NDArray[np.int64] = np.where(negative, -size, size)
    return signed


def coins(g: NDArray[np.float64], exact: Callable[[int], Fraction], words: Words) -> NDArray[np.bool_]:
    """True with probability exp(-g), exactly, for each g; `exact(i)` is the i-th of them without rounding."""
    drawn = words(len(g))
    chance, number = np.exp(-g), drawn * 2.0**-64
    falls = number < chance
    for i in np.flatnonzero(np.abs(number - chance) <= chance * _CLOSE + 2.0**-64).tolist():
        falls[i] = _Uniform(int(drawn[i]), words).is_below_exp(exact(i))
    return falls


def geometric(count: int, words: Words) -> NDArray[np.int64]:
    """(count,) numbers V with P(V >= v) = exp(-v): how many of exp(-1), exp(-2), ... are above a uniform number."""
    drawn = words(count)
    place = np.searchsorted(_POWERS, drawn, side="right")  # so many of them are at or below the word
    numbers = (len(_POWERS) - place).astype(np.int64)
    for i in np.flatnonzero((drawn == _POWERS[np.maximum(place - 1, 0)]) | (drawn < _POWERS[0])).tolist():
        uniform = _Uniform(int(drawn[i]), words)
        while uniform.is_below_exp(Fraction(int(numbers[i]) + 1)):
            numbers[i] += 1
    return numbers


class _Uniform:
    """One uniform number in [0, 1): its first 64 bits are known, more are drawn as they are needed, and kept."""

    def __init__(self, word: int, words: Words) -> None:
        self._bits, self._value, self._words = 64, word, words

    def is_below_exp(self, g: Fraction) -> bool:
        """Whether it is below exp(-g), g >= 0."""
        while g > 0:
            # In every step one rounding, each of less than 2 units of the last digit, since g exp(-g) < 1.
            context = Context(prec=self._bits // 3 + 30)
            with localcontext(context):
                chance = (-Decimal(g.numerator) / Decimal(g.denominator)).exp()
                error = Decimal(10) ** (5 - context.prec)
                unit = Decimal(2) ** -self._bits
                if (self._value + 1) * unit + error < chance:
                    return True
                if self._value * unit - error > chance:
                    return False
            self._value = self._value << 64 | int(self._words(1)[0])
            self._bits += 64
        return True


def _powers() -> NDArray[np.uint64]:
    with localcontext(Context(prec=60)):
        return np.array([int(Decimal(-v).exp() * 2**64) for v in range(44, 0, -1)], np.uint64)


_POWERS = _powers()  # of exp(-1), ascending, in units of 2^-64, rounded down: the smallest is 1
