"""Users and their examples, stored flat: all examples of all users end to end, and one offset per user."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError, check_number, check_whole
from ..streams import Streams

_STEP = 1 << 16  # entries of a long array to look at in one go: few enough for the cache
_COPY_BYTES = 8 << 20  # of a field copied at a time
_IN_MEMORY = 1 << 28  # bytes of a memory-mapped field up to which `split` copies it to memory, not to disk


@dataclass(frozen=True, eq=False, repr=False)
class Population:
    """`len(population)` users; user i owns the rows `offsets[i]:offsets[i + 1]` of every field.

    A user may own no row, one, or very many. Fields are arrays whose first axis counts examples; they may be memory
    maps, in which case training reads only the rows of sampled users.
    """

    offsets: NDArray[np.int64]  # (users + 1,), from 0 to the number of examples, never falling
    fields: Mapping[str, NDArray[Any]]  # name -> (examples, ...)
    user_ids: NDArray[Any] | None = None  # (users,), the caller's own names of the users

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", _checked_offsets(self.offsets))
        if not isinstance(self.fields, Mapping) or not self.fields:
            raise PopulationError("population has 0 fields but needs at least 1: give for instance x=... and y=...")
        for name, field in self.fields.items():
            _check_field(name, field, self.examples)
        if self.user_ids is not None:
            _check_user_ids(self.user_ids, len(self))

    @classmethod
    def from_arrays(
        cls, user_ids: ArrayLike, *, known_users: ArrayLike | None = None, **fields: ArrayLike
    ) -> Population:
        """Group examples by user: `from_arrays(user_ids, x=images, y=labels)`.

        `user_ids[k]` says whose example k is (numbers or text, in any order); the order of a user's own examples is
        kept. `known_users` adds users who have no example at all: they can be sampled and are protected like others.
        """
        return group_by_user(user_ids, fields, known_users=known_users)

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        user: str,
        *,
        fields: Sequence[str] | None = None,
        text: Callable[[Sequence[str]], NDArray[Any]] | None = None,
        known_users: ArrayLike | None = None,
    ) -> Population:
        """Group the rows of a dataframe by user: `from_dataframe(rides, user="rider")`.

        `frame` is a DataFrame of pandas or polars or a Table of pyarrow. The column `user` says whose row it is, and
        holds whole numbers or text. Each other column becomes a field, or only those in `fields`; a column of equally
        long lists becomes a field with one more axis. A column with missing values is refused, and so is one of text
        unless `text` turns its texts into an array of numbers. `known_users` is as in `from_arrays`.
        """
        population: Population = _data().population_from_dataframe(
            frame, user, fields=fields, text=text, known_users=known_users
        )
        return population

    @classmethod
    def from_table(
        cls,
        path: str | Path,
        user: str,
        *,
        fields: Sequence[str] | None = None,
        text: Callable[[Sequence[str]], NDArray[Any]] | None = None,
        known_users: Iterable[int | str] = (),
        scratch: str | Path | None = None,
    ) -> Population:
        """Group the rows of a file by user: `from_table("rides.parquet", user="rider")`.

        Parquet, CSV, JSONL (the last two also as `.gz`, `.bz2`, `.xz`, `.zst`) or NPZ, as the name ends. Columns are
        read as in `from_dataframe`; users in CSV are text, as written. The file may be larger than memory: rows are
        grouped on disk, in temporary files in the folder `scratch` (the system's unless given), which are deleted at
        once and whose space is free again when the population is. Nothing else is left behind. To group a large file
        once and open it often, use `clipline data prepare table` and `Population.open`.
        """
        population: Population = _data().population_from_table(
            path, user, fields=fields, text=text, known_users=known_users, scratch=scratch
        )
        return population

    @classmethod
    def open(cls, folder: str | Path) -> Population:
        """Open a store (of `save` or `clipline data prepare`) as memory maps: a user's examples are read when needed.

        Offsets and ids are read through once and checked, whoever wrote them.
        """
        population: Population = _data().open_population(folder)
        return population

    def save(self, folder: str | Path) -> Path:
        """Store as one `.npy` file per array and a manifest with checksums, for `open`.

        The folder must not exist yet or be empty; it is complete or, after an error, untouched.
        """
        path: Path = _data().save_population(self, folder)
        return path

    def split(self, test: float | int = 0.1, *, seed: int = 0) -> tuple[Population, Population]:
        """Split by user: those to train on, and those to test on. Nobody is in both, and everybody is in one.

        A fraction `test` sends each user to the test half with this chance, by a hash of the seed and the user's own
        id: users who are added, removed or reordered move nobody else. So the number of test users is near
        `test * len(self)`, not equal to it: 100 of 1000, give or take 10. A whole number `test` takes exactly so many,
        those with the lowest hashes; then one user more or less can move one other.

        Users without ids are told apart by their place in this population, which becomes their id in the halves; who
        is removed then moves those who come after. A half without users is refused. Rows are copied; those of large
        memory maps into temporary files, deleted at once, whose space is free again when the halves are.
        """
        if len(self) < 2:
            raise PopulationError("population has 1 user but a split needs at least 2: give more users")
        users = np.arange(len(self))
        hashes = Streams(seed).user_keys("split", 0, self.identities(users))
        if isinstance(test, int | np.integer) and not isinstance(test, bool):
            way_out = "leave users for both halves, or give a fraction such as 0.1"
            count = check_whole("test", test, at_least=1, at_most=len(self) - 1, way_out=way_out)
            chosen = np.zeros(len(self), bool)
            chosen[np.argsort(hashes, kind="stable")[:count]] = True
        else:
            way_out = "0.1 tests on a tenth of the users; a whole number on so many users"
            share = check_number("test", test, above=0, below=1, way_out=way_out)
            chosen = hashes < np.uint64(int(share * 2.0**64))
            if chosen.all() or not chosen.any():
                half = "train" if chosen.all() else "test"
                raise PopulationError(
                    f"test={test} of {len(self)} users leaves nobody to {half} on: give a whole number, such as test=1"
                )
        ids = users if self.user_ids is None else self.user_ids
        return self._of_users(~chosen, ids), self._of_users(chosen, ids)

    def _of_users(self, chosen: NDArray[np.bool_], ids: NDArray[Any]) -> Population:
        """The users where `chosen` is true, with copies of their rows; `ids` are those of everybody."""
        sizes = np.diff(self.offsets)
        offsets = np.zeros(int(chosen.sum()) + 1, np.int64)
        np.cumsum(sizes[chosen], out=offsets[1:])
        rows = np.repeat(chosen, sizes)
        fields = {name: _copied_rows(field, rows, int(offsets[-1])) for name, field in self.fields.items()}
        return Population(offsets, fields, np.array(ids[chosen]))

    def fingerprint(self, *, times: bool = True) -> str:
        """A checksum of offsets, user ids and every field: name, type, shape and values. Two are equal if the data are.

        Memory maps of files above 1 GiB are not read through: size, modification time in nanoseconds (unless `times` is
        False) and, where the store's manifest has one, the checksum of the file stand for their values. So a large
        file that was copied, which gives it another time, counts as changed; one that was moved does not.

        PRIVATE: it has no noise, and whoever can guess all of the data can check the guess by it.
        """
        return str(_data().population_fingerprint(self, times=times))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name} {field.dtype}{list(field.shape[1:]) or ''}" for name, field in self.fields.items())
        return f"Population({len(self)} users, {self.examples} examples of {fields})"

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def examples(self) -> int:
        """Number of examples of all users together."""
        return int(self.offsets[-1])

    def largest(self) -> int:
        """Number of examples of the user with most. Looks at everybody."""
        return max(int(np.diff(part).max(initial=0)) for part in _overlapping(self.offsets))

    def size(self, user: int) -> int:
        """Number of examples of one user."""
        return int(self.offsets[user + 1] - self.offsets[user])

    def identities(self, users: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the randomness of each of these users is keyed by: a function of the user's own id and nothing else.

        Whole numbers stand for themselves, other ids for a hash of them. Without `user_ids` the place in the
        population is the id.
        """
        if self.user_ids is None:
            return users.astype(np.uint64)
        ids = self.user_ids[users]
        if ids.dtype.kind in "iub":
            return np.asarray(ids.astype(np.uint64))
        digests = [hashlib.blake2b(_id_bytes(one), digest_size=8).digest() for one in ids.tolist()]
        return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)

    def of(self, user: int) -> dict[str, NDArray[Any]]:
        """The fields of one user, each (size, ...), as views."""
        start, stop = int(self.offsets[user]), int(self.offsets[user + 1])
        return {name: field[start:stop] for name, field in self.fields.items()}


def group_by_user(
    user_ids: ArrayLike, fields: Mapping[str, ArrayLike], *, known_users: ArrayLike | None = None
) -> Population:
    """The examples as `Population.from_arrays` groups them; fields may have any name."""
    _refuse_mixed("user_ids", user_ids)
    _refuse_mixed("known_users", known_users)
    ids = _as_array("user_ids", user_ids)
    _check_ids("user_ids", ids, "give one id for each example")
    arrays = {name: _as_array(f"field {name!r}", field) for name, field in fields.items()}
    for name, field in arrays.items():
        if field.ndim == 0 or len(field) != len(ids):
            rows = 0 if field.ndim == 0 else len(field)
            raise PopulationError(
                f"field {name!r} has {rows} rows but must have {len(ids)}, one for each entry of user_ids: "
                "give arrays of equal length"
            )
    known = ids[:0] if known_users is None else _as_array("known_users", known_users)
    if known.size or known.ndim != 1:  # an empty list has no type to go by
        _check_ids("known_users", known, "give one id for each user")
    if len(known) and len(ids) and known.dtype.kind != ids.dtype.kind:  # joined they would become another type
        raise PopulationError(
            f"known_users are {known.dtype} and user_ids are {ids.dtype} but both must be text or both numbers, of "
            "one kind: convert one of them"
        )
    everyone = np.concatenate([ids, known]) if len(known) else ids
    users, owner = np.unique(everyone, return_inverse=True)
    owner = owner[: len(ids)]
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
        arrays = {name: field[order] for name, field in arrays.items()}
    offsets = np.zeros(len(users) + 1, dtype=np.int64)
    np.cumsum(np.bincount(owner, minlength=len(users)), out=offsets[1:])
    return Population(offsets, arrays, users)


def _data() -> ModuleType:
    """The code that reads and writes populations.

    The one import of the library that goes up, from `federated/` to `data/`: users expect `open` and `from_table` on
    the class itself, and Algorithm 1 should not contain file formats. It is late, so `data/` can import this module.
    """
    from ..data import population_io

    return population_io


def _copied_rows(field: NDArray[Any], rows: NDArray[np.bool_], count: int) -> NDArray[Any]:
    """The `count` rows where `rows` is true, read in pieces; those of a large memory map go to disk again."""
    shape = (count, *field.shape[1:])
    if isinstance(field, np.memmap) and field.nbytes > _IN_MEMORY and count:
        with tempfile.TemporaryFile() as file:  # the map outlives its file, which has no name to clean up
            out: NDArray[Any] = np.memmap(file, field.dtype, "w+", shape=shape)
    else:
        out = np.empty(shape, field.dtype)
    step, done = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field)))), 0
    for start in range(0, len(field), step):
        piece = field[start : start + step][rows[start : start + step]]
        out[done : done + len(piece)] = piece
        done += len(piece)
    return out


def _refuse_mixed(name: str, ids: object) -> None:
    """A list of several kinds would become one type, and with one id the others would change theirs, and their keys."""
    if isinstance(ids, list | tuple):
        kinds = {_kind(one) for one in ids}
        if len(kinds) > 1:
            raise PopulationError(
                f"{name} mixes types or holds None ({', '.join(sorted(kinds))}) but must hold one kind: convert it"
            )


def _kind(one: object) -> str:
    if isinstance(one, np.generic):
        one = one.item()
    if isinstance(one, bool | int):
        return "whole numbers" if -(2**63) <= one < 2**63 else "whole numbers beyond 64 bits with a sign"
    return type(one).__name__


def _id_bytes(user_id: object) -> bytes:
    return user_id if isinstance(user_id, bytes) else str(user_id).encode("utf-8", "surrogatepass")


def _checked_offsets(offsets: object) -> NDArray[np.int64]:
    """`offsets` as int64 if they are running totals from 0 on: with others, one row would belong to two users."""
    if not isinstance(offsets, np.ndarray) or offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        found = f"{offsets.dtype} of shape {offsets.shape}" if isinstance(offsets, np.ndarray) else _type(offsets)
        raise PopulationError(
            f"offsets are {found} but must be a NumPy array of whole numbers with one axis: give np.cumsum of the sizes"
        )
    if len(offsets) < 2:
        raise PopulationError("population has 0 users but needs at least 1: give the user id of every example")
    offsets = offsets if offsets.dtype == np.int64 else offsets.astype(np.int64)
    if int(offsets[0]) != 0:
        raise PopulationError(f"offsets start at {int(offsets[0])} but must start at 0: give users+1 offsets")
    if any(bool((part[1:] < part[:-1]).any()) for part in _overlapping(offsets)):
        raise PopulationError("offsets fall somewhere but must never fall: give running totals of the user sizes")
    return offsets


def _check_field(name: object, field: object, examples: int) -> None:
    if not isinstance(name, str):
        raise PopulationError(f"field {name!r} must be named by text: rename it")
    if not isinstance(field, np.ndarray) or field.ndim == 0:
        raise PopulationError(
            f"field {name!r} is {_type(field)} but must be a NumPy array with one row an example: convert it"
        )
    if len(field) != examples:
        raise PopulationError(
            f"field {name!r} has {len(field)} rows but must have {examples}, one for each example: "
            "give arrays of equal length"
        )
    # What torch can take. Python objects would be stored as pickles as well, which run code when they are opened.
    if field.dtype.kind not in "biufc" or field.dtype.char in "gG" or not field.dtype.isnative:
        raise PopulationError(
            f"field {name!r} is {field.dtype} but must hold numbers that torch knows: convert it, as with "
            "astype(np.float32) or astype(np.int64)"
        )


def _check_user_ids(ids: object, users: int) -> None:
    """Refuse ids that do not name each user once: who has two entries would count as two users."""
    if not isinstance(ids, np.ndarray):
        raise PopulationError(f"user_ids are {_type(ids)} but must be a NumPy array: convert them with np.asarray")
    _check_ids("user_ids", ids, "give each user's id once, or leave user_ids out")
    if len(ids) != users:
        raise PopulationError(
            f"user_ids has {len(ids)} entries but must have {users}, one for each user: "
            "give each user's id once, or leave user_ids out"
        )
    if not (_rise(ids) or _rise(np.sort(ids))):  # those of a store are sorted already
        raise PopulationError(
            "user_ids name somebody twice but each entry must be another user: join the rows of one user, as "
            "Population.from_arrays does"
        )


def _check_ids(name: str, ids: NDArray[Any], way_out: str) -> None:
    """Refuse what cannot name users: another number of axes, objects, dates, NaN."""
    if ids.ndim != 1:
        raise PopulationError(f"{name} has shape {ids.shape} but must have one axis: {way_out}")
    if ids.dtype.kind == "O":
        raise PopulationError(f"{name} mixes types or holds None but must be all numbers or all text: convert it")
    if ids.dtype.kind not in "biufUS":
        raise PopulationError(f"{name} are {ids.dtype} but must be numbers or text: convert it, as with astype(str)")
    starts = range(0, len(ids) if ids.dtype.kind == "f" else 0, _STEP)
    if not all(bool(np.isfinite(ids[start : start + _STEP]).all()) for start in starts):
        raise PopulationError(f"{name} holds NaN or infinity but must hold finite ids: drop those examples first")


def _rise(ids: NDArray[Any]) -> bool:
    """Whether each is above the one before, so that all are distinct."""
    return all(bool((part[1:] > part[:-1]).all()) for part in _overlapping(ids))


def _overlapping(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """An array part by part, each beginning with the last entry of the one before: a map is not held in memory."""
    return (array[start : start + _STEP + 1] for start in range(0, len(array) - 1, _STEP))


def _as_array(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise PopulationError(f"{name} cannot become a NumPy array ({error}): give rows of equal shape") from None


def _type(thing: object) -> str:
    return f"of type {type(thing).__name__}"
