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
from .single import single_deltas, single_epsilon
from .totals import Total, block_of
from .windows import LOG_CONVERSION, SPARED, STEADY, Rounds, fast_size, lattice_step, total_moments, window_around

ROUGHLY = 8.0  # how many times wider the lattice of a rough answer is
_TRIES = 6  # lattices, each made for the epsilon that the one before gave
_NOISE_SHARE = 1e-5  # of delta that rounding may add
_NEGLIGIBLE = 46.0  # frequencies below exp(-46) of the greatest are left out
_UNIT = float(np.finfo(np.float64).eps)

# The GNU allocator hands an array above a threshold back to the system as soon as it is freed, and the next one comes
# anew, page by page, which takes longer than most of the arithmetic here. Freeing one large array, never touched,
# raises the threshold to its size; elsewhere this does nothing.
np.empty(1 << 21)


def quick_epsilon_of(rounds: Rounds, delta: float) -> float:
    """A first epsilon, by the best order of the coarse Renyi curve. Valid by itself."""
    return _from_moments(rounds, delta)[0]


def _from_moments(rounds: Rounds, delta: float) -> tuple[float, int]:
    """That epsilon, and the index of its slope."""
    moments, infinite = total_moments(rounds)
    if infinite >= delta:
        return math.inf, len(SLOPES) - 1
    bounds = (moments + LOG_CONVERSION - math.log(delta - infinite)) / SLOPES
    best = int(np.argmin(bounds))
    return max(float(bounds[best]), 0.0), best


@lru_cache(maxsize=256)
def rough_epsilon_of(rounds: Rounds, delta: float) -> float:
    """An epsilon at or above `epsilon_of`, from a lattice so coarse that it takes a fraction of the time.

    Valid by itself; above the other one by a few parts in ten thousand.
    """
    epsilon, best = _from_moments(rounds, delta)
    if _alone(rounds):
        return min(epsilon, single_epsilon(rounds[0][0], delta))
    if epsilon == 0 or not math.isfinite(epsilon):
        return epsilon
    return _closer(rounds, delta, epsilon, best, room=12.0, coarser=ROUGHLY)


@lru_cache(maxsize=1024)
def epsilon_of(rounds: Rounds, delta: float) -> float:
    """The least epsilon that can be shown for `delta`; 0 if no loss need be conceded."""
    epsilon = rough_epsilon_of(rounds, delta)
    if _alone(rounds) or epsilon == 0 or not math.isfinite(epsilon):
        return epsilon
    return _closer(rounds, delta, epsilon, _saddle(rounds, epsilon)[0], room=1.0)


def _closer(rounds: Rounds, delta: float, epsilon: float, best: int, room: float, coarser: float = 1.0) -> float:
    """An epsilon at or below the one given, from a lattice made for it; another one if that shows it to be far off.

    Nor may rounding decide the answer: if it adds more than a little to delta, a steadier slope is taken.
    """
    limit, unsteadiness, allowed = STEADY, math.inf, _NOISE_SHARE * coarser**2
    for _ in range(_TRIES):
        total = _compose(rounds, best, epsilon, delta, room, coarser, limit)
        answer = max(total.epsilon(delta), 0.0)
        share = total.noise_share(delta, min(answer, epsilon))
        settled = answer > max(total.lowest, (0.8 if coarser == 1 else 0.5) * epsilon) and share < allowed
        stuck = answer > 0.99 * epsilon and total.unsteadiness >= unsteadiness
        epsilon = min(epsilon, answer)
        if settled or stuck or epsilon == 0:
            break
        if share >= allowed:
            limit, unsteadiness = total.unsteadiness - math.log(share / allowed) - 1, total.unsteadiness
        best, room = _saddle(rounds, epsilon)[0], 1.0
    return epsilon


def delta_of(rounds: Rounds, epsilon: float) -> float:
    """The least delta that can be shown for `epsilon`, at most 1."""
    best, bound = _saddle(rounds, epsilon)
    first = min(math.exp(min(bound, 0.0)) + total_moments(rounds)[1], 1.0)
    if _alone(rounds):
        return min(first, float(single_deltas(rounds[0][0], np.array([epsilon]))[0]))
    if first < 1e-250:
        return first
    answer, limit = first, STEADY
    for _ in range(_TRIES):
        total = _compose(rounds, best, epsilon, answer, room=1.0, coarser=1.0, limit=limit)
        answer, before = min(answer, total.delta(epsilon)), answer
        share = total.noise_share(answer, epsilon)
        if share < _NOISE_SHARE or (limit < STEADY and answer > 0.99 * before):
            break
        limit = -math.inf  # the steadiest
    return answer


def _alone(rounds: Rounds) -> bool:
    """Whether there is nothing to compose: a single round."""
    return len(rounds) == 1 and rounds[0][1] == 1


def _saddle(rounds: Rounds, epsilon: float) -> tuple[int, float]:
    """Index of the slope with the least bound on delta at `epsilon`, and the logarithm of that bound."""
    bounds = total_moments(rounds)[0] + LOG_CONVERSION - SLOPES * epsilon
    best = int(np.argmin(bounds))
    return best, float(bounds[best])


def _compose(
    rounds: Rounds, best: int, epsilon: float, delta: float, room: float, coarser: float, limit: float
) -> Total:
    """The total loss around `epsilon`, tilted by a slope not far from that with index `best`.

    `coarser` widens the lattice that many times, which raises the answer by its square times a few millionths.
    """
    count = sum(number for _, number in rounds)
    window = window_around(rounds, best, epsilon, delta, room, limit)
    slope, tail_slope = window.slope, window.tail_slope
    spare = 10.0 ** math.floor(math.log10(SPARED * delta / count))
    step = lattice_step(rounds, float(SLOPES[best]), epsilon, window.width, spare, coarser)
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
    sizes = np.exp(exponent[kept])
    phases = sum(number * one.phases[kept] for one, number in spectra)
    transform = np.zeros(size // 2 + 1, dtype=np.complex128)
    transform.real[kept] = sizes * np.cos(phases)
    transform.imag[kept] = sizes * np.sin(phases)
    masses = np.roll(np.fft.irfft(transform, size), -(first % size))

    errors = sum(number * (sizes / one.sizes[kept]).sum() for one, number in spectra)
    rounding = 8 * _UNIT * math.log2(size)
    per_point = rounding * 2 * (errors + sizes.sum()) / size + math.exp(-_NEGLIGIBLE)
    # The weights of a sum over the lattice: their integral, and their greatest for the first point.
    weights = 1 / (slope * (slope + 1) * step) + 1 / (slope + 1)
    noise = per_point * weights
    start = first * step
    log_scale = log_moment - slope * epsilon
    log_scale += _UNIT * (32 * count + 4 * abs(log_moment) + 4 * slope * abs(epsilon))
    np.maximum(masses, 0.0, out=masses)
    _tilt_back(masses, slope, start - epsilon, step)
    above = math.exp(min(tail - tail_slope * (start + step * size), 0.0))
    lowest = max(start, epsilon - room / float(SLOPES[best]))
    return Total(start, step, slope, masses, epsilon, lowest, log_scale, noise, window.unsteadiness, infinite + above)


def _tilt_back(masses: Array, slope: float, start: float, step: float) -> None:
    """Multiply the mass at each x by exp(-slope x), in place, with x = start, start + step, ...

    By an exponential for each block times one for each place in a block, which costs far fewer of them.
    """
    block = block_of(len(masses))
    table = masses.reshape(-1, block)
    rows = -slope * (start + step * block * np.arange(len(table)))
    table *= np.exp(np.clip(rows, -700, 600))[:, None]
    table *= np.exp(np.maximum(-slope * step * np.arange(block), -700))


@dataclass(frozen=True, eq=False)
class _Spectrum:
    sizes: Array
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
    exponents = slope * masses.losses - log_moment
    with np.errstate(divide="ignore"):  # beyond exp(600) the mass is next to nothing, and the product still is not
        tilted = np.exp(exponents + np.log(masses.mass)) if exponents[-1] > 600 else masses.mass * np.exp(exponents)
    # Summed pairwise, so that the total is one to a few units in the last place.
    total = float(tilted.sum())
    tilted /= total
    log_moment += math.log(total)
    turns = -(-len(tilted) // size)
    folded = np.zeros(turns * size)
    folded[: len(tilted)] = tilted
    folded = np.roll(folded.reshape(turns, size).sum(axis=0), -negative)
    transform = np.fft.rfft(folded)
    sizes = np.minimum(np.abs(transform), 1.0)
    with np.errstate(divide="ignore"):
        log_sizes = np.log(sizes)
    return _Spectrum(sizes, log_sizes, np.angle(transform), float(log_moment), float(tail_log_moment), masses.infinite)
