"""Epsilon and delta where rare, large losses decide, which no tilt can bring into reach: losses divided in two.

At tiny rates nearly every round reveals next to nothing, and delta is the chance of a loss far above epsilon. Its tail
is too heavy for any tilt, and beside the mass of the bulk, which is one, rounding hides a delta of 10^-12. Hence the
losses of a round are divided at a cut, into small ones b and large ones r: measures, not probabilities. With n rounds
and powers that are convolutions

    (b + r)^n = b^n + ((b + r)^n - b^n)

Both parts are measures, so that delta is the sum of two. The first, where no loss is large, has a light tail: it is
tilted and transformed as in `composition`. The second, where at least one is, is not tilted. With B and R the
transforms of b and r, its own is

    B^n expm1(n log1p(R / B))

which is as small as the chance of a large loss, and so are its rounding errors. Let |r| be the mass of r, which bounds
R, and M = |B| + |r|; let B and R be off by at most e and e |r|. The derivatives of (B + R)^n - B^n in B and in R are at
most n (n - 1) M^(n-2) |r| and n M^(n-1), so that it is off by at most e (n |r| / M) (1 + n / M) M^n; the elementary
functions add less than as much again, since e is dozens of units in the last place. By Parseval's equation that bounds
the Euclidean norm of the errors of all masses together; the inverse transform adds e times the norm of what it
transforms; by Cauchy and Schwarz delta is off by at most that norm times the norm of the weights
1 - exp(-(x - epsilon)). For several kinds of rounds n |r| / M and n / M are sums over them, and M^n is a product.

Everything else is charged as in `composition`. Where the cut is affects how much is charged, and nothing else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .halves import Array
from .loss import SLOPES, Masses, coarse_masses, reach
from .spectra import NEGLIGIBLE, UNIT, folded, on_lattice, powers, rounding_of, spectrum_of
from .totals import Total, tilt_back
from .windows import SPARED, Rounds, fast_size

_Complex = NDArray[np.complex128]
_MOST_POINTS = 1 << 18
_FURTHEST = 600.0  # exponents that stay clear of overflow
_ERROR = 1e-4  # of epsilon, that the lattice may add, about


@dataclass(frozen=True)
class _Cut:
    """Where losses are divided, and the slope that the small ones are tilted by."""

    loss: float
    slope: float
    steepness: float  # about how fast the logarithm of delta falls with epsilon


def compose_jumps(rounds: Rounds, epsilon: float, delta: float, coarser: float) -> Total | None:
    """The total loss, for an answer near `epsilon`; None if the losses cannot be divided like that.

    `coarser` multiplies what the lattice may add.
    """
    count = sum(number for _, number in rounds)
    spare = 10.0 ** math.floor(math.log10(SPARED * delta / count))
    bottom, top, tail_slope = _span(rounds, math.log(SPARED * delta), spare)
    near = max(min(epsilon, top), 1e-4 * (top - bottom))
    cut = _where(rounds, near, delta, top - bottom)
    if cut is None:
        return None
    slope, step = cut.slope, _step(rounds, near, cut.steepness, top - bottom, coarser)
    size = fast_size((top - bottom) / step + 2)
    first = math.floor(bottom / step)
    parts = [(_divided(*on_lattice(direction, step, spare), cut.loss), n) for direction, n in rounds]

    jumps = _with_jumps(parts, size)
    if jumps is None:
        return None
    large, norm = jumps
    spectra = [(spectrum_of(one.small, one.zero, slope, tail_slope, size), n) for one, n in parts]
    masses, per_point = powers(spectra, size)
    masses, large = (np.maximum(np.roll(part, -(first % size)), 0.0) for part in (masses, large))
    start = first * step
    log_moment = sum(n * one.log_moment for one, n in spectra)
    log_scale = log_moment - slope * near + UNIT * (32 * count + 4 * abs(log_moment) + 4 * slope * near)
    if log_scale > _FURTHEST:
        return None
    log_scale = max(log_scale, -_FURTHEST)  # more than it is, which is safe, so that nothing below overflows
    tilt_back(masses, slope, start - near, step)
    masses += large * math.exp(32 * count * UNIT - log_scale)

    tail = sum(n * float(one.whole.log_moments(np.array([tail_slope]))[0]) for one, n in parts)
    above = math.exp(min(tail - tail_slope * (start + step * size), 0.0))
    unsure = norm * math.sqrt(size) * -math.expm1(-step * size)
    charged = sum(n * one.whole.infinite for one, n in parts) + above + unsure
    weights = 1 / (slope * (slope + 1) * step) + 1 / (slope + 1)
    return Total(start, step, slope, masses, near, start, log_scale, per_point * weights, 0.0, charged)


@dataclass(frozen=True, eq=False)
class _Divided:
    whole: Masses
    small: Masses
    large: Array  # in the same places
    zero: int  # index of loss 0


def _divided(masses: Masses, zero: int, cut: float) -> _Divided:
    small = masses.losses <= cut
    part = Masses(masses.losses, np.where(small, masses.mass, 0.0), 0.0)
    return _Divided(masses, part, np.where(small, 0.0, masses.mass), zero)


def _with_jumps(parts: list[tuple[_Divided, int]], size: int) -> tuple[Array, float] | None:
    """The masses of the second part, and a bound on the norm of their errors; None where R may outweigh B."""
    log_size, relative, count = (np.zeros(size // 2 + 1) for _ in range(3))
    exponent, power = (np.zeros(size // 2 + 1, dtype=np.complex128) for _ in range(2))
    for one, number in parts:
        b, r = (np.fft.rfft(folded(masses, one.zero, size)) for masses in (one.small.mass, one.large))
        mass = float(one.large.sum())
        at_most = np.abs(b) + mass * (1 + 1e-9)
        if np.abs(b).min() <= 4 * mass:
            return None
        log_size += number * np.log(np.minimum(at_most, 1.0))
        relative += number * mass / at_most
        count += number / at_most
        exponent += number * np.log(b)
        power += number * _log1p(r / b)
    bound = relative * np.exp(log_size)
    kept = log_size > -NEGLIGIBLE
    transform = np.where(kept, np.exp(np.where(kept, exponent, 0)) * _expm1(np.where(kept, power, 0)), 0)
    error = np.where(kept, 2 * rounding_of(size) * bound * (2 + count), bound)
    norm = math.sqrt(2 * float(np.sum(error**2)) / size)
    return np.fft.irfft(transform, size), norm


def _log1p(w: _Complex) -> _Complex:
    """The complex logarithm of 1 + w for |w| < 1/2, to a relative error."""
    result: _Complex = 0.5 * np.log1p(2 * w.real + w.real**2 + w.imag**2) + 1j * np.arctan2(w.imag, 1 + w.real)
    return result


def _expm1(v: _Complex) -> _Complex:
    """The complex exponential less one, to a relative error where it is small."""
    result: _Complex = (
        np.expm1(v.real) * np.cos(v.imag) - 2 * np.sin(v.imag / 2) ** 2 + 1j * np.exp(v.real) * np.sin(v.imag)
    )
    return result


def _span(rounds: Rounds, log_chance: float, spare: float) -> tuple[float, float, float]:
    """Total losses, the lower at most 0, between which all lie but for exp(`log_chance`) at either end; a tail's slope.

    As far as one round goes on the lattice: beyond it losses are infinite above and raised below.
    """
    up, down = np.zeros(len(SLOPES)), np.zeros(len(SLOPES))
    for direction, number in rounds:
        masses, (positive, negative) = coarse_masses(direction), reach(direction, spare, spare)
        inside = masses.losses <= positive
        losses, mass = np.maximum(masses.losses[inside], -negative), masses.mass[inside]
        up += number * Masses(losses, mass, 0.0).log_moments(SLOPES)
        down += number * Masses(-losses, mass, 0.0).log_moments(SLOPES)
    tops, bottoms = (up - log_chance) / SLOPES, (down - log_chance) / SLOPES
    return min(-float(bottoms.min()), 0.0), float(tops.min()), float(SLOPES[int(tops.argmin())])


def _where(rounds: Rounds, epsilon: float, delta: float, width: float) -> _Cut | None:
    """The cut and the slope with the least rounding, of those tried on a coarse lattice; None if there are none."""
    slopes = SLOPES[(SLOPES * epsilon > 0.1) & (SLOPES * epsilon < _FURTHEST)]
    if not len(slopes):
        return None
    places = epsilon * np.logspace(-3, 2, 61)
    small, chance, density = np.zeros((len(slopes), len(places))), np.zeros(len(places)), 0.0
    for direction, number in rounds:
        masses = coarse_masses(direction)
        losses, mass = masses.losses, masses.mass
        last = np.searchsorted(losses, places, side="right")
        sums = np.cumsum(np.exp(np.minimum(np.multiply.outer(slopes, losses), _FURTHEST)) * mass, axis=1)
        small += number * np.log(sums[:, last - 1])
        chance += number * np.append(np.cumsum(mass[::-1])[::-1], 0.0)[last]
        density += number * float(np.sum((mass * np.exp(np.minimum(epsilon - losses, 0.0)))[losses > epsilon]))
    small[np.multiply.outer(slopes, places) > _FURTHEST] = np.inf
    bounds = small - slopes[:, None] * epsilon  # by Chernoff, on the first part of delta
    step = epsilon / 1000
    tilted = bounds - (np.log(slopes) + np.log1p(slopes))[:, None] - math.log(step)
    plain = np.log(np.maximum(chance, 1e-300)) + 0.5 * math.log(width / step) + math.log(-math.expm1(-width))
    # Small losses whose total is beyond the window come back below its top, enlarged by the tilt.
    beyond = np.append(small - slopes[:, None] * (width + epsilon), np.full((1, len(places)), np.inf), axis=0)
    wrapped = np.minimum.accumulate(beyond[:0:-1])[::-1] + slopes[:, None] * width
    rounding = math.log(500 * UNIT * sum(number for _, number in rounds))
    excess = np.logaddexp(np.logaddexp(tilted, plain) + rounding, wrapped)
    row, column = np.unravel_index(int(np.argmin(excess)), excess.shape)
    steepest = int(np.argmin(bounds[:, column]))
    share = math.exp(min(float(bounds[steepest, column]) - math.log(delta), 0.0))
    steepness = density / delta + float(slopes[steepest]) * share + 1 / epsilon
    return _Cut(float(places[column]), float(slopes[row]), steepness)


def _step(rounds: Rounds, epsilon: float, steepness: float, width: float, coarser: float) -> float:
    """The spacing h that adds about `_ERROR` of epsilon: a loss l gets a variance of |l| h, or of h^2 / 6 if larger.

    `steepness` is how fast log delta falls with epsilon. Continuous in all of it, so that epsilon does not jump.
    """
    steps = epsilon / 50 * 2.0 ** -np.arange(24.0, 0.0, -1)
    added = np.zeros(len(steps))
    for direction, number in rounds:
        masses = coarse_masses(direction)
        spread = np.minimum(np.abs(masses.losses) * steps[:, None], steps[:, None] ** 2 / 6)
        added += number * (spread @ masses.mass)
    error = added * (steepness + 1) / 2 / epsilon
    wanted = math.exp(np.interp(math.log(_ERROR * coarser), np.log(error), np.log(steps)))
    return max(wanted, 1.5 * width / _MOST_POINTS)
