"""Which words, cities or tokens many users have: noisy counts of users, of declared keys or above a threshold."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError, check_number, refuse
from ...federated.mechanism import grid_of
from ...privacy.events import GaussianEvent
from ..user_ids import ids_array
from .noisy_sum import Vectors, on_grid

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
            if _is_gap(key) or (known is not None and not _among(key, known)):
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


def _is_gap(key: object) -> bool:
    """None, NaN, and the gaps of pandas, which cannot be compared."""
    if key is None or type(key).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(key, numbers.Number) and bool(key != key)


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
    for method in ("to_pylist", "to_list", "tolist"):
        if hasattr(values, method):
            values = getattr(values, method)()
            break
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise refuse("values", type(values).__name__, "one key or one list of keys for each id", "give a column")
    return [row.tolist() if hasattr(row, "tolist") else row for row in values]
