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

Where rounding would decide all the same, which is where losses are rare and large, `jumps` takes over.

The lattice is as fine as the answer needs: spacing h adds about rounds h^2 (slope + 1) / 12 to epsilon.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from .jumps import compose_jumps
from .loss import SLOPES
from .single import single_deltas, single_epsilon
from .spectra import UNIT, powers, spectrum
from .totals import Total, tilt_back
from .windows import LOG_CONVERSION, SPARED, STEADY, Rounds, fast_size, lattice_step, total_moments, window_around

ROUGHLY = 8.0  # how many times wider the lattice of a rough answer is
_LEAST = 1e-250  # delta that is looked at
_TRIES = 6  # lattices, each made for the epsilon that the one before gave
_NOISE_SHARE = 1e-5  # of delta that rounding may add
_DECISIVE = 1e-4  # the same, where it is worth the time to divide the losses, see `jumps`
_FAR = 64.0  # times what a lattice may add, while the answer is far off

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
        # At the steadiest slope that there is, and by far not enough: no other lattice helps.
        hopeless = share >= _FAR * _DECISIVE and total.unsteadiness >= limit
        if settled or stuck or hopeless or epsilon == 0:
            break
        if share >= allowed:
            limit, unsteadiness = total.unsteadiness - math.log(share / allowed) - 1, total.unsteadiness
        best, room = _saddle(rounds, epsilon)[0], 1.0
    decisive = share >= _DECISIVE * coarser**2 and epsilon > 0
    return _closer_by_jumps(rounds, delta, epsilon, coarser) if decisive else epsilon


def _closer_by_jumps(rounds: Rounds, delta: float, epsilon: float, coarser: float) -> float:
    """An epsilon at or below the one given, where rounding decided that one.

    Unless a rough answer is known, lattices are coarse until it is near; no lattice is tried twice.
    """
    wider, step = _FAR if coarser > 1 else coarser, 0.0
    for _ in range(_TRIES):
        total = compose_jumps(rounds, epsilon, delta, wider)
        if total is None:
            break
        answer, before = max(total.epsilon(delta), 0.0), epsilon
        epsilon = min(epsilon, answer)
        if epsilon == 0 or total.step == step or (answer > 0.8 * before and wider == coarser):
            break
        wider, step = coarser if answer > 0.8 * before else wider, total.step
    return epsilon


def delta_of(rounds: Rounds, epsilon: float) -> float:
    """The least delta that can be shown for `epsilon`, at most 1."""
    best, bound = _saddle(rounds, epsilon)
    first = min(math.exp(min(bound, 0.0)) + total_moments(rounds)[1], 1.0)
    if _alone(rounds):
        return min(first, float(single_deltas(rounds[0][0], np.array([epsilon]))[0]))
    if first < _LEAST:
        return first
    answer, limit = first, STEADY
    for _ in range(_TRIES):
        total = _compose(rounds, best, epsilon, answer, room=1.0, coarser=1.0, limit=limit)
        answer, before = min(answer, max(total.delta(epsilon), _LEAST)), answer
        share = total.noise_share(answer, epsilon)
        if share < _NOISE_SHARE or (limit < STEADY and answer > 0.99 * before):
            break
        limit = -math.inf  # the steadiest
    return answer if share < _DECISIVE else _delta_by_jumps(rounds, epsilon, answer)


def _delta_by_jumps(rounds: Rounds, epsilon: float, delta: float) -> float:
    """A delta at or below the one given, where rounding decided that one; lattices are coarse until it is near."""
    wider = _FAR
    for _ in range(2 * _TRIES):
        total = compose_jumps(rounds, epsilon, delta, wider)
        if total is None:
            break
        answer, before = max(total.delta(epsilon), _LEAST), delta
        delta = min(delta, answer)
        if answer > 0.5 * before:
            if wider == 1:
                break
            wider = 1.0
    return delta


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
    spectra = [(spectrum(direction, slope, tail_slope, step, size, spare), n) for direction, n in rounds]
    masses, per_point = powers(spectra, size)
    masses = np.roll(masses, -(first % size))
    log_moment = sum(number * one.log_moment for one, number in spectra)
    tail = sum(number * one.tail_log_moment for one, number in spectra)
    infinite = sum(number * one.infinite for one, number in spectra)

    # The weights of a sum over the lattice: their integral, and their greatest for the first point.
    weights = 1 / (slope * (slope + 1) * step) + 1 / (slope + 1)
    noise = per_point * weights
    start = first * step
    log_scale = log_moment - slope * epsilon
    log_scale += UNIT * (32 * count + 4 * abs(log_moment) + 4 * slope * abs(epsilon))
    np.maximum(masses, 0.0, out=masses)
    tilt_back(masses, slope, start - epsilon, step)
    above = math.exp(min(tail - tail_slope * (start + step * size), 0.0))
    lowest = max(start, epsilon - room / float(SLOPES[best]))
    return Total(start, step, slope, masses, epsilon, lowest, log_scale, noise, window.unsteadiness, infinite + above)
