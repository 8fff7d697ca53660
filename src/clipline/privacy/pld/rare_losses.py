"""Epsilon and delta where rare, large losses decide, which no tilt can resolve: small and large losses apart.

At tiny rates nearly every round reveals next to nothing, and delta is the chance of a loss far above epsilon. The tail
of the loss is then too heavy for any tilt. Without a tilt the bulk has mass one, and its rounding errors hide a delta
of 10^-12. Hence the losses of a round are divided at a cut into small ones b and large ones r, which are measures and
not probabilities. With n rounds, and powers that are convolutions,

    (b + r)^n = b^n + ((b + r)^n - b^n)

Both parts are measures, so that delta is the sum of two terms. In the first part no loss is large. Its tail is light,
and it is tilted and transformed as in `compose`. In the second part at least one loss is large. It is not tilted. With
B and R the transforms of b and r, its transform is

    B^n expm1(n log1p(R / B))

which is as small as the chance of a large loss, and so are its rounding errors. Let |r| be the mass of r, which bounds
R, and M = |B| + |r|; let B and R be off by at most e and e |r|. The derivatives of (B + R)^n - B^n in B and in R are at
most n (n - 1) M^(n-2) |r| and n M^(n-1), so that it is off by at most e (n |r| / M) (1 + n / M) M^n. The elementary
functions add less than as much again, since e is dozens of units in the last place. By Parseval's equation this bounds
the Euclidean norm of the errors of all masses together. The inverse transform adds e times the norm of what it
transforms. By Cauchy and Schwarz delta is off by at most that norm times the norm of the weights
1 - exp(-(x - epsilon)). For several kinds of rounds n |r| / M and n / M are sums over them, and M^n is a product.

Everything else is charged as in `compose`. The place of the cut affects how much is charged, and nothing else.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..numerics import Array
from .discretised import TILTS, DiscretisedLoss, coarse_loss
from .one_round import Rounds, loss_range
from .total import (
    MACHINE_EPSILON,
    NEGLIGIBLE,
    TRUNCATED_SHARE,
    TotalLoss,
    fast_size,
    fft_rounding,
    on_lattice,
    spectrum_of,
    tilted_sum,
    wrapped,
)

_Complex = NDArray[np.complex128]
_MOST_POINTS = 1 << 18
_MOST_EXPONENT = 600.0  # well below overflow
_LATTICE_ERROR = 1e-4  # about which share of epsilon the lattice may add
# One round's losses, those of them up to the cut, the index of loss 0, and the number of such rounds.
_Part = tuple[DiscretisedLoss, DiscretisedLoss, int, int]


def compose_rare_losses(rounds: Rounds, epsilon: float, delta: float, coarseness: float) -> TotalLoss | None:
    """The total loss, for an answer near `epsilon`; None if no cut divides the losses well.

    `coarseness` multiplies what the lattice may add to epsilon.
    """
    count = sum(number for _, number in rounds)
    truncation = 10.0 ** math.floor(math.log10(TRUNCATED_SHARE * delta / count))
    bottom, top, tail_tilt = _span(rounds, math.log(TRUNCATED_SHARE * delta), truncation)
    near = max(min(epsilon, top), 1e-4 * (top - bottom))
    chosen = _choose_cut(rounds, near, delta, top - bottom)
    if chosen is None:
        return None
    cut, tilt, steepness = chosen
    step = _lattice_step(rounds, near, steepness, top - bottom, coarseness)
    size = fast_size((top - bottom) / step + 2)
    first = math.floor(bottom / step)
    parts: list[_Part] = []
    for direction, n in rounds:
        whole, zero = on_lattice(direction, step, truncation)
        small = DiscretisedLoss(whole.losses, np.where(whole.losses <= cut, whole.mass, 0.0), 0.0)
        parts.append((whole, small, zero, n))
    with_large = _with_a_large_loss(parts, size)
    if with_large is None:
        return None
    large, norm = with_large
    spectra = [(spectrum_of(small, zero, tilt, tail_tilt, size), n) for _, small, zero, n in parts]
    masses, log_scale, rounding = tilted_sum(spectra, size, first, step, tilt, near)
    if log_scale > _MOST_EXPONENT:
        return None
    log_scale = max(log_scale, -_MOST_EXPONENT)  # larger is safe, and keeps the next line from overflowing
    start = first * step
    masses += np.maximum(np.roll(large, -(first % size)), 0.0) * math.exp(32 * count * MACHINE_EPSILON - log_scale)

    tail = sum(n * float(whole.log_moments(np.array([tail_tilt]))[0]) for whole, _, _, n in parts)
    above = math.exp(min(tail - tail_tilt * (start + step * size), 0.0))
    rounding_of_large = norm * math.sqrt(size) * -math.expm1(-step * size)
    charged = sum(n * whole.infinity_mass for whole, _, _, n in parts) + above + rounding_of_large
    return TotalLoss(start, step, tilt, masses, near, start, log_scale, rounding, 0.0, charged)


def _with_a_large_loss(parts: list[_Part], size: int) -> tuple[Array, float] | None:
    """The masses of the second part, and a bound on the norm of their errors; None where R may outweigh B."""
    log_size, relative, count = (np.zeros(size // 2 + 1) for _ in range(3))
    exponent, power = (np.zeros(size // 2 + 1, dtype=np.complex128) for _ in range(2))
    for whole, small, zero, number in parts:
        large = whole.mass - small.mass
        b, r = (np.fft.rfft(wrapped(masses, zero, size)) for masses in (small.mass, large))
        mass = float(large.sum())
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
    transform = np.where(kept, np.exp(np.where(kept, exponent, 0)) * np.expm1(np.where(kept, power, 0)), 0)
    error = np.where(kept, 2 * fft_rounding(size) * bound * (2 + count), bound)
    norm = math.sqrt(2 * float(np.sum(error**2)) / size)
    return np.fft.irfft(transform, size), norm


def _log1p(w: _Complex) -> _Complex:
    """The complex logarithm of 1 + w for |w| < 1/2, with a small relative error."""
    result: _Complex = 0.5 * np.log1p(2 * w.real + w.real**2 + w.imag**2) + 1j * np.arctan2(w.imag, 1 + w.real)
    return result


def _span(rounds: Rounds, log_chance: float, truncation: float) -> tuple[float, float, float]:
    """(bottom, top, tilt that gave top): all total losses but exp(`log_chance`) at either end lie between. bottom <= 0.

    Each round is taken as far as its lattice goes. Beyond it losses are infinite above and raised below.
    """
    up, down = np.zeros(len(TILTS)), np.zeros(len(TILTS))
    for direction, number in rounds:
        loss, (positive, negative) = coarse_loss(direction), loss_range(direction, truncation, truncation)
        inside = loss.losses <= positive
        losses, mass = np.maximum(loss.losses[inside], -negative), loss.mass[inside]
        up += number * DiscretisedLoss(losses, mass, 0.0).log_moments(TILTS)
        down += number * DiscretisedLoss(-losses, mass, 0.0).log_moments(TILTS)
    tops, bottoms = (up - log_chance) / TILTS, (down - log_chance) / TILTS
    return min(-float(bottoms.min()), 0.0), float(tops.min()), float(TILTS[int(tops.argmin())])


def _choose_cut(rounds: Rounds, epsilon: float, delta: float, width: float) -> tuple[float, float, float] | None:
    """(cut, tilt of what is below it, about how fast log delta falls with epsilon), with the least rounding.

    Of those tried on a coarse lattice; None if there are none.
    """
    tilts = TILTS[(TILTS * epsilon > 0.1) & (TILTS * epsilon < _MOST_EXPONENT)]
    if not len(tilts):
        return None
    cuts = epsilon * np.logspace(-3, 2, 61)
    small, chance, density = np.zeros((len(tilts), len(cuts))), np.zeros(len(cuts)), 0.0
    for direction, number in rounds:
        loss = coarse_loss(direction)
        losses, mass = loss.losses, loss.mass
        last = np.searchsorted(losses, cuts, side="right")
        sums = np.cumsum(np.exp(np.minimum(np.multiply.outer(tilts, losses), _MOST_EXPONENT)) * mass, axis=1)
        small += number * np.log(sums[:, last - 1])
        chance += number * np.append(np.cumsum(mass[::-1])[::-1], 0.0)[last]
        density += number * float(np.sum((mass * np.exp(np.minimum(epsilon - losses, 0.0)))[losses > epsilon]))
    small[np.multiply.outer(tilts, cuts) > _MOST_EXPONENT] = np.inf
    bounds = small - tilts[:, None] * epsilon  # by Chernoff, on the first part of delta
    step = epsilon / 1000
    tilted = bounds - (np.log(tilts) + np.log1p(tilts))[:, None] - math.log(step)
    plain = np.log(np.maximum(chance, 1e-300)) + 0.5 * math.log(width / step) + math.log(-math.expm1(-width))
    # Small losses whose total lies above the window wrap around below its top, enlarged by the tilt.
    beyond = np.append(small - tilts[:, None] * (width + epsilon), np.full((1, len(cuts)), np.inf), axis=0)
    wrapping = np.minimum.accumulate(beyond[:0:-1])[::-1] + tilts[:, None] * width
    rounding = math.log(500 * MACHINE_EPSILON * sum(number for _, number in rounds))
    excess = np.logaddexp(np.logaddexp(tilted, plain) + rounding, wrapping)
    row, column = np.unravel_index(int(np.argmin(excess)), excess.shape)
    steepest = int(np.argmin(bounds[:, column]))
    share = math.exp(min(float(bounds[steepest, column]) - math.log(delta), 0.0))
    steepness = density / delta + float(tilts[steepest]) * share + 1 / epsilon
    return float(cuts[column]), float(tilts[row]), steepness


def _lattice_step(rounds: Rounds, epsilon: float, steepness: float, width: float, coarseness: float) -> float:
    """The spacing h that adds about `_LATTICE_ERROR` of epsilon: a loss l gets a variance of min(|l| h, h^2 / 6).

    `steepness` is how fast log delta falls with epsilon. Continuous in all arguments, so that epsilon does not jump.
    """
    steps = epsilon / 50 * 2.0 ** -np.arange(24.0, 0.0, -1)
    added = np.zeros(len(steps))
    for direction, number in rounds:
        loss = coarse_loss(direction)
        spread = np.minimum(np.abs(loss.losses) * steps[:, None], steps[:, None] ** 2 / 6)
        added += number * (spread @ loss.mass)
    error = added * (steepness + 1) / 2 / epsilon
    wanted = math.exp(np.interp(math.log(_LATTICE_ERROR * coarseness), np.log(error), np.log(steps)))
    return max(wanted, 1.5 * width / _MOST_POINTS)
