"""The total loss of many rounds on a lattice, read at an epsilon or at a delta. The tilt is explained in `compose`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..numerics import Array


@dataclass(frozen=True, eq=False)
class TotalLoss:
    """The total loss at `start`, `start + step`, ..., scaled so that the sums below are near one."""

    start: float
    step: float
    tilt: float
    masses: Array  # untilted relative to `centre`: times exp(-tilt (x - centre))
    centre: float
    lowest: float  # the least epsilon that the window is made for
    log_scale: float  # delta = exp(log_scale) * (sum of masses times their weights) + charged
    rounding: float  # what rounding may add to such a sum at `centre`
    rounding_gain: float  # log of what rounding errors are multiplied by, up to a constant that all tilts share
    charged: float  # added to delta as it is: truncated masses, and errors that are bounded for all sums at once

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

    def rounding_share(self, delta: float, epsilon: float) -> float:
        """About which share of delta rounding takes up at `epsilon`."""
        return self._rounding_at(epsilon) / max(self._target(delta), 1e-300)

    def _target(self, delta: float) -> float:
        """The sum of weighted masses that gives `delta`."""
        return (delta - self.charged) * math.exp(min(-self.log_scale, 700.0))

    def _first_within(self, target: float) -> tuple[int, float]:
        """Index of the first lattice point whose sum is at most `target`, and the sum at the point before it.

        By bisection that starts from a guess.
        """
        low, high = -1, len(self.masses)  # above the target, within it
        before = math.inf
        guess = self._guess(target)
        nearby = [guess, guess - 1, guess + 1]  # two of them are nearly always enough
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
        """The index that `_first_within` looks for, up to rounding: running sums have more of it than `_sum_at`.

        From the top down, block by block, until the sum exceeds the target, and then within that block.
        """
        table = self.masses.reshape(-1, block_of(len(self.masses)))
        block = table.shape[1]
        if self.step * block > 600:  # the next lines would divide by zero: leave it to bisection
            return 0
        decay = np.exp(-self.step * np.arange(block + 1))
        sums, shrunk = table.sum(axis=1).tolist(), (table @ decay[:block]).tolist()
        tail = rest = 0.0
        for row in range(len(table) - 1, -1, -1):
            loss = self.start + self.step * block * row
            above, beyond = tail + sums[row], shrunk[row] + float(decay[block]) * rest
            if above - beyond + self._rounding_at(loss) > target:
                masses, fall = table[row, ::-1], decay[block - 1 :: -1]  # from the top of the block down
                curve = tail + np.cumsum(masses) - (decay[block] * rest + np.cumsum(masses * fall)) / fall
                return row * block + block - int(np.argmax(curve + self._rounding_at(loss) > target))
            tail, rest = above, beyond
        return 0

    def delta(self, epsilon: float) -> float:
        """The delta at an epsilon inside the window."""
        return math.exp(min(self.log_scale, 700.0)) * self._sum_at(epsilon) + self.charged

    def _sum_at(self, epsilon: float) -> float:
        """The sum of masses times 1 - exp(epsilon - x) over x > epsilon, raised by what rounding may have cost."""
        first = max(math.floor((epsilon - self.start) / self.step) - 1, 0)
        gaps = np.maximum((self.start - epsilon) + self.step * np.arange(first, len(self.masses)), 0.0)
        return float(np.sum(self.masses[first:] * -np.expm1(-gaps))) + self._rounding_at(epsilon)

    def _rounding_at(self, loss: float) -> float:
        return self.rounding * math.exp(min(max(-self.tilt * (loss - self.centre), -600.0), 600.0))


def block_of(size: int) -> int:
    """The greatest power of two that divides `size`, up to 512."""
    return min(size & -size, 512)


def untilt(masses: Array, tilt: float, start: float, step: float) -> None:
    """Multiply the mass at each x by exp(-tilt x), in place, with x = start, start + step, ...

    One exponential for each block times one for each place in a block: far fewer than one for each mass.
    """
    block = block_of(len(masses))
    table = masses.reshape(-1, block)
    rows = -tilt * (start + step * block * np.arange(len(table)))
    table *= np.exp(np.clip(rows, -700, 600))[:, None]
    table *= np.exp(np.maximum(-tilt * step * np.arange(block), -700))
