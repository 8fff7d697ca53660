"""Where to look: the part of the total loss that a transform has to cover, and how finely.

Nothing here can make an answer wrong, only loose or slow: what a window leaves out is charged in `composition`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .halves import Array
from .loss import SLOPES, Direction, coarse_log_moments, reach

Rounds = tuple[tuple[Direction, int], ...]  # how often each pair occurs, all read in the same direction

SPARED = 1e-7  # share of delta that each truncation may use up
LOG_CONVERSION: Array = -np.log1p(SLOPES) - SLOPES * np.log1p(1 / SLOPES)  # Canonne, Kamath, Steinke 2020
STEADY = 10.0  # unsteadiness that is no matter, mostly
_MOST_POINTS = 1 << 19
_DOWNWARDS: Array = np.linspace(0.0, 1.0, 65)


@dataclass(frozen=True)
class Window:
    """The slope to tilt by, and the total losses to cover: `width` from `bottom` up."""

    slope: float
    bottom: float
    width: float
    tail_slope: float  # bounds what lies above the window
    unsteadiness: float  # logarithm of what rounding is multiplied by, but for the same factor at all slopes


def window_around(
    rounds: Rounds, best: int, epsilon: float, delta: float, room: float, limit: float = STEADY
) -> Window:
    """The shortest window around `epsilon`, over the slopes not far from the one with index `best`.

    `room` is how far below `epsilon` the answer may lie, in units of 1 / (slope with index `best`). `limit` is on the
    unsteadiness; if no slope keeps to it, the steadiest one is taken whose window is not much longer.
    """
    moments, _ = total_moments(rounds)
    spared = math.log(SPARED * delta)
    tops = (moments - spared) / SLOPES
    highest = int(np.argmin(tops))
    top, tail_slope = float(tops[highest]), float(SLOPES[highest])
    lowest = epsilon - room / float(SLOPES[best])
    bottoms: Array = lowest - (max(top - lowest, 0.0) - spared / float(SLOPES[best])) * _DOWNWARDS
    below = _log_chance_below(rounds, bottoms)
    # Rounding errors are alike at all points of the lattice, and a sum over it weighs them by about this much.
    unsteadiness = moments - SLOPES * epsilon - math.log(delta) - np.log(SLOPES) - np.log1p(SLOPES)
    windows = []
    for index in range(max(best - 12, 0), min(best + 4, len(SLOPES))):
        slope = float(SLOPES[index])
        # Mass that wraps upwards keeps its untilted probability times exp(-slope width). Mass from beyond the top that
        # wraps downwards is enlarged by as much, and must not lie above the width plus epsilon to begin with.
        higher = SLOPES[index + 1 :]
        downwards = (moments[index + 1 :] - higher * lowest - spared) / (higher - slope)
        upwards = np.maximum(top - bottoms, (below - spared) / slope)
        width = max(float(upwards.min()), float(downwards.min(initial=math.inf)))
        if math.isfinite(width) and width > 0:
            windows.append(Window(slope, top - width, width, tail_slope, float(unsteadiness[index])))
    if not windows:
        slope = float(SLOPES[best])
        return Window(slope, epsilon - room / slope, 2 * room / slope, tail_slope, float(unsteadiness[best]))
    shortest = min(window.width for window in windows)
    narrow = [window for window in windows if window.width <= 8 * shortest]
    steady = [window for window in narrow if window.unsteadiness < limit]
    return min(steady, key=lambda w: w.width) if steady else min(narrow, key=lambda w: w.unsteadiness)


def _log_chance_below(rounds: Rounds, losses: Array) -> Array:
    """An upper bound on the logarithm of the chance that the total loss lies below each of `losses`.

    By Chernoff: E exp(-(slope + 1) L) is the moment of the reverse pair at `slope`, and at slope 0 it is at most one.
    """
    moments, _ = total_moments(tuple((direction.reverse, number) for direction, number in rounds))
    bounds = (np.outer(losses, SLOPES + 1) + moments).min(axis=1)
    result: Array = np.minimum(np.minimum(bounds, losses), 0.0)
    return result


def lattice_step(rounds: Rounds, slope: float, epsilon: float, width: float, spare: float, coarser: float) -> float:
    """The spacing whose error is 10^-5 of epsilon or less, times `coarser`, unless that would take too many points.

    Up to 15 an epsilon is wanted to four digits after the point, and five in a training of ordinary length; beyond,
    where it protects little, to five in all. The error grows with the square of the spacing.
    """
    count = sum(number for _, number in rounds)
    absolute = min(7e-6 * max(count / 2000, 1.0) ** 0.5, 4e-5)
    error = 1e-5 * epsilon if epsilon > 15 else min(1e-5 * epsilon, absolute)
    wanted = coarser * math.sqrt(12 * error / (count * (slope + 1)))
    widest = max(width, *(sum(reach(direction, spare, spare)) for direction, _ in rounds))
    coarsest = max(wanted, 1.5 * widest / _MOST_POINTS)
    return float(2.0 ** (math.floor(4 * math.log2(coarsest)) / 4))  # few different ones, so that spectra are shared


def fast_size(least: float) -> int:
    """A power of two, or five, six or seven eighths of one."""
    power = 1 << max(math.ceil(math.log2(least)), 6)
    return next(size for size in (5 * power // 8, 6 * power // 8, 7 * power // 8, power) if size >= least)


def total_moments(rounds: Rounds) -> tuple[Array, float]:
    """Log E[exp(slope L)] of all rounds together at each of `SLOPES`, and the mass left out at infinity."""
    total, infinite = np.zeros(len(SLOPES)), 0.0
    for direction, number in rounds:
        moments, mass = coarse_log_moments(direction)
        total = total + number * moments
        infinite += number * mass
    return total, infinite
