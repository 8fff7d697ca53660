"""Users and their examples, stored flat: all examples of all users end to end, and one offset per user."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError
from ..privacy.events import GaussianEvent
from .array_checks import check_field, check_finite, check_user_ids, checked_offsets, overlapping
from .packed_field import Field, is_mapped

_WHOLE = re.compile(rb"-?[0-9]{1,18}")  # an id that is a whole number written as text


class ColumnKeywords(TypedDict, total=False):
    """What may be said of columns, by keyword; `Population.from_arrays` says what each means."""

    missing: float | str | None
    fill: Mapping[str, float | str] | None
    categories: Mapping[str, Sequence[str | int]] | None
    timestamps: Mapping[str, str] | None
    lengths: Mapping[str, int] | None
    pad: float | None
    scale: Mapping[str, Sequence[Any]] | None


@dataclass(frozen=True, eq=False, repr=False)
class Population:
    """`len(population)` users; user i owns the rows `offsets[i]:offsets[i + 1]` of every field.

    A user may own no row, one, or very many. Fields are arrays whose first axis counts examples, or lists of a declared
    width that are padded when they are read, see `PackedField`. They may be memory maps, in which case training reads
    only the rows of sampled users. NaN and infinity are refused, unless
    `column_options` say `missing="zero-update"`; a memory map is not read for that: stores are checked when made.
    """

    offsets: NDArray[np.int64]  # (users + 1,), from 0 to the number of examples, never falling
    fields: Mapping[str, Field]  # name -> (examples, ...)
    user_ids: NDArray[Any] | None = None  # (users,), the caller's own names of the users
    column_options: Mapping[str, Any] = field(default_factory=dict)  # how columns became fields, for `fields_of`
    charges: tuple[GaussianEvent, ...] = ()  # private statistics that fields were made by; a training counts them
    example_level: bool = False  # whether every user is one example, by the way the population was made: `one_each`

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", checked_offsets(self.offsets))
        if not isinstance(self.fields, Mapping) or not self.fields:
            raise PopulationError("population has 0 fields but needs at least 1: give for instance x=... and y=...")
        for name, values in self.fields.items():
            check_field(name, values, self.examples)
            if not is_mapped(values) and self.column_options.get("missing") != "zero-update":
                check_finite(f"field {name!r}", values)
        if self.user_ids is not None:
            check_user_ids(self.user_ids, len(self))
        if self.example_level and not self.examples == len(self) == self.largest() * len(self):
            raise PopulationError("example_level=True but a user has not one example: use Population.one_each")

    @classmethod
    def from_arrays(
        cls,
        user_ids: Any,
        *,
        known_users: Any = None,
        missing: float | str | None = None,
        fill: Mapping[str, float | str] | None = None,
        categories: Mapping[str, Sequence[str | int]] | None = None,
        timestamps: Mapping[str, str] | None = None,
        lengths: Mapping[str, int] | None = None,
        pad: float | None = None,
        scale: Mapping[str, Sequence[Any]] | None = None,
        **fields: Any,
    ) -> Population:
        """Group examples by user: `from_arrays(user_ids, x=images, y=labels)`.

        `user_ids[k]` says whose example k is: text, whole numbers or UUIDs, in any order, in a list, a NumPy array, or
        a column of pandas, polars or pyarrow; none may be missing. The order of a user's own examples is kept.
        `known_users` adds users who have no example at all: they can be sampled and are protected like others.

        Fields hold numbers and keep their type. Gaps (NaN, None, null) are refused unless `missing` is a number that
        fills them or "zero-update" (a user who trains on one adds nothing); `fill` does the former by field. Infinity
        is refused unless "zero-update". `categories={"city": ["Bern", "Rome"]}` gives 0, 1, and 2 for everything else;
        `timestamps={"start": "hours since 2026-01-01"}` counts. `lengths={"tokens": 128}` takes lists of any length,
        cut or, with `pad` (0), filled to this width in a batch, and `tokens_length` says how many entries count.
        `scale={"age": (40, 20)}` subtracts and divides. All are stored as `column_options`.
        """
        options = ColumnKeywords(
            missing=missing, fill=fill, categories=categories, timestamps=timestamps, lengths=lengths, pad=pad,
            scale=scale,
        )  # fmt: skip
        population: Population = _data().population_from_arrays(user_ids, fields, known_users, _given(options))
        return population

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        user: str,
        *,
        fields: Sequence[str] | None = None,
        text: Callable[[Sequence[str]], NDArray[Any]] | None = None,
        known_users: Any = None,
        **columns: Unpack[ColumnKeywords],
    ) -> Population:
        """Group the rows of a dataframe by user: `from_dataframe(rides, user="rider")`.

        `frame` is a DataFrame of pandas or polars, a Table of pyarrow, or a `Dataset` of Hugging Face. The column
        `user` says whose row it is, and holds whole numbers, text or UUIDs. Each other column becomes a field, or only
        those in `fields`; a column of equally long lists, or of any with `lengths`, becomes a field with one more axis.
        One of text is refused unless `text` turns its texts into an array of numbers (or lists, with `lengths`), or its
        `categories` are listed. `columns` are the options of `from_arrays`: missing, fill, categories and so on.
        """
        options = _given(columns)
        population: Population = _data().population_from_dataframe(frame, user, fields, text, known_users, options)
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
        **columns: Unpack[ColumnKeywords],
    ) -> Population:
        """Group the rows of a file by user: `from_table("rides.parquet", user="rider")`.

        Parquet, CSV, JSONL (the last two also as `.gz`, `.bz2`, `.xz`, `.zst`) or NPZ, as the name ends. Columns are
        read as in `from_dataframe`; users in CSV are text, as written. The file may be larger than memory: rows are
        grouped on disk, in temporary files in the folder `scratch` (the system's unless given), which are deleted at
        once and whose space is free again when the population is. Nothing else is left behind. To group a large file
        once and open it often, use `clipline data prepare table` and `Population.open`.
        """
        options = _given(columns)
        population: Population = _data().population_from_table(path, user, fields, text, known_users, scratch, options)
        return population

    @classmethod
    def from_dataset(
        cls,
        dataset: Any,
        user_ids: Any,
        *,
        fields: Sequence[str] = ("x", "y"),
        known_users: Any = None,
        **columns: Unpack[ColumnKeywords],
    ) -> Population:
        """Group the items of a torch `Dataset` by user: `from_dataset(images, writers)`.

        `user_ids` has one id for each item, or is the key of the id where items are dicts. An item that is a tuple has
        the `fields` in order; one that is a dict has its own names. Every item is read once, into memory.
        """
        options = _given(columns)
        population: Population = _data().population_from_dataset(dataset, user_ids, fields, known_users, options)
        return population

    @classmethod
    def from_images(
        cls,
        folder: str | Path,
        table: Any,
        user: str,
        *,
        size: tuple[int, int],
        channels: int = 3,
        path: str = "file",
        field: str = "x",
        known_users: Any = None,
        **columns: Unpack[ColumnKeywords],
    ) -> Population:
        """Group the pictures of a folder by user: `from_images("faces", "faces.csv", user="person", size=(64, 64))`.

        `table` is a dataframe, a CSV or Parquet file, or a dict, from file to user or of columns. Its column `path` has
        the file of each row inside the folder, and the others become fields. PNG and JPEG become the field `field`,
        (rows, channels, height, width) uint8, in memory. Needs Pillow: `pip install 'clipline[images]'`.
        """
        read = _data().population_from_images
        population: Population = read(folder, table, user, path, field, size, channels, known_users, _given(columns))
        return population

    @classmethod
    def one_each(
        cls,
        dataset: Any = None,
        *,
        fields: Sequence[str] | None = None,
        missing: float | str | None = None,
        fill: Mapping[str, float | str] | None = None,
        categories: Mapping[str, Sequence[str | int]] | None = None,
        timestamps: Mapping[str, str] | None = None,
        lengths: Mapping[str, int] | None = None,
        pad: float | None = None,
        scale: Mapping[str, Sequence[Any]] | None = None,
        **arrays: Any,
    ) -> Population:
        """Every example is a user of its own: `one_each(x=images, y=labels)`, a dataframe, or a torch `Dataset`.

        The guarantee is then for one example, and says so. Ids are numbers from 0; items are as in `from_dataset`, with
        "x" and "y" as `fields` unless given, and rows and options of columns as in `from_dataframe`.
        """
        options = ColumnKeywords(
            missing=missing, fill=fill, categories=categories, timestamps=timestamps, lengths=lengths, pad=pad,
            scale=scale,
        )  # fmt: skip
        population: Population = _data().population_one_each(dataset, fields, arrays, _given(options))
        return population

    @classmethod
    def open(cls, folder: str | Path) -> Population:
        """Open a store (of `save` or `clipline data prepare`) as memory maps: a user's examples are read when needed.

        Offsets and ids are read through once and checked, whoever wrote them.
        """
        population: Population = _data().open_population(folder)
        return population

    def save(self, folder: str | Path) -> Path:
        """Store as one `.npy` file per array (two of lists) and a manifest with checksums, for `open`.

        The folder must not exist yet or be empty; it is complete or, after an error, untouched.
        """
        path: Path = _data().save_population(self, folder)
        return path

    def split(self, test: float | int = 0.1, *, seed: int = 0) -> tuple[Population, Population]:
        """Split by user: those to train on, and those to test on. Nobody is in both, and everybody is in one.

        A fraction `test` sends each user to the test half with this chance, by a hash of the seed and the user's own
        id: users who are added, removed or reordered move nobody else. So the number of test users is near
        `test * len(self)`, not equal to it: 100 of 1000, give or take 10. A whole number `test` takes exactly so many,
        those with the lowest hashes; then one user more or less can move one other. To split a half again, give another
        `seed`: by the same one, those with low hashes are gone already.

        Users without ids are told apart by their place in this population, which becomes their id in the halves; who
        is removed then moves those who come after. A half without users is refused. Rows are copied; those of large
        memory maps into temporary files, deleted at once, whose space is free again when the halves are.
        """
        chosen = _data().users_to_test(self, test, seed)
        ids = np.arange(len(self)) if self.user_ids is None else self.user_ids
        return self._of_users(~chosen, ids), self._of_users(chosen, ids)

    def subset(self, users: ArrayLike) -> Population:
        """The users at these places, or those where an array of bool is true, in the order of this population.

        `np.isin(population.user_ids, names)` chooses by id. Rows are copied as by `split`. Nobody may come twice. Users
        without ids get their place here as id, so that their randomness stays theirs.
        """
        chosen = _data().users_at(self, users)
        return self._of_users(chosen, np.arange(len(self)) if self.user_ids is None else self.user_ids)

    def fields_of(self, frame: Any, *, text: Callable[[Sequence[str]], NDArray[Any]] | None = None) -> dict[str, Any]:
        """The columns of a new dataframe, with or without users, as this population's fields: for predictions.

        The `column_options` of this population are applied, and every field comes out in its type and shape, or is
        refused. Fields that are missing in the frame, such as the label, are left out.
        """
        fields: dict[str, Any] = _data().fields_like(self, frame, text)
        return fields

    def _of_users(self, chosen: NDArray[np.bool_], ids: NDArray[Any]) -> Population:
        """The users where `chosen` is true, with copies of their rows; `ids` are those of everybody."""
        sizes = np.diff(self.offsets)
        offsets = np.zeros(int(chosen.sum()) + 1, np.int64)
        np.cumsum(sizes[chosen], out=offsets[1:])
        rows = np.repeat(chosen, sizes)
        fields = {name: _data().copied_rows(field, rows, int(offsets[-1])) for name, field in self.fields.items()}
        return replace(self, offsets=offsets, fields=fields, user_ids=np.array(ids[chosen]))

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

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """The fields of each user in turn, as `of` gives them."""
        return (self.of(user) for user in range(len(self)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def examples(self) -> int:
        """Number of examples of all users together."""
        return int(self.offsets[-1])

    def largest(self) -> int:
        """Number of examples of the user with most. Looks at everybody."""
        return max(int(np.diff(part).max(initial=0)) for part in overlapping(self.offsets))

    def size(self, user: int) -> int:
        """Number of examples of one user."""
        return int(self.offsets[user + 1] - self.offsets[user])

    def identities(self, users: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the randomness of each of these users is keyed by: a function of the user's own id and nothing else.

        Whole numbers stand for themselves, also among fractions or as text, as one user's id may make all be read.
        Other ids stand for a hash of them. Without `user_ids` the place in the population is the id.
        """
        if self.user_ids is None:
            return users.astype(np.uint64)
        ids = self.user_ids[users]
        if ids.dtype.kind in "iub":
            return np.asarray(ids.astype(np.uint64))
        given = [_id_bytes(one) for one in ids.tolist()]
        digests = [hashlib.blake2b(one, digest_size=8).digest() for one in given]
        hashes = np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)
        numbers = [place for place, one in enumerate(given) if _WHOLE.fullmatch(one)]
        hashes[numbers] = np.array([int(given[place]) for place in numbers], np.int64).astype(np.uint64)
        if ids.dtype.kind == "f":
            whole = (ids == np.rint(ids)) & (np.abs(ids) < 2**53)
            hashes[whole] = ids[whole].astype(np.int64).astype(np.uint64)
        return hashes

    def of(self, user: int) -> dict[str, NDArray[Any]]:
        """The fields of one user, each (size, ...), as views; lists are padded."""
        start, stop = int(self.offsets[user]), int(self.offsets[user + 1])
        return {name: field[start:stop] for name, field in self.fields.items()}


def share_users(test: Population, training: Population) -> bool:
    """Whether a user with test examples also trains, by id. False where either population has no ids of its own.

    The ids of `Population.one_each` number the examples of one table, so they say nothing about another one.
    """
    if any(one.user_ids is None or one.example_level for one in (test, training)):
        return False
    owners = np.flatnonzero(np.diff(test.offsets))
    ids, others = np.asarray(test.user_ids)[owners], np.asarray(training.user_ids)
    if (ids.dtype.kind in "iu") != (others.dtype.kind in "iu"):  # 7 in a dataframe is "7" in CSV
        return not set(map(_id_bytes, ids.tolist())).isdisjoint(map(_id_bytes, others.tolist()))
    measured = test.identities(owners)
    return bool(np.isin(measured, training.identities(np.arange(len(training)))).any())


def _given(options: ColumnKeywords) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _data() -> ModuleType:
    """The code that reads and writes populations, imported late, as it imports this module."""
    from . import population_io

    return population_io


def _id_bytes(user_id: object) -> bytes:
    return user_id if isinstance(user_id, bytes) else str(user_id).encode("utf-8", "surrogatepass")
