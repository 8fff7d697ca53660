"""Epsilon and delta of many rounds from the privacy loss of each: powers of a Fourier transform, always an upper bound.

Losses add up, so that masses convolve. Before convolving, each round's masses are tilted by exp(slope L) and normalised
(K is the logarithm of the normaliser). With x the total loss and p~ its tilted masses,

    delta(epsilon) = exp(K - slope epsilon) sum of p~(x) exp(-slope (x - epsilon)) (1 - exp(-(x - epsilon)))

over x > epsilon, whatever the slope. The factor in front is the Chernoff bound; at the slope that makes it least, the
tilted total is centred near epsilon. The sum is then a moderate number which float64 resolves to many digits, even for
delta = 10^-15.

What is charged to delta, so that the answer stays an upper bound:
- losses beyond the last lattice point of a round, as infinite;
- total losses above the window of the transform (Chernoff bound from the masses in use). Those below the window wrap
  around to its upper end, where they count although they should not: that errs upwards by itself;
- rounding: a transform of length n errs by at most a small multiple of log2(n) units in the last place of the total
  mass, a power multiplies that by the number of rounds, K and the tails err by a few units a round.

The lattice is as fine as the answer needs: spacing h adds about rounds h^2 (slope + 1) / 12 to epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .halves import Array
from .loss import SLOPES, Direction, masses_on, reach
from .windows import LOG_CONVERSION, SPARED, Rounds, fast_size, lattice_step, total_moments, window_around

_NEGLIGIBLE = 46.0  # frequencies below exp(-46) of the greatest are left out
_UNIT = float(np.finfo(np.float64).eps)


def epsilon_from_moments(rounds: Rounds, delta: float) -> tuple[float, int]:
    """A first epsilon, by the best order of the coarse Renyi curve, and the index of its slope. Valid by itself."""
    moments, infinite = total_moments(rounds)
    if infinite >= delta:
        return math.inf, len(SLOPES) - 1
    bounds = (moments + LOG_CONVERSION - math.log(delta - infinite)) / SLOPES
    best = int(np.argmin(bounds))
    return max(float(bounds[best]), 0.0), best


def epsilon_of(rounds: Rounds, delta: float) -> float:
    """The least epsilon that can be shown for `delta`; 0 if no loss need be conceded."""
    first, best = epsilon_from_moments(rounds, delta)
    if first == 0 or not math.isfinite(first):
        return first
    room = 6.0
    for _ in range(4):
        total = _compose(rounds, best, first, delta, room)
        epsilon = total.epsilon(delta)
        if epsilon > total.start or total.start <= 0:
            break
        room *= 4
    return min(first, max(epsilon, 0.0))


def delta_of(rounds: Rounds, epsilon: float) -> float:
    """The least delta that can be shown for `epsilon`, at most 1."""
    moments, infinite = total_moments(rounds)
    bounds = moments + LOG_CONVERSION - SLOPES * epsilon
    best = int(np.argmin(bounds))
    first = min(math.exp(min(float(bounds[best]), 0.0)) + infinite, 1.0)
    if first < 1e-250:
        return first
    total = _compose(rounds, best, epsilon, first, room=1.0)
    return min(first, total.delta(epsilon))


@dataclass(frozen=True, eq=False)
class _Total:
    """The tilted total loss on `start`, `start + step`, ..., scaled so that all numbers are near one."""

    start: float
    step: float
    slope: float
    masses: Array  # tilted back around `centre`
    centre: float
    log_scale: float  # delta = exp(log_scale) * (sums of masses)
    noise: float  # of such a sum at `centre`, through rounding
    charged: float  # to delta outright

    def epsilon(self, delta: float) -> float:
        """The least lattice-interpolated epsilon with delta(epsilon) <= delta; infinite if there is none."""
        target = (delta - self.charged) * math.exp(min(-self.log_scale, 700.0))
        if target <= 0:
            return math.inf
        last = self._first_within(target)
        if last == len(self.masses):
            return math.inf
        upper = self.start + self.step * last
        if last == 0:
            return upper
        lower = upper - self.step
        gaps = self.step * np.arange(1, len(self.masses) - last + 1, dtype=np.float64)
        weight = float(np.sum(self.masses[last:] * np.exp(-gaps)))
        excess = self._sum_at(lower) - target
        rise = math.log1p(excess / weight) if weight > 0 and excess > 0 else self.step
        return min(lower + max(rise, 0.0), upper)

    def _first_within(self, target: float) -> int:
        """Index of the first lattice point at which delta is met, by bisection from a good guess."""
        low, high = -1, len(self.masses)  # not met, met
        losses: Array = self.start + self.step * np.arange(len(self.masses), dtype=np.float64)
        relative = losses - self.centre
        if self.step * len(self.masses) < 600:  # else the next lines would overflow, and the bisection is longer
            tails = np.cumsum(self.masses[::-1])[::-1]
            shrunk = np.cumsum((self.masses * np.exp(-relative))[::-1])[::-1]
            curve = tails[1:] - np.exp(relative[:-1]) * shrunk[1:] + self._noise_at(losses[:-1])
            unmet = np.nonzero(curve > target)[0]
            guess = int(unmet[-1]) + 1 if len(unmet) else 0
            # These sums have rounding errors; those of `_sum_at` do not accumulate.
            for index in (guess, guess - 1, guess + 1):
                if low < index < high:
                    met = self._sum_at(float(losses[index])) <= target
                    low, high = (low, index) if met else (index, high)
        while high - low > 1:
            middle = (low + high) // 2
            met = self._sum_at(float(losses[middle])) <= target
            low, high = (low, middle) if met else (middle, high)
        return high

    def delta(self, epsilon: float) -> float:
        """The delta at an epsilon inside the window."""
        return math.exp(min(self.log_scale, 700.0)) * self._sum_at(epsilon) + self.charged

    def _sum_at(self, epsilon: float) -> float:
        first = max(math.floor((epsilon - self.start) / self.step) - 1, 0)
        losses = self.start + self.step * np.arange(first, len(self.masses))
        gaps = np.maximum(losses - epsilon, 0.0)
        return float(np.sum(self.masses[first:] * -np.expm1(-gaps))) + float(self._noise_at(np.array([epsilon]))[0])

    def _noise_at(self, losses: Array) -> Array:
        result: Array = self.noise * np.exp(np.clip(-self.slope * (losses - self.centre), -600, 600))
        return result


def _compose(rounds: Rounds, best: int, epsilon: float, delta: float, room: float) -> _Total:
    """The total loss around `epsilon`, tilted by a slope at or below that with index `best`."""
    count = sum(number for _, number in rounds)
    window = window_around(rounds, best, epsilon, delta, room)
    slope, tail_slope = window.slope, window.tail_slope
    spare = 10.0 ** math.floor(math.log10(SPARED * delta / count))
    step = lattice_step(rounds, slope, epsilon, window.width, spare)
    size = fast_size(window.width / step + 2)
    first = math.floor(window.bottom / step)
    spectra = [(_spectrum(direction, slope, tail_slope, step, size, spare), n) for direction, n in rounds]

    exponent, log_moment, tail, infinite = np.zeros(size // 2 + 1), 0.0, 0.0, 0.0
    for one, number in spectra:
        exponent += number * one.log_sizes
        log_moment += number * one.log_moment
        tail += number * one.tail_log_moment
        infinite += number * one.infinite
    (kept,) = np.nonzero(exponent > -_NEGLIGIBLE)
    phases = sum(number * one.phases[kept] for one, number in spectra)
    transform = np.zeros(size // 2 + 1, dtype=np.complex128)
    transform[kept] = np.exp(exponent[kept] + 1j * phases)
    masses = np.roll(np.fft.irfft(transform, size), -(first % size))

    errors = sum(number * np.exp(exponent[kept] - one.log_sizes[kept]).sum() for one, number in spectra)
    rounding = 8 * _UNIT * math.log2(size)
    per_point = rounding * 2 * (errors + np.exp(exponent[kept]).sum()) / size + math.exp(-_NEGLIGIBLE)
    # The weights of a sum over the lattice: their integral, and their greatest for the first point.
    weights = 1 / (slope * (slope + 1) * step) + 1 / (slope + 1)
    noise = per_point * weights
    start = first * step
    relative = start + step * np.arange(size) - epsilon
    log_scale = log_moment - slope * epsilon
    log_scale += _UNIT * (32 * count + 4 * abs(log_moment) + 4 * slope * abs(epsilon))
    masses = np.maximum(masses, 0.0) * np.exp(np.clip(-slope * relative, -700, 600))
    above = math.exp(min(tail - tail_slope * (start + step * size), 0.0))
    return _Total(start, step, slope, masses, epsilon, log_scale, noise, infinite + above)


@dataclass(frozen=True, eq=False)
class _Spectrum:
    log_sizes: Array
    phases: Array
    log_moment: float
    tail_log_moment: float
    infinite: float


@lru_cache(maxsize=24)
def _spectrum(direction: Direction, slope: float, tail_slope: float, step: float, size: int, spare: float) -> _Spectrum:
    """The transform of one round's tilted masses: the costly part, kept, since it serves any number of rounds."""
    positive, negative = (math.ceil(far / step) + 1 for far in reach(direction, spare, spare))
    above: Array = step * np.arange(positive + 1, dtype=np.float64)
    below: Array = step * np.arange(negative + 1, dtype=np.float64)
    masses = masses_on(direction, above, below)
    log_moment, tail_log_moment = masses.log_moments(np.array([slope, tail_slope]))
    with np.errstate(divide="ignore"):
        tilted = np.exp(np.log(masses.mass) + slope * masses.losses - log_moment)
    folded = np.bincount(np.arange(-negative, positive + 1) % size, weights=tilted, minlength=size)
    transform = np.fft.rfft(folded)
    with np.errstate(divide="ignore"):
        log_sizes = np.minimum(np.log(np.abs(transform)), 0.0)
    return _Spectrum(log_sizes, np.angle(transform), float(log_moment), float(tail_log_moment), masses.infinite)
