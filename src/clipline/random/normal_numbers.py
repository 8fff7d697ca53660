"""Standard normal numbers from random 64-bit words, the way NumPy makes them, and a cryptographic source of them.

NumPy's `Generator.standard_normal` is a ziggurat (Marsaglia and Tsang, 2000): it cuts the bell curve into 256 layers of
equal area. A word holds a layer (8 bits), a sign (1 bit) and a whole number of 52 bits; whole number times the layer's
unit is the normal number, unless it falls outside the part of the layer that is certainly under the curve (1.5% of
words). Then further words decide, or make a number of the tail, which goes to 12.2 deviations: beyond that not
even the rarest pair of words, of 53 bits each, is accepted.

`from_words` does this with arrays instead of one number after the other and gives the same numbers to the last bit,
so words of any generator can be used: those of OpenSSL here, those of a GPU in `engine/gpu/kernels/noise.py`.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError

try:
    from ssl import RAND_bytes as _random_bytes  # AES-256 in counter mode, 20 times as fast as os.urandom
except ImportError:  # a Python without OpenSSL
    _random_bytes = os.urandom

LAYERS = 256
WHOLE = (1 << 52) - 1  # mask of the 52 bits of a word that are scaled to the number
_AT_ONCE = 1 << 14  # numbers made together by `SystemNormal`: their arrays fit into a core's cache


@dataclass(frozen=True, eq=False)
class Layers:
    """The ziggurat: layer k reaches from 0 to `2^52 * units[k]`, layer 0 is the base with the tail."""

    units: NDArray[np.float64]  # (512,) by layer and sign: the number is the unit times the word's whole number
    limits: NDArray[np.int64]  # (512,) the same: whole numbers below it are under the curve for certain
    heights: NDArray[np.float64]  # (256,) of the curve exp(-x^2 / 2) at the end of each layer
    tail: float  # where the tail begins


def words_for(count: int) -> int:
    """How many words surely give `count` numbers: 1.022 a number on average, with a chance below 1e-30 of more."""
    return count + count // 32 + 512


def from_words(words: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """(count,): what `standard_normal(count)` of a NumPy generator that gives these words would draw.

    `words_for(count)` words are enough. They are all independent and uniform, or the numbers are not normal.
    """
    layers, integers = numpy_layers(), words.view(np.int64)
    layer = integers & 511  # and sign
    whole = (integers >> 9) & WHOLE
    values = layers.units.take(layer)
    values *= whole
    slow = np.flatnonzero(whole >= layers.limits.take(layer))
    ends, accepted = _attempts(layers, words, slow, values)
    begun = _not_used_before(slow, ends)
    is_number = np.ones(len(words) + 1, np.bool_)
    is_number[slow[begun & ~accepted]] = False
    is_number[slow[begun] + 1] = False  # used up
    for attempt in np.flatnonzero(begun & (ends > slow + 2)).tolist():  # in the tail
        is_number[slow[attempt] + 1 : ends[attempt]] = False
    numbers = values[is_number[:-1]][:count]
    assert len(numbers) == count, "too few words"
    return numbers


def _attempts(
    layers: Layers, words: NDArray[np.uint64], places: NDArray[np.intp], values: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Of attempts that need more words: the first word behind each, and whether it is accepted. Tails go to `values`.

    A point beside the certain part of its layer gets its height from the next word, and must be under the curve.
    """
    layer = (words[places] & np.uint64(255)).astype(np.intp)
    low, high = layers.heights[layer], layers.heights[layer - 1]
    height = (high - low) * uniform(words.take(places + 1, mode="clip")) + low
    ends, accepted = places + 2, height < np.exp(-0.5 * values[places] ** 2)
    for number in np.flatnonzero(layer == 0).tolist():
        accepted[number] = True
        values[places[number]], ends[number] = _tail(layers.tail, words, int(places[number]))
    return ends, accepted


def _tail(begin: float, words: NDArray[np.uint64], place: int) -> tuple[float, int]:
    """The number of an attempt in the tail, and the first word behind it (Marsaglia, 1964)."""
    for pair in range(place + 1, len(words) - 1, 2):
        first, second = uniform(words[pair : pair + 2]).tolist()
        beyond, height = -1 / begin * math.log1p(-first), -math.log1p(-second)  # not NumPy's, which rounds otherwise
        if height + height > beyond * beyond:
            negative = int(words[place]) >> 17 & 1
            return -(begin + beyond) if negative else begin + beyond, pair + 2
    return math.nan, len(words)  # the words have ended, behind the numbers that are wanted


def _not_used_before(places: NDArray[np.intp], ends: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which attempts take place: those whose first word was not used up by one before."""
    begun = np.ones(len(places), np.bool_)
    if len(places) > 1:
        for number in (1 + np.flatnonzero(np.maximum.accumulate(ends)[:-1] > places[1:])).tolist():
            last = number - 1
            while not begun[last]:
                last -= 1
            begun[number] = ends[last] <= places[number]
    return begun


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Multiples of 2^-53 in [0, 1)."""
    return np.asarray((words >> np.uint64(11)) * 2.0**-53)


@cache
def numpy_layers() -> Layers:
    """The layers of the NumPy that is installed, found by looking what it makes of chosen words, and checked."""
    drawn = _numpy_with_chosen_words()
    units = np.array([drawn((1 << 40) << 9 | layer)[0] * 2.0**-40 for layer in range(LAYERS)])
    ends = units * 2.0**52
    limits = np.zeros(LAYERS, np.int64)
    for layer, guess in enumerate([ends[-1] / ends[0], 0.0, *(ends[1:-1] / ends[2:])]):
        low, high = max(-1, int(guess * 2**52) - 64), min(1 << 52, int(guess * 2**52) + 64)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if drawn(middle << 9 | layer)[1] == 1 else (low, middle)
        limits[layer] = high
    heights = np.exp(-0.5 * ends**2)
    heights[0] = 1.0
    # Layers of equal area, each with its certain part: whatever NumPy's numbers are, these make the normal law.
    areas = ends * np.concatenate([heights[-1:], heights[:-1] - heights[1:]])
    certain = np.concatenate([[ends[-1] / ends[0], 0.0], ends[1:-1] / ends[2:]]) * 2.0**52
    if not (np.allclose(areas, areas[0], rtol=1e-12) and np.abs(limits - certain).max() < 64):
        raise RunError(
            f"NumPy {np.__version__} does not draw normal numbers by the ziggurat that clipline knows: install a "
            "version that pyproject.toml names, or give a seed and FastParts(device_noise=False)"
        )
    return Layers(np.concatenate([units, -units]), np.concatenate([limits, limits]), heights, float(ends[-1]))


def _numpy_with_chosen_words() -> Callable[[int], tuple[float, int]]:
    """A function: what NumPy draws if the first word is this one, and how many words that took."""
    bits = np.random.SFC64(0)
    generator, state = np.random.Generator(bits), bits.state

    def drawn(word: int) -> tuple[float, int]:
        state["state"]["state"][:] = word, 0, 0, 0  # its next word is the sum of the first, second and last
        bits.state = state
        return float(generator.standard_normal()), int(bits.state["state"]["state"][3])  # the last counts words

    return drawn


class SystemNormal:
    """Independent standard normal numbers that nobody can work out or draw again.

    The words come from OpenSSL's generator (AES-256 in counter mode, NIST SP 800-90A), which the operating system's
    entropy keys and which is in the standard library; without OpenSSL, from the operating system itself.
    """

    def standard_normal(
        self, size: int | None = None, *, out: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """(size,) new numbers, or as many as `out` holds, put there. May be called by several threads at once."""
        numbers = np.empty(1 if size is None else size) if out is None else out
        for start in range(0, len(numbers), _AT_ONCE):
            part = numbers[start : start + _AT_ONCE]
            part[:] = from_words(self.words(words_for(len(part))), len(part))
        return numbers

    def words(self, count: int) -> NDArray[np.uint64]:
        """(count,) new words of 64 random bits, read-only."""
        return np.frombuffer(_random_bytes(8 * count), np.uint64)

    def part(self, number: int) -> SystemNormal:
        """A generator for one part of many numbers, beside those of the other parts."""
        return self


class KeyedNormal(SystemNormal):
    """The same from a key of 256 bits: equal keys give equal numbers, and nobody can work them out without the key.

    Words are those of SHAKE-256 (FIPS 202) of the key, the part and the number of the call: an extendable output is a
    pseudo-random function of a key that stands first. Each part is for one thread.
    """

    def __init__(self, key: bytes, part: int = 0) -> None:
        self.key, self._part, self._calls = key, part, 0

    def words(self, count: int) -> NDArray[np.uint64]:
        """(count,) further words, read-only."""
        text = self.key + struct.pack("<QQ", self._part, self._calls)
        self._calls += 1
        return np.frombuffer(hashlib.shake_256(text).digest(8 * count), "<u8")

    def part(self, number: int) -> KeyedNormal:
        """A generator of other numbers for each part."""
        return KeyedNormal(self.key, number)
