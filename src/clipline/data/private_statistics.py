"""Private statistics of users' data, for preprocessing: released with noise, charged, and named by every guarantee.

Begin with `PrivateStatistics`, the last here. `noisy_sum` is the way through the mechanism that all take: one vector a
user, by the same clipping and the same mechanism as a round of training. A user's vector has norm at most 1 by
construction, and the clip at 1 makes sure. Its entries are multiples of 2^-24, so that sums of up to 2^29 users are
exact in float64, in any order.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import PopulationError, check_number, check_whole, nearest, refuse
from ..federated.clipping import PartialSums
from ..federated.mechanism import GaussianMechanism, grid_of
from ..privacy.accountant import account
from ..privacy.events import GaussianEvent, NoSampling, Statistic
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger
from ..privacy.relations import Relation
from ..random.streams import NormalGenerator, Streams
from .population import Population, scaled_population
from .user_ids import ids_array, is_missing, listed

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


# Scales of fields: means and standard deviations of clipped values, and quantiles by noisy histograms. Each user counts
# once. What bounds values is declared.

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


# Which words, cities or tokens many users have: noisy counts of users, of declared keys or above a threshold.

Key = str | int
_BLOCK_USERS = 1 << 14


@dataclass(frozen=True, eq=False)
class Vocabulary(Sequence[Key]):
    """Keys that many users have, the most frequent first: give it as `categories={"city": vocabulary}`.

    `users[k]` is the noisy number of users with key k among the ones each may count for, `noise_stddev` that of its
    noise, `threshold` the number at or above which a key is shown; both in users. A slice is a vocabulary too, with the
    same charge.
    """

    event: GaussianEvent = field(repr=False)
    keys: tuple[Key, ...]
    users: tuple[float, ...] = field(repr=False)
    noise_stddev: float = field(repr=False)
    threshold: float = field(repr=False)

    @overload
    def __getitem__(self, place: int) -> Key: ...
    @overload
    def __getitem__(self, place: slice) -> Vocabulary: ...
    def __getitem__(self, place: int | slice) -> Key | Vocabulary:
        if isinstance(place, slice):
            return replace(self, keys=self.keys[place], users=self.users[place])
        return self.keys[place]

    def __len__(self) -> int:
        return len(self.keys)


def keys_by_user(user_ids: Any, values: Any, most: int, candidates: Sequence[Key] | None) -> list[list[Key]]:
    """The keys that each user counts for, PRIVATE: the user's most frequent ones, at most so many, ties in order.

    `values` has one key for each id, or a list of keys. Gaps are left out, and so is what is not among `candidates`.
    With `user_ids=None` every row is a user of its own.
    """
    rows = _plain_rows(values)
    ids = np.arange(len(rows)) if user_ids is None else ids_array("user_ids", user_ids)
    if len(rows) != len(ids):
        raise PopulationError(f"values are {len(rows)} but user_ids are {len(ids)}: give as many of each")
    known = None if candidates is None else set(candidates)
    counts: dict[Any, Counter[Key]] = {}
    for user, row in zip(ids.tolist(), rows, strict=True):
        mine = counts.setdefault(user, Counter())
        for key in row if isinstance(row, list | tuple) else (row,):
            if is_missing(key) or (known is not None and not _among(key, known)):
                continue
            mine[_checked(key)] += 1
    kinds = {type(key) for mine in counts.values() for key in mine}
    if len(kinds) > 1:
        raise PopulationError("values mix text and whole numbers but must be of one kind: convert one of them")
    return [sorted(mine, key=lambda key: (-mine[key], key))[:most] for mine in counts.values()]


def key_vectors(chosen: Sequence[Sequence[Key]], places: Mapping[Key, int], most: int) -> Iterator[Vectors]:
    """What each user adds: 1 / sqrt(most) to each of at most `most` keys, so a norm of at most 1."""
    weight = on_grid(np.array([1 / math.sqrt(most)]))[0]
    for start in range(0, len(chosen), _BLOCK_USERS):
        block = chosen[start : start + _BLOCK_USERS]
        owners = np.repeat(np.arange(len(block)), [len(keys) for keys in block])
        at = np.array([places[key] for keys in block for key in keys], np.int64)
        yield Vectors(len(block), owners, at, np.full(len(at), weight))


def threshold_for(most: int, noise_multiplier: float, threshold_delta: float) -> float:
    """The noisy sum, in norms, below which a key is not shown, so that keys of one user show with this chance at most.

    A key that one user alone has a sum of 1 / sqrt(most) plus noise; there are at most `most` of them, with independent
    noise. The grid's rounding is allowed for.
    """
    each = -math.expm1(math.log1p(-threshold_delta) / most)
    stddev = noise_multiplier * (1 + 1e-6)  # the mechanism's own may be larger by its rounding slack
    return 1 / math.sqrt(most) + stddev * -NormalDist().inv_cdf(each) + 2 * grid_of(stddev)


def shown(
    event: GaussianEvent,
    keys: Sequence[Key],
    noisy: NDArray[np.float64],
    most: int,
    threshold: float,
    size: int | None,
) -> Vocabulary:
    """The keys whose noisy sum reaches the threshold, the most frequent first, at most `size`."""
    order = sorted(np.flatnonzero(noisy >= threshold).tolist(), key=lambda place: (-noisy[place], keys[place]))[:size]
    unit = math.sqrt(most)
    return Vocabulary(
        event,
        tuple(keys[place] for place in order),
        tuple(float(noisy[place]) * unit for place in order),
        event.noise_multiplier * unit,
        threshold * unit,
    )


def checked_candidates(candidates: Iterable[Key]) -> tuple[Key, ...]:
    """Declared keys: text or whole numbers, of one kind, none twice."""
    way_out = "list the keys that you know beforehand, as in ['Bern', 'Rome']"
    if isinstance(candidates, str | bytes) or not isinstance(candidates, Iterable):
        raise refuse("candidates", type(candidates).__name__, "a list of keys", way_out)
    keys = tuple(_checked(key) for key in candidates)
    if not keys or len(set(keys)) < len(keys) or len({type(key) for key in keys}) > 1:
        raise refuse("candidates", "a list", "at least 1 key, all of one kind, each once", way_out)
    return keys


def checked_delta(threshold_delta: object) -> float:
    """The share of delta that a threshold takes."""
    way_out = "give far less than the delta of the training, such as 1e-8"
    return check_number("threshold_delta", threshold_delta, above=0, at_most=0.01, way_out=way_out)


def _checked(key: object) -> Key:
    if isinstance(key, str):
        return key
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return int(key)
    raise _no_key(key)


def _among(key: object, known: set[Key]) -> bool:
    """Whether a key is among those that were declared. What holds lists or dicts can be no key, and is refused."""
    try:
        return key in known
    except TypeError:
        raise _no_key(key) from None


def _no_key(key: object) -> PopulationError:
    return PopulationError(f"values hold {type(key).__name__} but keys are text or whole numbers: convert them")


def _plain_rows(values: Any) -> list[Any]:
    """One entry a row, in Python's own types: from lists, arrays and columns of any library."""
    values = listed(values)
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise refuse("values", type(values).__name__, "one key or one list of keys for each id", "give a column")
    return [listed(row) for row in values]


_MOST_ENTRIES = 1 << 24  # of the sum of one statistic


class PrivateStatistics:
    """Statistics of users' data with user-level noise, for preprocessing. Each call is one event of the ledger.

    Every user adds one vector of norm at most 1. So a statistic with `noise_multiplier` 20 costs as much as one round
    without sampling at 20. Whatever bounds values (ranges, bins, keys a user) is declared, never read from data.

    Pass it on as `Training(..., preprocessing=statistics)`: noise, budget and guarantee then count what it has
    released. A population that was scaled by a statistic, or whose categories are a vocabulary, carries the charge
    itself. Statistics of a `one_each` population protect one example, and a training of users refuses them.

    Args:
      seed: Lets the noise be drawn again, and whoever knows it can subtract the noise. Never use one seed on different
        data: equal questions then get equal noise. Left out, noise comes from the operating system.

    Raises:
      SettingError: If `seed` is not a whole number at least 0.

    Example:
      >>> statistics = cl.PrivateStatistics()
      >>> moments = statistics.moments(people, {"age": (0, 120)}, noise_multiplier=20.0)
    """

    def __init__(self, seed: int | None = None) -> None:
        self._streams = Streams(0, "system") if seed is None else Streams(seed)
        self._begun: list[GaussianEvent] = []  # charged before the noise is drawn, whatever fails later

    def __repr__(self) -> str:
        return f"PrivateStatistics({len(self._begun)} released)"

    def __iter__(self) -> Iterator[GaussianEvent]:
        """The event of each release, as `Training(preprocessing=...)` takes them."""
        return iter(tuple(self._begun))

    def __len__(self) -> int:
        return len(self._begun)

    def guarantee(self, *, delta: float, relation: Relation | str = Relation.ADD_OR_REMOVE) -> Guarantee:
        """What everything released so far costs, without any training.

        Args:
          delta: The chance that is left for a larger loss.
          relation: Which two populations are neighbours.

        Returns:
          The guarantee.
        """
        units = {event.statistic.example_level for event in self._begun if event.statistic is not None}
        if len(units) > 1:
            raise refuse(
                "statistics", "of examples and of users", "all of one unit of privacy",
                "use one PrivateStatistics for one_each populations and another for those of users",
            )  # fmt: skip
        found = account(Ledger().with_statistics(self), delta=delta, relation=Relation.named(relation))
        return replace(found, example_level=units == {True})

    def moments(self, population: Population, ranges: Mapping[str, Range], *, noise_multiplier: float) -> Moments:
        """Means and standard deviations of fields, together in one event.

        Values are clipped to the declared range. A user counts by the mean of the user's own examples. A user without
        examples, or with a value that is NaN, adds nothing.

        Args:
          population: The users.
          ranges: Field to least and largest value.
          noise_multiplier: Noise, in users' contributions.

        Returns:
          Means over users, and standard deviations about them.

        Raises:
          SettingError: If a range is empty or a field is unknown.

        Example:
          >>> statistics.moments(people, {"age": (0, 120)}, noise_multiplier=20.0)
        """
        checked = checked_ranges(population, ranges)
        dim = 1 + 2 * sum(widths(population, checked).values())
        name, declared = f"mean and standard deviation of {_named(checked)}", (checked, widths(population, checked))
        event, rng = self._charge(name, declared, noise_multiplier, dim, example_level=population.example_level)
        noisy, _ = noisy_sum(moment_vectors(population, checked), dim, event.noise_multiplier, rng)
        return moments_from(noisy, event, population, checked)

    def ranges(
        self,
        population: Population,
        ranges: Mapping[str, Range],
        *,
        noise_multiplier: float,
        quantiles: Range = (0.01, 0.99),
        bins: int = 64,
    ) -> Ranges:
        """Where most values lie. Each user's examples together count as one.

        Args:
          population: The users.
          ranges: Field to least and largest value; values beyond count as its ends.
          noise_multiplier: Noise, in users' contributions.
          quantiles: Which part of the values to cover.
          bins: Into how many equal bins a range is cut. The answer lies on their edges.

        Returns:
          The bins that hold these quantiles, by field.

        Raises:
          SettingError: If a range is empty or a field is unknown.

        Example:
          >>> statistics.ranges(people, {"km": (0, 1000)}, noise_multiplier=20.0)
        """
        checked = checked_ranges(population, ranges)
        bins = check_whole("bins", bins, at_least=2, at_most=1 << 16, way_out="64 is a usual choice")
        if not isinstance(quantiles, tuple | list) or len(quantiles) != 2:
            raise refuse("quantiles", quantiles, "(lower, upper)", "give (0.01, 0.99)")
        lower = check_number("quantiles[0]", quantiles[0], at_least=0, below=1, way_out="give (0.01, 0.99)")
        upper = check_number("quantiles[1]", quantiles[1], above=lower, at_most=1, way_out="give (0.01, 0.99)")
        dim = bins * sum(widths(population, checked).values())
        name, declared = f"ranges of {_named(checked)}", (checked, widths(population, checked), bins, lower, upper)
        event, rng = self._charge(name, declared, noise_multiplier, dim, example_level=population.example_level)
        noisy, _ = noisy_sum(histogram_vectors(population, checked, bins), dim, event.noise_multiplier, rng)
        return ranges_from(noisy, event, population, checked, bins, (lower, upper))

    def vocabulary(
        self,
        user_ids: Any,
        values: Any,
        *,
        noise_multiplier: float,
        most_per_user: int = 8,
        candidates: Iterable[Key] | None = None,
        threshold_delta: float = 1e-8,
        size: int | None = None,
        name: str = "values",
    ) -> Vocabulary:
        """Keys that many users have.

        Args:
          user_ids: Whose each value is. None counts every row as a user of its own, for a training on `one_each`.
          values: A text or whole number for each id, or a list of them.
          noise_multiplier: Noise, in users' contributions.
          most_per_user: A user counts for at most so many keys, those most frequent in the user's own rows.
          candidates: Declared keys. Those at three standard deviations of the noise or above are given. Left out, keys
            come from the data and are shown above a threshold only.
          threshold_delta: Chance at most that a key of a single user shows. It is taken off the delta of the guarantee.
          size: Keep so many, the most frequent.
          name: For the guarantee.

        Returns:
          The keys, which `categories` and `lengths` take.

        Raises:
          SettingError: If a number is outside its range.

        Example:
          >>> cities = statistics.vocabulary(frame["rider"], frame["city"], noise_multiplier=2.0)
        """
        way_out = "8 is a usual choice; more show rarer keys, with more noise on each"
        most = check_whole("most_per_user", most_per_user, at_least=1, at_most=1 << 16, way_out=way_out)
        if size is not None:
            size = check_whole("size", size, at_least=1, way_out="give how many keys to keep, or leave it out")
        declared = None if candidates is None else checked_candidates(candidates)
        delta = 0.0 if declared is not None else checked_delta(threshold_delta)
        chosen = keys_by_user(user_ids, values, most, declared)
        keys = declared if declared is not None else tuple(sorted({key for mine in chosen for key in mine}))
        what = f"vocabulary of {name}" + (f", threshold delta {delta:g}" if delta else "")
        # The number of keys is not among what is declared: without candidates it is read from the data.
        told = (most, declared, delta, size)
        event, rng = self._charge(what, told, noise_multiplier, len(keys), delta, example_level=user_ids is None)
        z = event.noise_multiplier
        threshold = threshold_for(most, z, delta) if delta else 3 * z
        places = {key: place for place, key in enumerate(keys)}
        noisy, _ = noisy_sum(key_vectors(chosen, places, most), len(keys), z, rng)
        return shown(event, keys, noisy, most, threshold, size)

    def _charge(
        self,
        name: str,
        declared: tuple[object, ...],
        noise_multiplier: float,
        entries: int,
        threshold_delta: float = 0.0,
        *,
        example_level: bool,
    ) -> tuple[GaussianEvent, NormalGenerator]:
        """Put one release on record, before anything of it is computed: its event, and the generator of its noise.

        With a seed, all that the caller `declared` decides which release it is and which noise it gets: another
        question is another release. Nothing of it may come from the data.
        """
        way_out = "20 is a usual choice for thousands of users: more noise costs less epsilon"
        z = check_number("noise_multiplier", noise_multiplier, above=0, at_most=1e9, way_out=way_out)
        if entries > _MOST_ENTRIES:
            raise refuse("entries of a statistic", entries, f"at most {_MOST_ENTRIES}", "ask for fewer fields or bins")
        from_seed = self._streams.noise_source == "seed"
        identity = secrets.token_hex(8)
        if from_seed:
            told = f"{self._streams.seed}/{len(self._begun)}/{name}/{z!r}/{declared!r}/{example_level}"
            identity = hashlib.blake2b(told.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        statistic = Statistic(name, identity, threshold_delta, from_seed, example_level)
        event = GaussianEvent(NoSampling(), z, statistic)
        self._begun.append(event)
        return event, self._streams.statistic(identity)


def _named(ranges: Mapping[str, Range]) -> str:
    """Fields with the ranges that were declared, for the guarantee."""
    words = ", ".join(f"{name} in {low:g} to {high:g}" for name, (low, high) in ranges.items())
    return words if len(words) <= 300 else f"{len(ranges)} fields"
