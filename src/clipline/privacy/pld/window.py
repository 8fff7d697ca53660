"""Which part of the total loss a transform has to cover, and how fine its lattice must be.

Nothing here can make an answer wrong, only loose or slow: what a window leaves out is charged to delta in `compose`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..numerics import Array
from .discretised import TILTS, coarse_log_moments
from .one_round import Rounds, loss_range

TRUNCATED_SHARE = 1e-7  # share of delta that each truncation may use up
LOG_CONVERSION: Array = -np.log1p(TILTS) - TILTS * np.log1p(1 / TILTS)  # Canonne, Kamath, Steinke 2020
# Windows with a log-rounding gain up to this are tried first. A larger gain cannot lower epsilon either: rounding is
# charged to delta, so that a gain only makes the answer looser.
ACCEPTED_GAIN = 10.0
_MOST_POINTS = 1 << 19
_DOWNWARDS: Array = np.linspace(0.0, 1.0, 65)


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

    An epsilon up to 15 is wanted to four digits after the point, and to five in a training of ordinary length. Beyond
    15, where it protects little, five significant digits are enough, and beyond 1,500, where it protects nothing, four.
    The error grows with the square of the spacing.
    """
    count = sum(number for _, number in rounds)
    absolute = min(7e-6 * max(count / 2000, 1.0) ** 0.5, 4e-5)
    error = 1e-5 * epsilon * min(max(epsilon / 150, 1.0), 10.0) if epsilon > 15 else min(1e-5 * epsilon, absolute)
    wanted = coarseness * math.sqrt(12 * error / (count * (tilt + 1)))
    widest = max(width, *(sum(loss_range(direction, truncation, truncation)) for direction, _ in rounds))
    coarsest = max(wanted, 1.5 * widest / _MOST_POINTS)
    # Four steps per factor of two, so that few different ones occur and spectra are shared.
    return float(2.0 ** (math.floor(4 * math.log2(coarsest)) / 4))


def fast_size(least: float) -> int:
    """The least size of a fast transform from `least` on: a power of two, or five, six or seven eighths of one."""
    power = 1 << max(math.ceil(math.log2(least)), 6)
    return next(size for size in (5 * power // 8, 6 * power // 8, 7 * power // 8, power) if size >= least)


def total_moments(rounds: Rounds) -> tuple[Array, float]:
    """Log E[exp(tilt L)] of all rounds together at each of `TILTS`, and the mass at infinity."""
    total, infinity_mass = np.zeros(len(TILTS)), 0.0
    for direction, number in rounds:
        moments, mass = coarse_log_moments(direction)
        total = total + number * moments
        infinity_mass += number * mass
    return total, infinity_mass
