"""Logarithms of one-dimensional integrals whose mass may lie anywhere.

The integrands are (a power of a likelihood ratio) times exp(-x^2/2): smooth bumps at least about one unit wide, which
for order a may stand near 0, near a / stddev (that is, at 10^7), or at both with nothing between. The trapezoid rule
converges faster than any power of its step for such bumps, so all that has to be found is where they are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LogIntegrand = Callable[[Array, Array], Array]  # (rows, nodes) points, (rows, 1) orders -> (rows, nodes) logarithms

_DEPTH = 42.0  # what lies exp(42) = 10^18 below the summit is left out
_FIRST_OFFSET, _OFFSET_RATIO = 0.6, 1.6  # distances of probes from a summit: 0.6, 0.96, ..., until they span everything
_BLOCK = 1 << 18  # points evaluated at once: a few megabytes
_MOST_NODES = 1 << 20


def log_integral(
    log_integrand: LogIntegrand, orders: Array, *, summits: Array, left: float, right: Array, step: float
) -> Array:
    """Logarithm of the integral of exp(log_integrand(x, order)) over [left, right], one for each order.

    `summits` (orders, k) are guesses of the local maxima; every narrow maximum must be near one of them, a broad one
    need not be. `left` and `right` (orders,) may be generous. `step` is what the trapezoid rule needs. Where more than
    a million nodes would be needed the answer is infinity, which errs on the private side.
    """
    low, high = _windows(log_integrand, orders, summits, left, right)
    steps = np.ceil((high - low) / step)
    # Powers of two, so that orders of similar width share one matrix; rounding up only makes the step finer.
    nodes = np.exp2(np.ceil(np.log2(np.clip(steps, 32, None))))
    result = np.full(orders.shape, np.inf)
    for count in np.unique(nodes[nodes <= _MOST_NODES]).astype(int):
        (rows,) = np.nonzero(nodes == count)
        for block in np.array_split(rows, -(-len(rows) * count // _BLOCK)):
            width = (high[block] - low[block]) / count
            points = low[block, None] + width[:, None] * np.arange(count + 1)
            result[block] = _log_sum(log_integrand(points, orders[block, None])) + np.log(width)
    return result


def _windows(
    log_integrand: LogIntegrand, orders: Array, summits: Array, left: float, right: Array
) -> tuple[Array, Array]:
    """The smallest interval found outside of which the integrand is negligible, for each order."""
    reach = max(float(right.max()) - left, 2.0)
    count = int(np.ceil(np.log(reach / _FIRST_OFFSET) / np.log(_OFFSET_RATIO)))
    offsets = _FIRST_OFFSET * _OFFSET_RATIO ** np.arange(count)
    offsets = np.concatenate([-offsets, [0.0], offsets])
    probes = (summits[:, :, None] + offsets).reshape(len(orders), -1)
    probes = np.clip(probes, left, right[:, None])
    heights = log_integrand(probes, orders[:, None])
    kept = heights > heights.max(axis=1, keepdims=True) - _DEPTH
    first = np.where(kept, probes, np.inf).min(axis=1)
    last = np.where(kept, probes, -np.inf).max(axis=1)
    # One probe further out on either side: between two probes the integrand is monotone or already seen.
    low = np.where(probes < first[:, None], probes, left).max(axis=1)
    high = np.where(probes > last[:, None], probes, right[:, None]).min(axis=1)
    return low, high


def _log_sum(logs: Array) -> Array:
    """Compute log(sum(exp(row))) for each row, without overflow."""
    top = logs.max(axis=1)
    total: Array = top + np.log(np.exp(logs - top[:, None]).sum(axis=1))
    return total
