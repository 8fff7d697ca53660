"""Scales of fields: means and standard deviations of clipped values, and quantiles by noisy histograms.

Each user counts once. What bounds values is declared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError, check_number, nearest, refuse
from ...privacy.events import GaussianEvent
from ..population import Population, scaled_population
from .noisy_sum import Vectors, dense, means_by_user, user_blocks

Range = tuple[float, float]
_LEAST_STDDEV = 1e-3  # of half a range: below, dividing would blow noise up


class ChargedPair(tuple[NDArray[np.float64], NDArray[np.float64]]):
    """(subtract, divide) of one field with the event that released it: the charge goes wherever the pair does."""

    event: GaussianEvent

    def __new__(cls, subtract: NDArray[np.float64], divide: NDArray[np.float64], event: GaussianEvent) -> ChargedPair:
        """A pair of this event."""
        pair = super().__new__(cls, (subtract, divide))
        pair.event = event
        return pair

    def __getnewargs__(self) -> tuple[NDArray[np.float64], NDArray[np.float64], GaussianEvent]:
        """For copies and pickles."""
        return (*self, self.event)


@dataclass(frozen=True, eq=False)
class Moments(Mapping[str, ChargedPair]):
    """Private means and standard deviations by field, as scale: `scale=moments` or `moments.apply(population)`.

    `mean[name]` and `stddev[name]` have the shape of a row. A variance is at least the noise on it, so that a standard
    deviation that drowned in noise does not blow the field up. `noise_stddev[name]` is that of the noise on the mean,
    in the field's own unit: where it is not far below the standard deviation, the noise was too large for so few users.
    """

    event: GaussianEvent = field(repr=False)
    mean: Mapping[str, NDArray[np.float64]]
    stddev: Mapping[str, NDArray[np.float64]]
    users: float  # noisy number of users with an example
    noise_stddev: Mapping[str, float] = field(repr=False)

    def __getitem__(self, name: str) -> ChargedPair:
        return ChargedPair(self.mean[name], self.stddev[name], self.event)

    def __iter__(self) -> Iterator[str]:
        return iter(self.mean)

    def __len__(self) -> int:
        return len(self.mean)

    def apply(self, population: Population) -> Population:
        """The population with these fields standardised. New data are scaled alike when a model predicts."""
        return scaled_population(population, dict(self), self.event)


def checked_ranges(population: Population, ranges: Mapping[str, Range]) -> dict[str, Range]:
    """The declared range of each field, as numbers; a field must be there and hold numbers."""
    if not isinstance(ranges, Mapping) or not ranges:
        raise refuse("ranges", type(ranges).__name__, "a dict with at least 1 field", "give {'age': (0, 120)}")
    checked: dict[str, Range] = {}
    for name, both in ranges.items():
        if name not in population.fields:
            raise PopulationError(f"ranges name {name!r}, which is no field: {nearest(name, population.fields)}")
        if population.fields[name].dtype.kind not in "biuf":
            raise PopulationError(
                f"field {name!r} is {population.fields[name].dtype} but needs real numbers: leave it out"
            )
        if not isinstance(both, tuple | list) or len(both) != 2:
            raise refuse(f"ranges[{name!r}]", type(both).__name__, "(low, high)", "give (0, 120): known beforehand")
        way_out = "give the lowest and the highest value that make sense, known beforehand and not read from the data"
        low = check_number(f"low of {name!r}", both[0], at_least=-1e100, at_most=1e100, way_out=way_out)
        high = check_number(f"high of {name!r}", both[1], above=low, at_most=1e100, way_out=way_out)
        checked[name] = (low, high)
    return checked


def widths(population: Population, names: Mapping[str, Range]) -> dict[str, int]:
    """How many numbers a row of each field has."""
    return {name: math.prod(population.fields[name].shape[1:]) for name in names}


def moment_vectors(population: Population, ranges: Mapping[str, Range]) -> Iterator[Vectors]:
    """What each user adds: (1, mean of u, 2 (mean of u^2) - 1) / sqrt(1 + 2 dim), for the values u clipped to [-1, 1].

    Each of the 1 + 2 dim entries is at most 1 in size before it is divided, so that no norm is above 1.
    """
    dim = sum(widths(population, ranges).values())
    for rows, sizes in user_blocks(population, dim):
        units = [_units(population.fields[name][rows], *both) for name, both in ranges.items()]
        values = np.concatenate(units, axis=1)
        once = np.ones((len(sizes), 1))
        yield dense(
            np.concatenate([once, means_by_user(values, sizes), 2 * means_by_user(values**2, sizes) - 1], axis=1)
            / math.sqrt(1 + 2 * dim)
        )


def moments_from(
    noisy: NDArray[np.float64], event: GaussianEvent, population: Population, ranges: Mapping[str, Range]
) -> Moments:
    """Means and standard deviations read from the noisy sum; looks at no value of the population."""
    sizes = widths(population, ranges)
    dim = sum(sizes.values())
    unscaled = noisy * math.sqrt(1 + 2 * dim)
    users = max(float(unscaled[0]), 1.0)
    first = np.clip(unscaled[1 : 1 + dim] / users, -1, 1)
    second = np.clip((unscaled[1 + dim :] / users + 1) / 2, 0, 1)
    noise_on_mean = event.noise_multiplier * math.sqrt(1 + 2 * dim) / users
    noise_on_variance = noise_on_mean * np.sqrt(1 / 4 + 4 * first**2)  # of `second`, and of the square of `first`
    spread = np.sqrt(np.maximum(second - first**2, np.clip(noise_on_variance, _LEAST_STDDEV**2, 1)))
    mean, stddev, noise, start = {}, {}, {}, 0
    for name, (low, high) in ranges.items():
        part, shape = slice(start, start + sizes[name]), population.fields[name].shape[1:]
        half = high / 2 - low / 2
        mean[name] = np.reshape(low / 2 + high / 2 + half * first[part], shape)
        stddev[name] = np.reshape(half * spread[part], shape)
        noise[name] = half * noise_on_mean
        start += sizes[name]
    return Moments(event, mean, stddev, users, noise)


def _units(values: NDArray[np.generic], low: float, high: float) -> NDArray[np.float64]:
    """Rows (examples, dim) as numbers from -1 to 1; what is beyond the range counts as its end, NaN stays."""
    rows = np.clip(np.asarray(values, np.float64).reshape(len(values), -1), low, high)
    return np.asarray(np.clip((rows - (low / 2 + high / 2)) / (high / 2 - low / 2), -1, 1))


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
