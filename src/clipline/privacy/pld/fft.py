"""Fourier transforms of one round's losses on a lattice, and the sum of many rounds from their powers.

Losses of independent rounds add up, so that their masses convolve and their transforms multiply. Each result comes with
a bound on what rounding did to it.
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
