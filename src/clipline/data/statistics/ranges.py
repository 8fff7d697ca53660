"""Quantiles of fields, by noisy histograms over bins that are declared."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...privacy.events import GaussianEvent
from ..population import Population
from ..population_io import scaled_population
from .moments import ChargedPair, Range, widths
from .noisy_sum import Vectors, dense, user_blocks


@dataclass(frozen=True, eq=False)
class Ranges(Mapping[str, ChargedPair]):
    """Private ranges by field, as scale: the lower end becomes 0 and the upper one 1.

    `low[name]` and `high[name]` have the shape of a row and lie on the edges of the bins.
    """

    event: GaussianEvent = field(repr=False)
    low: Mapping[str, NDArray[np.float64]]
    high: Mapping[str, NDArray[np.float64]]

    def __getitem__(self, name: str) -> ChargedPair:
        return ChargedPair(self.low[name], self.high[name] - self.low[name], self.event)

    def __iter__(self) -> Iterator[str]:
        return iter(self.low)

    def __len__(self) -> int:
        return len(self.low)

    def apply(self, population: Population) -> Population:
        """The population with these fields scaled. New data are scaled alike when a model predicts."""
        return scaled_population(population, dict(self), self.event)


def histogram_vectors(population: Population, ranges: Mapping[str, Range], bins: int) -> Iterator[Vectors]:
    """What each user adds: the shares of the user's values in each bin, for each coordinate, over sqrt(coordinates).

    Shares add up to 1 and so have norm at most 1, and all coordinates together too.
    """
    dim = sum(widths(population, ranges).values())
    for rows, sizes in user_blocks(population, dim):
        owners = np.repeat(np.arange(len(sizes)), sizes)
        parts = []
        for name, (low, high) in ranges.items():
            values = np.asarray(population.fields[name][rows], np.float64).reshape(len(owners), -1)
            for column in values.T:
                parts.append(_shares(column, owners, sizes, low, high, bins))
        yield dense(np.concatenate(parts, axis=1) / math.sqrt(dim))


def ranges_from(
    noisy: NDArray[np.float64],
    event: GaussianEvent,
    population: Population,
    ranges: Mapping[str, Range],
    bins: int,
    quantiles: Range,
) -> Ranges:
    """The bins that hold these quantiles, read from the noisy histograms; looks at no value of the population."""
    counts = noisy.reshape(-1, bins)
    low, high, start = {}, {}, 0
    for name, size in widths(population, ranges).items():
        least, most = ranges[name]
        edges = least + (most - least) * np.arange(bins + 1) / bins
        shape = population.fields[name].shape[1:]
        ends = [_ends(row, quantiles) for row in counts[start : start + size]]
        low[name] = np.reshape([edges[first] for first, _ in ends], shape).astype(np.float64)
        high[name] = np.reshape([edges[last] for _, last in ends], shape).astype(np.float64)
        start += size
    return Ranges(event, low, high)


def _shares(
    column: NDArray[np.float64],
    owners: NDArray[np.int64],
    sizes: NDArray[np.int64],
    low: float,
    high: float,
    bins: int,
) -> NDArray[np.float64]:
    """(users, bins): which share of a user's values is in each bin; NaN for a user who has one that is missing."""
    gaps = np.isnan(column)
    inside = np.clip(np.where(gaps, low, column), low, high)
    codes = np.minimum(((inside / 2 - low / 2) / (high / 2 - low / 2) * bins).astype(np.int64), bins - 1)
    counts = np.bincount(owners * bins + codes, minlength=len(sizes) * bins).reshape(len(sizes), bins)
    shares = counts / sizes[:, None]
    shares[owners[gaps]] = np.nan
    return np.asarray(shares)


def _ends(counts: NDArray[np.float64], quantiles: Range) -> tuple[int, int]:
    """The edges below the lower and above the upper quantile of a noisy histogram; at least a bin apart."""
    bins = len(counts)
    total = float(counts.sum())
    if total <= 0:  # nothing but noise: the whole of what was declared
        return 0, bins
    upto = np.maximum.accumulate(np.cumsum(counts) / total)
    first = int(np.searchsorted(upto, quantiles[0], side="right"))
    last = int(np.searchsorted(upto, quantiles[1], side="left")) + 1
    first = min(first, bins - 1)
    return first, min(max(last, first + 1), bins)
