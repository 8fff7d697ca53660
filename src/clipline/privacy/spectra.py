"""Transforms of one round's losses on a lattice, and their powers, with a bound on what rounding does to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .halves import Array
from .loss import Direction, Masses, masses_on, reach

NEGLIGIBLE = 46.0  # frequencies below exp(-46) of the greatest are left out
UNIT = float(np.finfo(np.float64).eps)


def rounding_of(size: int) -> float:
    """How far a transform of `size` may err at each point, in units of the sum of what is transformed, generously."""
    return 8 * UNIT * math.log2(size)


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The transform of one round's tilted masses, with total one."""

    sizes: Array
    log_sizes: Array
    phases: Array
    log_moment: float
    tail_log_moment: float
    infinite: float


@lru_cache(maxsize=24)
def spectrum(direction: Direction, slope: float, tail_slope: float, step: float, size: int, spare: float) -> Spectrum:
    """The transform of one round's tilted masses: the costly part, kept, since it serves any number of rounds."""
    masses, negative = on_lattice(direction, step, spare)
    return spectrum_of(masses, negative, slope, tail_slope, size)


def on_lattice(direction: Direction, step: float, spare: float) -> tuple[Masses, int]:
    """One round's masses on the multiples of `step`, but for `spare` at either end, and the index of loss 0."""
    positive, negative = (math.ceil(far / step) + 1 for far in reach(direction, spare, spare))
    above: Array = step * np.arange(positive + 1, dtype=np.float64)
    below: Array = step * np.arange(negative + 1, dtype=np.float64)
    return masses_on(direction, above, below), negative


def spectrum_of(masses: Masses, zero: int, slope: float, tail_slope: float, size: int) -> Spectrum:
    """The transform of masses of which the one with index `zero` is at loss 0."""
    log_moment, tail_log_moment = masses.log_moments(np.array([slope, tail_slope]))
    exponents = slope * masses.losses - log_moment
    with np.errstate(divide="ignore"):  # beyond exp(600) the mass is next to nothing, and the product still is not
        tilted = np.exp(exponents + np.log(masses.mass)) if exponents[-1] > 600 else masses.mass * np.exp(exponents)
    # Summed pairwise, so that the total is one to a few units in the last place.
    total = float(tilted.sum())
    tilted /= total
    log_moment += math.log(total)
    transform = np.fft.rfft(folded(tilted, zero, size))
    sizes = np.minimum(np.abs(transform), 1.0)
    with np.errstate(divide="ignore"):
        log_sizes = np.log(sizes)
    angles = np.angle(transform)
    return Spectrum(sizes, log_sizes, angles, float(log_moment), float(tail_log_moment), masses.infinite)


def folded(masses: Array, zero: int, size: int) -> Array:
    """The same around a circle of `size` places, of which the first is at loss 0."""
    turns = -(-len(masses) // size)
    table = np.zeros(turns * size)
    table[: len(masses)] = masses
    return np.roll(table.reshape(turns, size).sum(axis=0), -zero)


def powers(spectra: Sequence[tuple[Spectrum, int]], size: int) -> tuple[Array, float]:
    """The total of all rounds around the circle, and how far each of its points may err."""
    exponent = np.zeros(size // 2 + 1)
    for one, number in spectra:
        exponent += number * one.log_sizes
    (kept,) = np.nonzero(exponent > -NEGLIGIBLE)
    sizes = np.exp(exponent[kept])
    phases = sum(number * one.phases[kept] for one, number in spectra)
    transform = np.zeros(size // 2 + 1, dtype=np.complex128)
    transform.real[kept] = sizes * np.cos(phases)
    transform.imag[kept] = sizes * np.sin(phases)
    errors = sum(number * (sizes / one.sizes[kept]).sum() for one, number in spectra)
    per_point = rounding_of(size) * 2 * (errors + sizes.sum()) / size + math.exp(-NEGLIGIBLE)
    return np.fft.irfft(transform, size), float(per_point)
