"""Epsilon and delta of many rounds from the privacy loss of each: powers of a Fourier transform, always an upper bound.

Losses add up, so that masses convolve. Before they are convolved, each round's masses are tilted by exp(tilt L) and
normalised (K is the logarithm of the normaliser). With x the total loss and p~ its tilted masses,

    delta(epsilon) = exp(K - tilt epsilon) sum of p~(x) exp(-tilt (x - epsilon)) (1 - exp(-(x - epsilon)))

over x > epsilon, whatever the tilt. The factor in front is the Chernoff bound. At the tilt that makes it least the
tilted total is centred near epsilon. The sum is then a moderate number, which float64 resolves to many digits even for
delta = 10^-15.

What is charged to delta, so that the answer stays an upper bound:
- losses beyond the last lattice point of a round, as infinite;
- total losses above the window of the transform, by a Chernoff bound from the masses in use. Those below the window
  wrap around to its upper end, where they count although they should not: that errs upwards by itself;
- rounding: a transform of length n errs by at most a small multiple of log2(n) units in the last place of the total
  mass, a power multiplies that by the number of rounds, and K and the tails err by a few units a round.

Where rounding would still dominate the answer, `rare_losses` takes over: that is where losses are rare and large.

The lattice is as fine as the answer needs: a spacing h adds about rounds h^2 (tilt + 1) / 12 to epsilon.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..numerics import Array
from .discretised import TILTS, coarse_log_moments
from .one_round import Rounds, loss_range, one_round_deltas, one_round_epsilon
from .rare_losses import compose_rare_losses
from .total import TRUNCATED_SHARE, TotalLoss, fast_size, spectrum, tilted_sum

_ROUGH = 8.0  # how many times wider the lattice of a rough answer is
_LEAST_DELTA = 1e-250  # no smaller delta is computed
_TRIES = 6  # lattices, each made for the epsilon that the one before gave
_ROUNDING_SHARE = 1e-5  # of delta that rounding may take up
_DECISIVE_SHARE = 1e-4  # from this share on it is worth the time to use `rare_losses`
_FAR = 64.0  # times more error that a lattice may have while the answer is far off

LOG_CONVERSION: Array = -np.log1p(TILTS) - TILTS * np.log1p(1 / TILTS)  # Canonne, Kamath, Steinke 2020
# Windows with a log-rounding gain up to this are tried first. A larger gain cannot lower epsilon either: rounding is
# charged to delta, so that a gain only makes the answer looser.
ACCEPTED_GAIN = 10.0
_MOST_POINTS = 1 << 19
_DOWNWARDS: Array = np.linspace(0.0, 1.0, 65)


def quick_epsilon_of(rounds: Rounds, delta: float) -> float:
    """A first epsilon, by the best order of the coarse Renyi curve. Valid by itself."""
    return _from_moments(rounds, delta)[0]


def _from_moments(rounds: Rounds, delta: float) -> tuple[float, int]:
    """That epsilon, and the index of its tilt."""
    moments, infinity_mass = total_moments(rounds)
    if infinity_mass >= delta:
        return math.inf, len(TILTS) - 1
    bounds = (moments + LOG_CONVERSION - math.log(delta - infinity_mass)) / TILTS
    best = int(np.argmin(bounds))
    return max(float(bounds[best]), 0.0), best


@lru_cache(maxsize=256)
def rough_epsilon_of(rounds: Rounds, delta: float) -> float:
    """An epsilon at or above `epsilon_of`, from a lattice so coarse that it takes a fraction of the time.

    Valid by itself; larger by a few parts in ten thousand.
    """
    epsilon, best = _from_moments(rounds, delta)
    if _is_single_round(rounds):
        return min(epsilon, one_round_epsilon(rounds[0][0], delta))
    if epsilon == 0 or not math.isfinite(epsilon):
        return epsilon
    return _refine(rounds, delta, epsilon, best, margin=12.0, coarseness=_ROUGH)


@lru_cache(maxsize=1024)
def epsilon_of(rounds: Rounds, delta: float) -> float:
    """The least epsilon that can be shown for `delta`; 0 if delta alone covers everything."""
    epsilon = rough_epsilon_of(rounds, delta)
    if _is_single_round(rounds) or epsilon == 0 or not math.isfinite(epsilon):
        return epsilon
    return _refine(rounds, delta, epsilon, _saddle_point(rounds, epsilon)[0], margin=1.0)


def _refine(rounds: Rounds, delta: float, epsilon: float, best: int, margin: float, coarseness: float = 1.0) -> float:
    """An epsilon at or below the one given, from a lattice made for it, or from further ones if it was far off.

    If rounding takes up more than a small share of delta, a tilt with a smaller rounding gain is tried.
    """
    gain_limit, last_gain, allowed = ACCEPTED_GAIN, math.inf, _ROUNDING_SHARE * coarseness**2
    for _ in range(_TRIES):
        total = _compose(rounds, best, epsilon, delta, margin, coarseness, gain_limit)
        answer = max(total.epsilon(delta), 0.0)
        share = total.rounding_share(delta, min(answer, epsilon))
        settled = answer > max(total.lowest, (0.8 if coarseness == 1 else 0.5) * epsilon) and share < allowed
        stuck = answer > 0.99 * epsilon and total.rounding_gain >= last_gain
        epsilon = min(epsilon, answer)
        # The tilt with the least gain was used, and rounding still takes up far too much: no other lattice helps.
        hopeless = share >= _FAR * _DECISIVE_SHARE and total.rounding_gain >= gain_limit
        if settled or stuck or hopeless or epsilon == 0:
            break
        if share >= allowed:
            gain_limit, last_gain = total.rounding_gain - math.log(share / allowed) - 1, total.rounding_gain
        best, margin = _saddle_point(rounds, epsilon)[0], 1.0
    decisive = share >= _DECISIVE_SHARE * coarseness**2 and epsilon > 0
    return _refine_rare(rounds, delta, epsilon, coarseness) if decisive else epsilon


def _refine_rare(rounds: Rounds, delta: float, epsilon: float, coarseness: float) -> float:
    """An epsilon at or below the one given, by `rare_losses`, where rounding decided that one.

    Unless a rough answer is known, lattices are coarse until the answer is near; no lattice is tried twice.
    """
    current, step = _FAR if coarseness > 1 else coarseness, 0.0
    for _ in range(_TRIES):
        total = compose_rare_losses(rounds, epsilon, delta, current)
        if total is None:
            break
        answer, before = max(total.epsilon(delta), 0.0), epsilon
        epsilon = min(epsilon, answer)
        if epsilon == 0 or total.step == step or (answer > 0.8 * before and current == coarseness):
            break
        current, step = coarseness if answer > 0.8 * before else current, total.step
    return epsilon


def delta_of(rounds: Rounds, epsilon: float) -> float:
    """The least delta that can be shown for `epsilon`, at most 1."""
    best, bound = _saddle_point(rounds, epsilon)
    first = min(math.exp(min(bound, 0.0)) + total_moments(rounds)[1], 1.0)
    if _is_single_round(rounds):
        return min(first, float(one_round_deltas(rounds[0][0], np.array([epsilon]))[0]))
    if first < _LEAST_DELTA:
        return first
    answer, gain_limit = first, ACCEPTED_GAIN
    for _ in range(_TRIES):
        total = _compose(rounds, best, epsilon, answer, margin=1.0, coarseness=1.0, gain_limit=gain_limit)
        answer, before = min(answer, max(total.delta(epsilon), _LEAST_DELTA)), answer
        share = total.rounding_share(answer, epsilon)
        if share < _ROUNDING_SHARE or (gain_limit < ACCEPTED_GAIN and answer > 0.99 * before):
            break
        gain_limit = -math.inf  # take the tilt with the least gain
    return answer if share < _DECISIVE_SHARE else _delta_rare(rounds, epsilon, answer)


def _delta_rare(rounds: Rounds, epsilon: float, delta: float) -> float:
    """A delta at or below the one given, by `rare_losses`, where rounding decided that one.

    Lattices are coarse until the answer is near.
    """
    coarseness = _FAR
    for _ in range(2 * _TRIES):
        total = compose_rare_losses(rounds, epsilon, delta, coarseness)
        if total is None:
            break
        answer, before = max(total.delta(epsilon), _LEAST_DELTA), delta
        delta = min(delta, answer)
        if answer > 0.5 * before:
            if coarseness == 1:
                break
            coarseness = 1.0
    return delta


def _is_single_round(rounds: Rounds) -> bool:
    """Whether there is nothing to compose."""
    return len(rounds) == 1 and rounds[0][1] == 1


def _saddle_point(rounds: Rounds, epsilon: float) -> tuple[int, float]:
    """Index of the tilt with the least bound on delta at `epsilon`, and the logarithm of that bound."""
    bounds = total_moments(rounds)[0] + LOG_CONVERSION - TILTS * epsilon
    best = int(np.argmin(bounds))
    return best, float(bounds[best])


def _compose(
    rounds: Rounds, best: int, epsilon: float, delta: float, margin: float, coarseness: float, gain_limit: float
) -> TotalLoss:
    """The total loss around `epsilon`, with a tilt not far from the one with index `best`.

    `coarseness` widens the lattice that many times, which raises the answer by its square times a few millionths.
    """
    count = sum(number for _, number in rounds)
    window = window_around(rounds, best, epsilon, delta, margin, gain_limit)
    tilt, tail_tilt = window.tilt, window.tail_tilt
    truncation = 10.0 ** math.floor(math.log10(TRUNCATED_SHARE * delta / count))
    step = lattice_step(rounds, float(TILTS[best]), epsilon, window.width, truncation, coarseness)
    size = fast_size(window.width / step + 2)
    first = math.floor(window.bottom / step)
    spectra = [(spectrum(direction, tilt, tail_tilt, step, size, truncation), n) for direction, n in rounds]
    masses, log_scale, rounding = tilted_sum(spectra, size, first, step, tilt, epsilon)
    tail = sum(number * one.tail_log_moment for one, number in spectra)
    infinity_mass = sum(number * one.infinity_mass for one, number in spectra)
    start = first * step
    above = math.exp(min(tail - tail_tilt * (start + step * size), 0.0))
    lowest = max(start, epsilon - margin / float(TILTS[best]))
    charged = infinity_mass + above
    return TotalLoss(start, step, tilt, masses, epsilon, lowest, log_scale, rounding, window.rounding_gain, charged)


# Nothing below can make an answer wrong, only loose or slow: what a window leaves out is charged to delta above.


@dataclass(frozen=True)
class Window:
    """The tilt of the masses, and the total losses to cover: from `bottom` to `bottom + width`."""

    tilt: float
    bottom: float
    width: float
    tail_tilt: float  # bounds what lies above the window
    rounding_gain: float  # log of what rounding errors are multiplied by, up to a constant that all tilts share


def window_around(
    rounds: Rounds, best: int, epsilon: float, delta: float, margin: float, gain_limit: float = ACCEPTED_GAIN
) -> Window:
    """The shortest window around `epsilon`, over the tilts not far from the one with index `best`.

    `margin` is how far below `epsilon` the answer may lie, in units of 1 / (tilt with index `best`). `gain_limit` is on
    the rounding gain. If no tilt keeps to it, the one with the least gain is taken whose window is not much longer.
    """
    moments, _ = total_moments(rounds)
    log_left_out = math.log(TRUNCATED_SHARE * delta)
    tops = (moments - log_left_out) / TILTS
    highest = int(np.argmin(tops))
    top, tail_tilt = float(tops[highest]), float(TILTS[highest])
    lowest = epsilon - margin / float(TILTS[best])
    bottoms: Array = lowest - (max(top - lowest, 0.0) - log_left_out / float(TILTS[best])) * _DOWNWARDS
    below = _log_chance_below(rounds, bottoms)
    # Rounding errors have about the same size at all points of the lattice. A sum over it weighs them by this much.
    gains = moments - TILTS * epsilon - math.log(delta) - np.log(TILTS) - np.log1p(TILTS)
    windows = []
    for index in range(max(best - 12, 0), min(best + 4, len(TILTS))):
        tilt = float(TILTS[index])
        # Mass below the window wraps to its upper end, where it keeps its untilted probability times exp(-tilt width).
        # Mass above the top wraps downwards and is enlarged by the same factor, so there must be next to none above
        # the width plus epsilon.
        higher = TILTS[index + 1 :]
        downwards = (moments[index + 1 :] - higher * lowest - log_left_out) / (higher - tilt)
        upwards = np.maximum(top - bottoms, (below - log_left_out) / tilt)
        width = max(float(upwards.min()), float(downwards.min(initial=math.inf)))
        if math.isfinite(width) and width > 0:
            windows.append(Window(tilt, top - width, width, tail_tilt, float(gains[index])))
    if not windows:
        tilt = float(TILTS[best])
        return Window(tilt, epsilon - margin / tilt, 2 * margin / tilt, tail_tilt, float(gains[best]))
    shortest = min(window.width for window in windows)
    narrow = [window for window in windows if window.width <= 8 * shortest]
    accepted = [window for window in narrow if window.rounding_gain < gain_limit]
    return min(accepted, key=lambda w: w.width) if accepted else min(narrow, key=lambda w: w.rounding_gain)


def _log_chance_below(rounds: Rounds, losses: Array) -> Array:
    """An upper bound on the log of the chance that the total loss lies below each of `losses`.

    By Chernoff: E exp(-(tilt + 1) L) is the moment of the reverse pair at `tilt`, and at tilt 0 it is at most one.
    """
    moments, _ = total_moments(tuple((direction.reverse, number) for direction, number in rounds))
    bounds = (np.outer(losses, TILTS + 1) + moments).min(axis=1)
    result: Array = np.minimum(np.minimum(bounds, losses), 0.0)
    return result


def lattice_step(
    rounds: Rounds, tilt: float, epsilon: float, width: float, truncation: float, coarseness: float
) -> float:
    """`coarseness` times the spacing whose error is at most 10^-5 of epsilon; wider if that takes too many points.

    Up to 15 epsilon is wanted to four or five digits after the point; beyond, where it protects little, to five
    significant digits, and beyond 1,500 to four. The error grows with the square of the spacing.
    """
    count = sum(number for _, number in rounds)
    absolute = min(7e-6 * max(count / 2000, 1.0) ** 0.5, 4e-5)
    error = 1e-5 * epsilon * min(max(epsilon / 150, 1.0), 10.0) if epsilon > 15 else min(1e-5 * epsilon, absolute)
    wanted = coarseness * math.sqrt(12 * error / (count * (tilt + 1)))
    widest = max(width, *(sum(loss_range(direction, truncation, truncation)) for direction, _ in rounds))
    coarsest = max(wanted, 1.5 * widest / _MOST_POINTS)
    # Four steps per factor of two, so that few different ones occur and spectra are shared.
    return float(2.0 ** (math.floor(4 * math.log2(coarsest)) / 4))


def total_moments(rounds: Rounds) -> tuple[Array, float]:
    """Log E[exp(tilt L)] of all rounds together at each of `TILTS`, and the mass at infinity."""
    total, infinity_mass = np.zeros(len(TILTS)), 0.0
    for direction, number in rounds:
        moments, mass = coarse_log_moments(direction)
        total = total + number * moments
        infinity_mass += number * mass
    return total, infinity_mass
