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

SPARED = 1e-9  # share of delta that each truncation may use up
LOG_CONVERSION: Array = -np.log1p(SLOPES) - SLOPES * np.log1p(1 / SLOPES)  # Canonne, Kamath, Steinke 2020
_MOST_POINTS = 1 << 19


@dataclass(frozen=True)
class Window:
    """The slope to tilt by, and the total losses to cover: `width` from `bottom` up."""

    slope: float
    bottom: float
    width: float
    tail_slope: float  # bounds what lies above the window


def window_around(rounds: Rounds, best: int, epsilon: float, delta: float, room: float) -> Window:
    """The shortest window around `epsilon`, over the slopes not far below the one with index `best`.

    `room` is how far below `epsilon` the window must reach, in units of 1 / slope.
    """
    moments, _ = total_moments(rounds)
    spared = math.log(SPARED * delta)
    tops = (moments - spared) / SLOPES
    highest = int(np.argmin(tops))
    top = float(tops[highest])
    shortest: Window | None = None
    for index in range(best, max(best - 12, -1), -1):
        slope = float(SLOPES[index])
        if moments[index] + LOG_CONVERSION[index] - slope * epsilon - math.log(delta) > 14:  # rounding would count
            break
        lowest = epsilon - room / slope
        # Mass that wraps upwards keeps its untilted probability times exp(-slope width). Mass from beyond the top that
        # wraps downwards is enlarged by as much, and must not lie above the width plus epsilon to begin with.
        higher = SLOPES[index + 1 :]
        downwards = (moments[index + 1 :] - higher * lowest - spared) / (higher - slope)
        width = max(top - lowest, -spared / slope, float(downwards.min(initial=math.inf)))
        if math.isfinite(width) and (shortest is None or width < shortest.width):
            shortest = Window(slope, top - width, width, float(SLOPES[highest]))
    slope = float(SLOPES[best])
    return shortest or Window(slope, epsilon - room / slope, 2 * room / slope, float(SLOPES[highest]))


def lattice_step(rounds: Rounds, slope: float, epsilon: float, width: float, spare: float) -> float:
    """The spacing whose error is a few millionths of epsilon, unless that would take too many points.

    Up to 15 an epsilon is wanted to four digits after the point; beyond, where it protects little, to five in all.
    """
    count = sum(number for _, number in rounds)
    error = 1e-5 * epsilon if epsilon > 15 else min(4e-6 * epsilon, 1.5e-5)
    wanted = math.sqrt(12 * error / (count * (slope + 1)))
    widest = max(width, *(sum(reach(direction, spare, spare)) for direction, _ in rounds))
    coarsest = max(wanted, 1.5 * widest / _MOST_POINTS)
    return float(2.0 ** (math.floor(4 * math.log2(coarsest)) / 4))  # few different ones, so that spectra are shared


def fast_size(least: float) -> int:
    """A power of two, or three quarters of one."""
    power = 1 << max(math.ceil(math.log2(least)), 6)
    return 3 * power // 4 if 3 * power // 4 >= least else power


def total_moments(rounds: Rounds) -> tuple[Array, float]:
    """Log E[exp(slope L)] of all rounds together at each of `SLOPES`, and the mass left out at infinity."""
    total, infinite = np.zeros(len(SLOPES)), 0.0
    for direction, number in rounds:
        moments, mass = coarse_log_moments(direction)
        total = total + number * moments
        infinite += number * mass
    return total, infinite
