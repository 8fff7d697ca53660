"""Logarithms of one-dimensional integrals whose mass may lie anywhere.

The integrands are a power of a likelihood ratio times exp(-x^2/2): smooth peaks, each at least about one unit wide. For
order a they may lie near 0, near a / stddev (which may be 10^7), or at both with nothing in between. For such peaks the
trapezoid rule converges faster than any power of its step. What remains is to find where the peaks are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import Array

LogIntegrand = Callable[[Array, Array], Array]  # (rows, nodes) points, (rows, 1) orders -> (rows, nodes) logarithms

_DEPTH = 42.0  # what lies a factor exp(42) = 10^18 below the highest peak is left out
_FIRST_OFFSET, _OFFSET_RATIO = 0.6, 1.6  # distances of probes from a peak: 0.6, 0.96, ..., until they span everything
_BLOCK = 1 << 18  # points evaluated at once: a few megabytes
_MOST_NODES = 1 << 20


def log_integral(
    log_integrand: LogIntegrand, orders: Array, *, peaks: Array, left: float, right: Array, step: float
) -> Array:
    """Logarithm of the integral of exp(log_integrand(x, order)) over [left, right], one for each order.

    `peaks` (orders, k) are guesses of the local maxima. Every narrow maximum must be near one of them; a broad one need
    not be. `left` and `right` (orders,) may be generous. `step` is the widest step that the trapezoid rule allows.
    Where more than a million nodes would be needed the answer is infinity, which errs towards privacy.
    """
    low, high = _intervals(log_integrand, orders, peaks, left, right)
    steps = np.ceil((high - low) / step)
    # Powers of two, so that orders of similar width share one matrix. Rounding up only makes the step finer.
    nodes = np.exp2(np.ceil(np.log2(np.clip(steps, 32, None))))
    result = np.full(orders.shape, np.inf)
    for count in np.unique(nodes[nodes <= _MOST_NODES]).astype(int):
        (rows,) = np.nonzero(nodes == count)
        for block in np.array_split(rows, -(-len(rows) * count // _BLOCK)):
            width = (high[block] - low[block]) / count
            points = low[block, None] + width[:, None] * np.arange(count + 1)
            result[block] = _log_sum(log_integrand(points, orders[block, None])) + np.log(width)
    return result


def _intervals(
    log_integrand: LogIntegrand, orders: Array, peaks: Array, left: float, right: Array
) -> tuple[Array, Array]:
    """For each order, the smallest interval found outside of which the integrand is negligible."""
    reach = max(float(right.max()) - left, 2.0)
    count = int(np.ceil(np.log(reach / _FIRST_OFFSET) / np.log(_OFFSET_RATIO)))
    offsets = _FIRST_OFFSET * _OFFSET_RATIO ** np.arange(count)
    offsets = np.concatenate([-offsets, [0.0], offsets])
    probes = (peaks[:, :, None] + offsets).reshape(len(orders), -1)
    probes = np.clip(probes, left, right[:, None])
    heights = log_integrand(probes, orders[:, None])
    kept = heights > heights.max(axis=1, keepdims=True) - _DEPTH
    first = np.where(kept, probes, np.inf).min(axis=1)
    last = np.where(kept, probes, -np.inf).max(axis=1)
    # One probe further out on either side: between two neighbouring probes the integrand is monotone, or its peak is
    # known.
    low = np.where(probes < first[:, None], probes, left).max(axis=1)
    high = np.where(probes > last[:, None], probes, right[:, None]).min(axis=1)
    return low, high


def _log_sum(logs: Array) -> Array:
    """log(sum(exp(row))) for each row, without overflow."""
    top = logs.max(axis=1)
    total: Array = top + np.log(np.exp(logs - top[:, None]).sum(axis=1))
    return total
