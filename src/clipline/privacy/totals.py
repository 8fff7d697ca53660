"""A total loss on a lattice, read at an epsilon or at a delta. How it is tilted is explained in `composition`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .halves import Array


@dataclass(frozen=True, eq=False)
class Total:
    """Total loss, tilted, on `start`, `start + step`, ..., scaled so that all numbers are near one."""

    start: float
    step: float
    slope: float
    masses: Array  # tilted back around `centre`
    centre: float
    lowest: float  # the least epsilon that the window is meant for
    log_scale: float  # delta = exp(log_scale) * (sums of masses)
    noise: float  # of such a sum at `centre`, through rounding
    unsteadiness: float  # logarithm of what rounding is multiplied by, but for the same factor at all slopes
    charged: float  # to delta outright

    def epsilon(self, delta: float) -> float:
        """The least lattice-interpolated epsilon with delta(epsilon) <= delta; infinite if there is none."""
        target = self._target(delta)
        if target <= 0:
            return math.inf
        last, before = self._first_within(target)
        if last == len(self.masses):
            return math.inf
        upper = self.start + self.step * last
        if last == 0:
            return upper
        lower = upper - self.step
        gaps = self.step * np.arange(1, len(self.masses) - last + 1, dtype=np.float64)
        weight = float(np.sum(self.masses[last:] * np.exp(-gaps)))
        excess = before - target
        rise = math.log1p(excess / weight) if weight > 0 and excess > 0 else self.step
        return min(lower + max(rise, 0.0), upper)

    def noise_share(self, delta: float, epsilon: float) -> float:
        """The share of delta, or about that, that rounding takes up at `epsilon`."""
        return self._noise_at(epsilon) / max(self._target(delta), 1e-300)

    def _target(self, delta: float) -> float:
        return (delta - self.charged) * math.exp(min(-self.log_scale, 700.0))

    def _first_within(self, target: float) -> tuple[int, float]:
        """Index of the first lattice point at which delta is met, by bisection from a guess; the sum before it."""
        low, high = -1, len(self.masses)  # not met, met
        before = math.inf
        guess = self._guess(target)
        nearby = [guess, guess - 1, guess + 1]  # nearly always two of them are enough
        while high - low > 1:
            index = nearby.pop(0) if nearby else (low + high) // 2
            if low < index < high:
                value = self._sum_at(self.start + self.step * index)
                if value <= target:
                    high = index
                else:
                    low, before = index, value
        return high, before

    def _guess(self, target: float) -> int:
        """The same index, but for rounding errors, which the sums here have more of than those of `_sum_at`.

        From the top down, block by block, until delta is no longer met, and then within that block.
        """
        table = self.masses.reshape(-1, block_of(len(self.masses)))
        block = table.shape[1]
        if self.step * block > 600:  # the next lines would divide by zero: bisect
            return 0
        decay = np.exp(-self.step * np.arange(block + 1))
        sums, shrunk = table.sum(axis=1).tolist(), (table @ decay[:block]).tolist()
        tail = rest = 0.0
        for row in range(len(table) - 1, -1, -1):
            loss = self.start + self.step * block * row
            above, beyond = tail + sums[row], shrunk[row] + float(decay[block]) * rest
            if above - beyond + self._noise_at(loss) > target:
                masses, fall = table[row, ::-1], decay[block - 1 :: -1]  # from the top of the block down
                curve = tail + np.cumsum(masses) - (decay[block] * rest + np.cumsum(masses * fall)) / fall
                return row * block + block - int(np.argmax(curve + self._noise_at(loss) > target))
            tail, rest = above, beyond
        return 0

    def delta(self, epsilon: float) -> float:
        """The delta at an epsilon inside the window."""
        return math.exp(min(self.log_scale, 700.0)) * self._sum_at(epsilon) + self.charged

    def _sum_at(self, epsilon: float) -> float:
        first = max(math.floor((epsilon - self.start) / self.step) - 1, 0)
        gaps = np.maximum((self.start - epsilon) + self.step * np.arange(first, len(self.masses)), 0.0)
        return float(np.sum(self.masses[first:] * -np.expm1(-gaps))) + self._noise_at(epsilon)

    def _noise_at(self, loss: float) -> float:
        return self.noise * math.exp(min(max(-self.slope * (loss - self.centre), -600.0), 600.0))


def block_of(size: int) -> int:
    """The greatest power of two that divides `size`, up to 512."""
    return min(size & -size, 512)


def tilt_back(masses: Array, slope: float, start: float, step: float) -> None:
    """Multiply the mass at each x by exp(-slope x), in place, with x = start, start + step, ...

    By an exponential for each block times one for each place in a block, which costs far fewer of them.
    """
    block = block_of(len(masses))
    table = masses.reshape(-1, block)
    rows = -slope * (start + step * block * np.arange(len(table)))
    table *= np.exp(np.clip(rows, -700, 600))[:, None]
    table *= np.exp(np.maximum(-slope * step * np.arange(block), -700))
