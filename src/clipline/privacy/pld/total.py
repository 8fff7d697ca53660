"""The total loss of many rounds on a lattice, from powers of Fourier transforms, and epsilon and delta read off it.

Losses of independent rounds add up, so that their masses convolve and their transforms multiply. Each result comes with
a bound on what rounding did to it. The tilt is explained in `compose`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..numerics import Array
from .discretised import DiscretisedLoss, discretise
from .one_round import Direction, loss_range

TRUNCATED_SHARE = 1e-7  # share of delta that each truncation may use up
NEGLIGIBLE = 46.0  # frequencies below exp(-46) of the greatest are left out
MACHINE_EPSILON = float(np.finfo(np.float64).eps)


def fft_rounding(size: int) -> float:
    """How far a transform of `size` points may err at each of them, over the sum of its input; generous."""
    return 8 * MACHINE_EPSILON * math.log2(size)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The transform of one round's masses, tilted and scaled to a total of one."""

    magnitudes: Array
    log_magnitudes: Array
    phases: Array
    log_moment: float  # log E[exp(tilt L)]: what the tilted masses were divided by
    tail_log_moment: float  # the same at the tilt that bounds what lies above the window
    infinity_mass: float


@lru_cache(maxsize=24)
def spectrum(
    direction: Direction, tilt: float, tail_tilt: float, step: float, size: int, truncation: float
) -> Spectrum:
    """The transform of one round. It is expensive and kept, since it serves any number of rounds."""
    loss, zero = on_lattice(direction, step, truncation)
    return spectrum_of(loss, zero, tilt, tail_tilt, size)


def on_lattice(direction: Direction, step: float, truncation: float) -> tuple[DiscretisedLoss, int]:
    """One round's masses on the multiples of `step`, except for `truncation` at either end, and the index of loss 0."""
    positive, negative = (math.ceil(far / step) + 1 for far in loss_range(direction, truncation, truncation))
    above: Array = step * np.arange(positive + 1, dtype=np.float64)
    below: Array = step * np.arange(negative + 1, dtype=np.float64)
    return discretise(direction, above, below), negative


def spectrum_of(loss: DiscretisedLoss, zero: int, tilt: float, tail_tilt: float, size: int) -> Spectrum:
    """The transform of masses on a lattice whose point with index `zero` is loss 0."""
    log_moment, tail_log_moment = loss.log_moments(np.array([tilt, tail_tilt]))
    exponents = tilt * loss.losses - log_moment
    with np.errstate(divide="ignore"):  # exp would overflow beyond 600, but there the masses are tiny: add logarithms
        tilted = np.exp(exponents + np.log(loss.mass)) if exponents[-1] > 600 else loss.mass * np.exp(exponents)
    # NumPy sums pairwise, so that the total is one to a few units in the last place.
    total = float(tilted.sum())
    tilted /= total
    log_moment += math.log(total)
    transform = np.fft.rfft(wrapped(tilted, zero, size))
    magnitudes = np.minimum(np.abs(transform), 1.0)
    with np.errstate(divide="ignore"):
        log_magnitudes = np.log(magnitudes)
    phases = np.angle(transform)
    return Spectrum(magnitudes, log_magnitudes, phases, float(log_moment), float(tail_log_moment), loss.infinity_mass)


def wrapped(masses: Array, zero: int, size: int) -> Array:
    """The masses with indices taken modulo `size`, the one with index `zero` first."""
    turns = -(-len(masses) // size)
    table = np.zeros(turns * size)
    table[: len(masses)] = masses
    return np.roll(table.reshape(turns, size).sum(axis=0), -zero)


def convolve(spectra: Sequence[tuple[Spectrum, int]], size: int) -> tuple[Array, float]:
    """The masses of the sum of all rounds modulo `size`, loss 0 first, and how far each of them may err."""
    exponent = np.zeros(size // 2 + 1)
    for one, number in spectra:
        exponent += number * one.log_magnitudes
    (kept,) = np.nonzero(exponent > -NEGLIGIBLE)
    magnitudes = np.exp(exponent[kept])
    phases = sum(number * one.phases[kept] for one, number in spectra)
    transform = np.zeros(size // 2 + 1, dtype=np.complex128)
    transform.real[kept] = magnitudes * np.cos(phases)
    transform.imag[kept] = magnitudes * np.sin(phases)
    errors = sum(number * (magnitudes / one.magnitudes[kept]).sum() for one, number in spectra)
    per_point = fft_rounding(size) * 2 * (errors + magnitudes.sum()) / size + math.exp(-NEGLIGIBLE)
    return np.fft.irfft(transform, size), float(per_point)


def tilted_sum(
    spectra: Sequence[tuple[Spectrum, int]], size: int, first: int, step: float, tilt: float, centre: float
) -> tuple[Array, float, float]:
    """The `masses`, `log_scale` and `rounding` of a `TotalLoss` that starts at the lattice point with index `first`."""
    masses, per_point = convolve(spectra, size)
    masses = np.maximum(np.roll(masses, -(first % size)), 0.0)
    untilt(masses, tilt, first * step - centre, step)
    log_moment = sum(number * one.log_moment for one, number in spectra)
    count = sum(number for _, number in spectra)
    log_scale = log_moment - tilt * centre
    log_scale += MACHINE_EPSILON * (32 * count + 4 * abs(log_moment) + 4 * tilt * abs(centre))
    # A rounding error at every point of the lattice adds at most this many times itself to a sum over the lattice: the
    # integral of the weights, and their greatest value for the first point.
    return masses, log_scale, per_point * (1 / (tilt * (tilt + 1) * step) + 1 / (tilt + 1))


@dataclass(frozen=True, eq=False)
class TotalLoss:
    """The total loss at `start`, `start + step`, ..., scaled so that the sums below are near one."""

    start: float
    step: float
    tilt: float
    masses: Array  # untilted relative to `centre`: times exp(-tilt (x - centre))
    centre: float
    lowest: float  # the least epsilon that the window is made for
    log_scale: float  # delta = exp(log_scale) * (sum of masses times their weights) + charged
    rounding: float  # what rounding may add to such a sum at `centre`
    rounding_gain: float  # log of what rounding errors are multiplied by, up to a constant that all tilts share
    charged: float  # added to delta as it is: truncated masses, and errors that are bounded for all sums at once

    def epsilon(self, delta: float) -> float:
        """The least lattice-interpolated epsilon with delta(epsilon) <= delta; infinite if there is none."""
        target = self._target(delta)
        if target <= 0:
            return math.inf
        last, before = self._first_within(target)
        if last == len(self.masses):
            return math.inf
        upper = self.start + self.step * last
        if last == 0:
            return upper
        lower = upper - self.step
        gaps = self.step * np.arange(1, len(self.masses) - last + 1, dtype=np.float64)
        weight = float(np.sum(self.masses[last:] * np.exp(-gaps)))
        excess = before - target
        rise = math.log1p(excess / weight) if weight > 0 and excess > 0 else self.step
        return min(lower + max(rise, 0.0), upper)

    def rounding_share(self, delta: float, epsilon: float) -> float:
        """About which share of delta rounding takes up at `epsilon`."""
        return self._rounding_at(epsilon) / max(self._target(delta), 1e-300)

    def _target(self, delta: float) -> float:
        """The sum of weighted masses that gives `delta`."""
        return (delta - self.charged) * math.exp(min(-self.log_scale, 700.0))

    def _first_within(self, target: float) -> tuple[int, float]:
        """Index of the first lattice point whose sum is at most `target`, and the sum at the point before it.

        By bisection that starts from a guess.
        """
        low, high = -1, len(self.masses)  # above the target, within it
        before = math.inf
        guess = self._guess(target)
        nearby = [guess, guess - 1, guess + 1]  # two of them are nearly always enough
        while high - low > 1:
            index = nearby.pop(0) if nearby else (low + high) // 2
            if low < index < high:
                value = self._sum_at(self.start + self.step * index)
                if value <= target:
                    high = index
                else:
                    low, before = index, value
        return high, before

    def _guess(self, target: float) -> int:
        """The index that `_first_within` looks for, up to rounding: running sums have more of it than `_sum_at`.

        From the top down, block by block, until the sum exceeds the target, and then within that block.
        """
        table = self.masses.reshape(-1, block_of(len(self.masses)))
        block = table.shape[1]
        if self.step * block > 600:  # the next lines would divide by zero: leave it to bisection
            return 0
        decay = np.exp(-self.step * np.arange(block + 1))
        sums, shrunk = table.sum(axis=1).tolist(), (table @ decay[:block]).tolist()
        tail = rest = 0.0
        for row in range(len(table) - 1, -1, -1):
            loss = self.start + self.step * block * row
            above, beyond = tail + sums[row], shrunk[row] + float(decay[block]) * rest
            if above - beyond + self._rounding_at(loss) > target:
                masses, fall = table[row, ::-1], decay[block - 1 :: -1]  # from the top of the block down
                curve = tail + np.cumsum(masses) - (decay[block] * rest + np.cumsum(masses * fall)) / fall
                return row * block + block - int(np.argmax(curve + self._rounding_at(loss) > target))
            tail, rest = above, beyond
        return 0

    def delta(self, epsilon: float) -> float:
        """The delta at an epsilon inside the window."""
        return math.exp(min(self.log_scale, 700.0)) * self._sum_at(epsilon) + self.charged

    def _sum_at(self, epsilon: float) -> float:
        """The sum of masses times 1 - exp(epsilon - x) over x > epsilon, raised by what rounding may have cost."""
        first = max(math.floor((epsilon - self.start) / self.step) - 1, 0)
        gaps = np.maximum((self.start - epsilon) + self.step * np.arange(first, len(self.masses)), 0.0)
        return float(np.sum(self.masses[first:] * -np.expm1(-gaps))) + self._rounding_at(epsilon)

    def _rounding_at(self, loss: float) -> float:
        return self.rounding * math.exp(min(max(-self.tilt * (loss - self.centre), -600.0), 600.0))


def fast_size(least: float) -> int:
    """The least size of a fast transform from `least` on: a power of two, or five, six or seven eighths of one."""
    power = 1 << max(math.ceil(math.log2(least)), 6)
    return next(size for size in (5 * power // 8, 6 * power // 8, 7 * power // 8, power) if size >= least)


def block_of(size: int) -> int:
    """The greatest power of two that divides `size`, up to 512."""
    return min(size & -size, 512)


def untilt(masses: Array, tilt: float, start: float, step: float) -> None:
    """Multiply the mass at each x by exp(-tilt x), in place, with x = start, start + step, ...

    One exponential for each block times one for each place in a block: far fewer than one for each mass.
    """
    block = block_of(len(masses))
    table = masses.reshape(-1, block)
    rows = -tilt * (start + step * block * np.arange(len(table)))
    table *= np.exp(np.clip(rows, -700, 600))[:, None]
    table *= np.exp(np.maximum(-tilt * step * np.arange(block), -700))
