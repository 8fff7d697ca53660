"""The noisy sum of one vector a user, by the same clipping and the same mechanism as a round of training.

A user's vector has norm at most 1 by construction, and the clip at 1 makes sure. Its entries are multiples of 2^-24, so
that sums of up to 2^29 users are exact in float64, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...federated.clipping import PartialSums
from ...federated.mechanism import GaussianMechanism
from ...privacy.events import GaussianEvent, NoSampling
from ...random.streams import NormalGenerator
from ..population import Population

_GRID = 2.0**-24
_BLOCK = 1 << 20  # numbers looked at in one go, or those of one user


@dataclass(frozen=True)
class Vectors:
    """What some users add: PRIVATE. User `owners[k]` adds `weights[k]` to coordinate `places[k]`, each place once."""

    users: int
    owners: NDArray[np.int64]
    places: NDArray[np.int64]
    weights: NDArray[np.float64]

    def __len__(self) -> int:
        return self.users

    def norms(self) -> Tensor:
        """(users,) float64."""
        return torch.from_numpy(np.sqrt(np.bincount(self.owners, self.weights**2, self.users)))

    def add_to(self, totals: Tensor, scale: Tensor, runs: Tensor | None = None) -> None:
        """Add each user's vector times its scale to the one row of totals; see `UserUpdates`."""
        scaled = torch.from_numpy(self.weights) * scale[torch.from_numpy(self.owners)]
        totals[0].index_add_(0, torch.from_numpy(self.places), scaled)


def dense(rows: NDArray[np.float64]) -> Vectors:
    """Vectors (users, dim) of norm at most 1. A user whose vector is not finite adds nothing."""
    finite = np.isfinite(rows).all(axis=1, keepdims=True)
    rows = on_grid(np.where(finite, rows, 0.0))
    users, dim = rows.shape
    owners, places = np.divmod(np.arange(users * dim), max(dim, 1))
    return Vectors(users, owners, places, rows.reshape(-1))


def on_grid(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Multiples of 2^-24, rounded towards zero, so that no norm grows."""
    return np.asarray(np.trunc(weights / _GRID) * _GRID)


def noisy_sum(
    vectors: Iterable[Vectors], dim: int, noise_multiplier: float, rng: NormalGenerator
) -> tuple[NDArray[np.float64], GaussianEvent]:
    """The sum of all users' vectors with noise of `noise_multiplier`, rounded to the grid of the mechanism: PUBLIC."""
    sums = PartialSums(torch.zeros(1, dim + 1, dtype=torch.float64))
    for block in vectors:
        sums.add(block, [1.0], np.zeros(len(block), np.int64))
    (total,) = sums.finished([1.0], [NoSampling()])
    release = GaussianMechanism(cohort_size=1, noise_multiplier=noise_multiplier).release(total, rng)
    return release.mean.numpy(), release.event


def user_blocks(population: Population, width: int) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Rows of some users at a time, with the sizes of those users, none of them 0: who has no example adds nothing.

    `width` is how many numbers of a row are looked at.
    """
    sizes = np.diff(population.offsets)
    sizes = sizes[sizes > 0]
    ends, start, at_once = np.cumsum(sizes), 0, max(1, _BLOCK // max(1, width))
    while start < len(sizes):
        begin = int(ends[start] - sizes[start])
        stop = max(start + 1, int(np.searchsorted(ends, begin + at_once, side="right")))
        yield slice(begin, int(ends[stop - 1])), sizes[start:stop]
        start = stop


def means_by_user(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """The mean row of each user, (users, dim), of rows (examples, dim) from -1 to 1; NaN for a user who has one.

    Summed as whole numbers of 2^-24: in floating point the last digit could depend on where in memory a user's rows
    lie, and so on others.
    """
    starts, gaps = np.cumsum(sizes) - sizes, np.isnan(values)
    whole = np.rint(np.where(gaps, 0.0, values) / _GRID).astype(np.int64)
    means = np.add.reduceat(whole, starts, axis=0) * _GRID / sizes[:, None]
    return np.where(np.logical_or.reduceat(gaps, starts, axis=0), np.nan, means)
