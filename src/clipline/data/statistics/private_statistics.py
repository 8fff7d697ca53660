"""`PrivateStatistics`: asks users' data for statistics, adds noise, and remembers what that costs."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...errors import check_number, check_whole, refuse
from ...privacy.accountant import account
from ...privacy.events import GaussianEvent, NoSampling, Statistic
from ...privacy.guarantee import Guarantee
from ...privacy.ledger import Ledger
from ...privacy.relations import Relation
from ...random.streams import NormalGenerator, Streams
from ..population import Population
from .noisy_sum import noisy_sum
from .scales import (
    Moments,
    Range,
    Ranges,
    checked_ranges,
    histogram_vectors,
    moment_vectors,
    moments_from,
    ranges_from,
    widths,
)
from .vocabulary import (
    Key,
    Vocabulary,
    checked_candidates,
    checked_delta,
    key_vectors,
    keys_by_user,
    shown,
    threshold_for,
)

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
        self._streams = Streams(secrets.randbits(62), "system") if seed is None else Streams(seed)
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
