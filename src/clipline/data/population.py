"""Users and their examples, stored flat: all examples of all users end to end, and one offset per user."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError, SettingError, check_number, check_whole, refuse, regular
from ..privacy.events import GaussianEvent
from ..random.streams import Streams
from .array_checks import check_field, check_finite, check_ids, check_user_ids, checked_offsets, overlapping
from .chunks import short
from .column_options import ZERO_UPDATE, ColumnOptions, charges_of
from .fields import ColumnErrors, fields_of_arrays
from .fingerprint import fingerprint
from .grouping import Rows
from .manifest import MANIFEST, WAY_OUT, check_field_names, packed_entry, read_manifest, write_manifest
from .packed_field import Field, PackedField, is_mapped, offsets_of, taken
from .readers.dataframes import (
    column_names,
    is_dataframe,
    read_column,
    read_dataframe,
    read_dataset,
    read_fields,
    read_rows,
)
from .readers.images import read_images, table_of
from .readers.tables import read_table
from .store import atomic_folder, write_arrays
from .user_ids import ids_array

_COPY_BYTES = 8 << 20  # of a field copied at a time
_IN_MEMORY = 1 << 28  # bytes of a memory-mapped field up to which `split` copies it to memory, not to disk

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
    """Users and their examples: user i owns the rows `offsets[i]:offsets[i + 1]` of every field.

    Make one with `from_table`, `from_dataframe`, `from_arrays`, `from_dataset`, `from_images`, `one_each` or `open`. A
    user may own no row, one, or very many. `len(population)` is the number of users.

    Args:
      offsets: First row of each user, and the number of rows.
      fields: Arrays whose first axis counts examples, or lists of a declared width. Memory maps are read for sampled
        users only.
      user_ids: Whole numbers or text, one for each user. Left out, a user's place is the id.
      column_options: How columns became fields.
      charges: What private statistics that were used here have cost.
      example_level: Whether each user is one example.

    Raises:
      PopulationError: If arrays do not fit together, or hold NaN or infinity that is not declared.

    Example:
      >>> people = cl.Population.from_table("rides.parquet", user="rider")
      >>> train, test = people.split(test=0.1)
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
        """Group examples by user. The order of a user's own examples is kept.

        Args:
          user_ids: Whose each example is: text, whole numbers or UUIDs, in any order. None may be missing. A list, a
            NumPy array or a column of pandas, polars or pyarrow.
          known_users: Users without an example. They can be sampled and are protected like others.
          missing: A number that fills gaps (NaN, None, null), or "zero-update": a user who trains on one contributes a
            zero update. Left out, gaps are refused.
          fill: The same by field.
          categories: Field to list of values, which become 0, 1, ...; everything else becomes the number after the
            last.
          timestamps: Field to unit and start, such as "hours since 2026-01-01".
          lengths: Field to width, for lists of any length. `NAME_length` then says how many entries count.
          pad: Fills shorter lists. 0 if left out.
          scale: Field to (centre, width), which are subtracted and divided by.
          **fields: The examples, an array for each field. They keep their type.

        Returns:
          The population.

        Raises:
          PopulationError: If lengths differ, an id is missing, or a field holds gaps or infinity.

        Example:
          >>> people = cl.Population.from_arrays(user_ids, x=images, y=labels)
        """
        options = ColumnKeywords(
            missing=missing, fill=fill, categories=categories, timestamps=timestamps, lengths=lengths, pad=pad,
            scale=scale,
        )  # fmt: skip
        return _from_arrays(user_ids, fields, known_users, _given(options))

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
        """Group the rows of a dataframe by user.

        Args:
          frame: A DataFrame of pandas or polars, a Table of pyarrow, or a `Dataset` of Hugging Face.
          user: The column that says whose each row is.
          fields: Columns to take. Left out, all others are taken.
          text: Turns the texts of a column into an array of numbers, or into lists, with `lengths`. A column of text
            needs this or `categories`.
          known_users: Users without a row.
          **columns: `missing`, `fill`, `categories`, `timestamps`, `lengths`, `pad` and `scale` of `from_arrays`.

        Returns:
          The population.

        Raises:
          PopulationError: If a column is missing or cannot become numbers.

        Example:
          >>> people = cl.Population.from_dataframe(rides, user="rider")
        """
        given = _given(columns)
        options = ColumnOptions.of(given)
        with _whole_call(f"from_dataframe(frame, user={user!r}", fields, given):
            ids, arrays = read_dataframe(frame, user, fields=fields, text=text, options=options)
        return _grouped(ids, arrays, known_users, options, charges_of(given))

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
        """Group the rows of a file by user. The file may be larger than memory; NPZ has up to 1 GiB.

        To group a large file once and open it often, use `clipline data prepare table` and `Population.open`.

        Args:
          path: Parquet, CSV, JSONL (the last two also as .gz, .bz2, .xz, .zst) or NPZ.
          user: The column that says whose each row is. Users in CSV are text, as written.
          fields: Columns to take. Left out, all others are taken.
          text: Turns the texts of a column into an array of numbers, or into lists, with `lengths`.
          known_users: Users without a row.
          scratch: Folder for temporary files, which are deleted at once. Left out, it is the system's.
          **columns: `missing`, `fill`, `categories`, `timestamps`, `lengths`, `pad` and `scale` of `from_arrays`.

        Returns:
          The population.

        Raises:
          PopulationError: If the file or a column is missing, or a column cannot become numbers.

        Example:
          >>> people = cl.Population.from_table("rides.parquet", user="rider", scale={"km": (5.0, 3.0)})
        """
        given = _given(columns)
        options = ColumnOptions.of(given)
        folder = Path(tempfile.gettempdir() if scratch is None else scratch)
        if not folder.is_dir():
            raise PopulationError(f"scratch={str(folder)!r} is no folder: make it, or leave scratch out")
        try:
            with tempfile.TemporaryDirectory(prefix="clipline-", dir=folder) as temporary:
                chunks = read_table(path, user, fields=fields, text=text, options=options)
                call = _whole_call(f"from_table({str(path)!r}, user={user!r}", fields, given)
                with call, closing(chunks), Rows(Path(temporary), finite=options.missing != ZERO_UPDATE) as rows:
                    rows.take_in(options.checked(chunks), known_users, Path(path).name)
                    arrays = _of_rows(Path(temporary), rows)
                return Population(*arrays, options.entries(), charges_of(given))
        except OSError as error:
            raise PopulationError(
                f"{str(folder)!r} cannot hold temporary files ({error}): give a folder with space as scratch=..."
            ) from None

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
        """Group the items of a torch `Dataset` by user. Every item is read once, into memory.

        If you have a `DataLoader`, give its dataset: `from_dataset(loader.dataset, ids)`. clipline makes the batches
        itself.

        Args:
          dataset: Its items are tuples or dicts of numbers.
          user_ids: An id for each item, or the key of the id if items are dicts.
          fields: Names of an item's entries, if it is a tuple. A dict has its own names.
          known_users: Users without an item.
          **columns: `missing`, `fill`, `categories`, `timestamps`, `lengths`, `pad` and `scale` of `from_arrays`.

        Returns:
          The population.

        Raises:
          PopulationError: If items differ in shape, or the ids in number.

        Example:
          >>> people = cl.Population.from_dataset(images, writers)
        """
        given = _given(columns)
        ids, items = read_dataset(dataset, user_ids, fields, ColumnOptions.of(given).lengths)
        return _from_arrays(ids, items, known_users, given)

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
        """Group the pictures of a folder by user. Needs Pillow: `pip install 'clipline[images]'`.

        Args:
          folder: Where the PNG and JPEG files are.
          table: A dataframe, a CSV or Parquet file, or a dict, from file to user or of columns.
          user: The column that says whose each picture is.
          size: Height and width that pictures are brought to.
          channels: 1 for grey, 3 for colour.
          path: The column with the file of each row, inside the folder. The other columns become fields.
          field: Name of the field of pictures, (rows, channels, height, width) uint8, in memory.
          known_users: Users without a picture.
          **columns: `missing`, `fill`, `categories`, `timestamps`, `lengths`, `pad` and `scale` of `from_arrays`.

        Returns:
          The population.

        Raises:
          PopulationError: If a picture or a column is missing or cannot be read.

        Example:
          >>> people = cl.Population.from_images("faces", "faces.csv", user="person", size=(64, 64))
        """
        given = _given(columns)
        options = ColumnOptions.of(given)
        frame = table_of(table, user, path)
        files = read_column(frame, path)
        labels = [name for name in column_names(frame) if name not in (user, path)]
        if field in labels:
            raise PopulationError(f"field={field!r} is the name of a column too: call the pictures something else")
        ids, arrays = read_dataframe(frame, user, fields=labels, options=options)
        pictures = read_images(folder, files, size, channels)
        return _grouped(ids, {field: pictures, **arrays}, known_users, options, charges_of(given))

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
        """Every example is a user of its own. The guarantee is then for one example, and says so.

        Args:
          dataset: A dataframe or a torch `Dataset`, unless arrays are given.
          fields: Names of an item's entries, or columns to take. "x" and "y" for tuples, if left out.
          missing: As in `from_arrays`.
          fill: As in `from_arrays`.
          categories: As in `from_arrays`.
          timestamps: As in `from_arrays`.
          lengths: As in `from_arrays`.
          pad: As in `from_arrays`.
          scale: As in `from_arrays`.
          **arrays: The examples, an array for each field.

        Returns:
          The population. Ids are numbers from 0.

        Raises:
          PopulationError: If arrays do not fit together.

        Example:
          >>> examples = cl.Population.one_each(x=images, y=labels)
        """
        keywords = ColumnKeywords(
            missing=missing, fill=fill, categories=categories, timestamps=timestamps, lengths=lengths, pad=pad,
            scale=scale,
        )  # fmt: skip
        if (dataset is None) == (not arrays):
            found = "both a dataset and arrays" if arrays else "neither a dataset nor arrays"
            raise PopulationError(
                f"one_each got {found} but needs one of them: give a torch Dataset, or x=... and y=..."
            )
        given = _given(keywords)
        options = ColumnOptions.of(given)
        if is_dataframe(dataset):
            columns = read_rows(dataset, fields=fields, options=options)
        else:
            if dataset is not None:
                arrays = read_dataset(dataset, None, fields or ("x", "y"), options.lengths)[1]
            columns = fields_of_arrays(arrays, options)
        first = next(iter(columns.values()))
        count = len(first) if first.ndim else 0
        entries, charges = options.entries(), charges_of(given)
        return Population(np.arange(count + 1), columns, np.arange(count), entries, charges, example_level=True)

    @classmethod
    def open(cls, folder: str | Path) -> Population:
        """Open a store as memory maps: a user's examples are read when needed.

        Offsets and ids are read through once and checked.

        Args:
          folder: Made by `save` or by `clipline data prepare`.

        Returns:
          The population.

        Raises:
          PopulationError: If the folder holds no store, or one that is damaged.

        Example:
          >>> people = cl.Population.open("stores/rides")
        """
        if not isinstance(folder, str | PathLike):
            raise refuse("folder", type(folder).__name__, "the path of a store", "give Population.open('rides'), say")
        path = Path(folder)
        manifest = read_manifest(path)
        fields = {name: _opened_field(path, name, manifest.packed.get(name)) for name in manifest.fields}
        offsets = _mapped(path / "offsets.npy")
        user_ids = _mapped(path / "user_ids.npy") if manifest.user_ids else None
        try:
            options = ColumnOptions.of(manifest.column_options).entries()
            charges = tuple(GaussianEvent.from_json(entries) for entries in manifest.charges)
            return Population(offsets, fields, user_ids, options, charges, manifest.example_level)
        except (PopulationError, SettingError, AttributeError, TypeError) as error:
            raise PopulationError(f"{str(path)!r}: {error}") from None

    def save(self, folder: str | Path) -> Path:
        """Store as `.npy` files and a manifest with checksums, for `open`.

        Args:
          folder: New or empty. It is complete or, after an error, untouched.

        Returns:
          The folder.

        Raises:
          PopulationError: If the folder has something in it.

        Example:
          >>> people.save("stores/rides")
        """
        check_field_names(self.fields)
        packed = {name: field for name, field in self.fields.items() if isinstance(field, PackedField)}
        with atomic_folder(folder) as (new, _):
            np.save(new / "offsets.npy", self.offsets)
            for name, field in self.fields.items():
                if isinstance(field, PackedField):
                    np.save(new / f"values.{name}.npy", field.values)
                    np.save(new / f"offsets.{name}.npy", field.offsets)
                else:
                    np.save(new / f"field.{name}.npy", field)
            if self.user_ids is not None:
                np.save(new / "user_ids.npy", self.user_ids)
            write_manifest(
                new, fields=list(self.fields), user_ids=self.user_ids is not None, users=len(self),
                examples=self.examples, source="Population.save", column_options=dict(self.column_options),
                charges=[event.to_json() for event in self.charges], example_level=self.example_level,
                packed={name: packed_entry(field.width, field.pad) for name, field in packed.items()},
            )  # fmt: skip
        return Path(folder)

    def split(self, test: float | int = 0.1, *, seed: int = 0) -> tuple[Population, Population]:
        """Split by user. Nobody is in both halves, and everybody is in one.

        A fraction sends each user to the test half with this chance, by a hash of the seed and the user's own id. Users
        who are added, removed or reordered move nobody else. The number of test users is near `test * len(self)`, not
        equal to it.

        A whole number takes exactly so many, those with the lowest hashes. One user more or less can then move one
        other. To split a half again, give another `seed`: those with low hashes under the same one are gone already.

        Users without ids are told apart by their place, which becomes their id in the halves. Rows are copied.

        Args:
          test: Fraction or number of users to test on.
          seed: Of the hash.

        Returns:
          Users to train on, and users to test on.

        Raises:
          PopulationError: If a half would have no user.

        Example:
          >>> train, test = people.split(test=0.1, seed=0)
        """
        chosen = _users_to_test(self, test, seed)
        ids = np.arange(len(self)) if self.user_ids is None else self.user_ids
        return self._of_users(~chosen, ids), self._of_users(chosen, ids)

    def subset(self, users: ArrayLike) -> Population:
        """Some of the users, in the order of this population. Rows are copied.

        Users without ids get their place here as id, so that their randomness stays theirs.

        Args:
          users: Their places, or an array of bool. Nobody may come twice.

        Returns:
          The population of these users.

        Raises:
          PopulationError: If a place is out of range or comes twice.

        Example:
          >>> some = people.subset(np.isin(people.user_ids, names))
        """
        chosen = _users_at(self, users)
        return self._of_users(chosen, np.arange(len(self)) if self.user_ids is None else self.user_ids)

    def fields_of(self, frame: Any, *, text: Callable[[Sequence[str]], NDArray[Any]] | None = None) -> dict[str, Any]:
        """The columns of a new dataframe as this population's fields, for predictions.

        Args:
          frame: With users or without. Fields that are missing in it, such as the label, are left out.
          text: What turned texts into numbers when this population was made.

        Returns:
          Field to array, in this population's types and shapes, with its column options applied.

        Raises:
          PopulationError: If a column cannot become its field.
        """
        options = ColumnOptions.of(self.column_options)
        arrays = read_fields(frame, self.fields, text=text, options=options)
        for name, array in arrays.items():
            if name not in self.fields:
                raise PopulationError(f"population has no field {name!r} but its lengths say so: make it again")
            wanted = self.fields[name]
            if array.shape[1:] != wanted.shape[1:]:
                raise PopulationError(
                    f"field {name!r} has rows of shape {array.shape[1:]} but the population has {wanted.shape[1:]}: "
                    "give equal shapes"
                )
            if not np.can_cast(array.dtype, wanted.dtype, "same_kind"):
                raise PopulationError(
                    f"field {name!r} is {array.dtype} but the population has {wanted.dtype}: convert it"
                )
            arrays[name] = array.astype(wanted.dtype, copy=False)
            if options.missing != ZERO_UPDATE:
                check_finite(f"field {name!r}", array)
        return arrays

    def _of_users(self, chosen: NDArray[np.bool_], ids: NDArray[Any]) -> Population:
        """The users where `chosen` is true, with copies of their rows; `ids` are those of everybody."""
        sizes = np.diff(self.offsets)
        offsets = np.zeros(int(chosen.sum()) + 1, np.int64)
        np.cumsum(sizes[chosen], out=offsets[1:])
        rows = np.repeat(chosen, sizes)
        fields = {name: _copied_rows(field, rows, int(offsets[-1])) for name, field in self.fields.items()}
        return replace(self, offsets=offsets, fields=fields, user_ids=np.array(ids[chosen]))

    def fingerprint(self, *, times: bool = True) -> str:
        """A checksum of offsets, user ids and every field. PRIVATE: it has no noise.

        Memory maps of files above 1 GiB are not read through. Size, modification time and the manifest's checksum stand
        for their values. So a large file that was copied counts as changed, and one that was moved does not.

        Args:
          times: Whether modification times count.

        Returns:
          The same text for the same data.
        """
        ids = {} if self.user_ids is None else {"user_ids": self.user_ids}
        fields = {f"field {name!r}": field for name, field in self.fields.items()}
        return fingerprint({"offsets": self.offsets, **ids, **fields}, times=times)

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
        """Number of examples of the user with most. It looks at everybody.

        Returns:
          The number.
        """
        return max(int(np.diff(part).max(initial=0)) for part in overlapping(self.offsets))

    def size(self, user: int) -> int:
        """Number of examples of one user.

        Args:
          user: Place of the user.

        Returns:
          The number.
        """
        return int(self.offsets[user + 1] - self.offsets[user])

    def identities(self, users: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the randomness of these users is keyed by: a function of the user's own id and nothing else.

        Whole numbers stand for themselves, also as text. Other ids stand for a hash of them.

        Args:
          users: Places of the users.

        Returns:
          A number for each, (users,) uint64.
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
        """The fields of one user.

        Args:
          user: Place of the user.

        Returns:
          Field to array (size, ...), as views; lists are padded.
        """
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


def _id_bytes(user_id: object) -> bytes:
    return user_id if isinstance(user_id, bytes) else str(user_id).encode("utf-8", "surrogatepass")


@contextmanager
def _whole_call(begun: str, fields: Sequence[str] | None, given: Mapping[str, Any]) -> Iterator[None]:
    """End the errors of several columns with the call that takes them all."""
    try:
        yield
    except ColumnErrors as error:
        chosen = {} if fields is None else {"fields": list(fields)}
        keywords = {option: {**given.get(option, {}), **columns} for option, columns in error.ways.items()}
        told = "".join(f", {option}={value!r}" for option, value in {**chosen, **given, **keywords}.items())
        hint = f"Population.{begun}{told}), with your own values"
        raise ColumnErrors(f"{error}\nall at once", hint, error.ways) from None


def _from_arrays(user_ids: Any, fields: Mapping[str, Any], known_users: Any, given: Mapping[str, Any]) -> Population:
    """Examples in arrays, lists or columns, grouped by user in memory."""
    options = ColumnOptions.of(given)
    ids = ids_array("user_ids", user_ids)
    return _grouped(ids, fields_of_arrays(fields, options), known_users, options, charges_of(given))


def _of_rows(folder: Path, rows: Rows) -> tuple[NDArray[np.int64], dict[str, Field], NDArray[Any]]:
    """Offsets, fields and ids of rows that a table gave: in memory, or as maps of files in the folder."""
    if rows.in_memory:
        ((counts, fields),) = rows.parts()
        return offsets_of(counts), fields, rows.user_ids
    write_arrays(folder, rows)
    packed = {name: packed_entry(f.width, f.pad) for name, f in rows.form.items() if isinstance(f, PackedField)}
    fields = {name: _opened_field(folder, name, packed.get(name)) for name in rows.form}
    return _mapped(folder / "offsets.npy"), fields, _mapped(folder / "user_ids.npy")


def _grouped(
    ids: NDArray[Any], arrays: Mapping[str, Field], known_users: Any, options: ColumnOptions,
    charges: tuple[GaussianEvent, ...],
) -> Population:  # fmt: skip
    """The examples of each user beside each other, in the order they came; users sorted by id."""
    check_ids("user_ids", ids, "give one id for each example")
    known = None if known_users is None else ids_array("known_users", known_users)
    for name, values in arrays.items():
        if values.ndim == 0 or len(values) != len(ids):
            rows = 0 if values.ndim == 0 else len(values)
            raise PopulationError(
                f"field {name!r} has {rows} rows but must have {len(ids)}, one for each entry of user_ids: "
                "give arrays of equal length"
            )
    list(options.checked([(ids, dict(arrays))]))
    if known is not None and len(known):  # an empty list has no type to go by
        check_ids("known_users", known, "give one id for each user")
        if len(ids) and known.dtype.kind != ids.dtype.kind:  # joined they would become another type
            raise PopulationError(
                f"known_users are {known.dtype} and user_ids are {ids.dtype} but both must be text or both numbers, of "
                "one kind: convert one of them"
            )
    everyone = np.concatenate([ids, known]) if known is not None and len(known) else ids
    users, owner = np.unique(everyone, return_inverse=True)
    owner = owner[: len(ids)]
    if (np.diff(owner) < 0).any():
        order = np.argsort(owner, kind="stable")
        arrays = {name: taken(values, order) for name, values in arrays.items()}
    offsets = offsets_of(np.bincount(owner, minlength=len(users)))
    return Population(offsets, arrays, users, options.entries(), charges)


def _users_to_test(population: Population, test: float | int, seed: int) -> NDArray[np.bool_]:
    """Which users `Population.split` tests on, (users,): by a hash of the seed and each user's own id."""
    if len(population) < 2:
        raise PopulationError("population has 1 user but a split needs at least 2: give more users")
    users = len(population)
    hashes = Streams(seed).user_keys("split", 0, population.identities(np.arange(users)))
    if isinstance(test, int | np.integer) and not isinstance(test, bool):
        way_out = "leave users for both halves, or give a fraction such as 0.1"
        count = check_whole("test", test, at_least=1, at_most=users - 1, way_out=way_out)
        chosen = np.zeros(users, bool)
        chosen[np.argsort(hashes, kind="stable")[:count]] = True
        return chosen
    way_out = "0.1 tests on a tenth of the users; a whole number on so many users"
    share = check_number("test", test, above=0, below=1, way_out=way_out)
    chosen = hashes < np.uint64(int(share * 2.0**64))
    if chosen.all() or not chosen.any():
        half = "train" if chosen.all() else "test"
        raise PopulationError(
            f"test={test} of {users} users leaves nobody to {half} on: give a whole number, such as test=1; or another "
            f"seed than {seed} if these users are half of a split by it, which has taken all with such hashes"
        )
    return chosen


def scaled_population(population: Population, scale: Mapping[str, Any], charge: GaussianEvent | None) -> Population:
    """The population with fields less an offset and over a divisor, as `ColumnOptions.scale` has them, copied."""
    options = {**population.column_options, "scale": {**population.column_options.get("scale", {}), **scale}}
    checked = ColumnOptions.of(options)
    checked.check_columns(population.fields)
    if twice := set(scale) & set(population.column_options.get("scale", {})):
        raise PopulationError(f"field {min(twice)!r} has a scale already: scale the population that it was made of")
    fields = dict(population.fields)
    for name in scale:
        field = fields[name]
        if isinstance(field, PackedField) and checked.scales_alike(name):
            values = _scaled_copy(checked, name, field.values)
            pad = checked.scaled_array(name, field.pad).astype(values.dtype)
            fields[name] = replace(field, values=values, pad=pad)
        else:
            fields[name] = _scaled_copy(checked, name, field)
    charges = population.charges if charge is None else (*population.charges, charge)
    return replace(population, fields=fields, column_options=checked.entries(), charges=charges)


def _scaled_copy(options: ColumnOptions, name: str, field: Field) -> NDArray[Any]:
    out = _like(field, len(field), np.dtype(np.float64 if field.dtype.itemsize > 4 else np.float32))
    step = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field))))
    for start in range(0, len(field), step):
        out[start : start + step] = options.scaled_array(name, field[start : start + step])
    return out


def _users_at(population: Population, users: ArrayLike) -> NDArray[np.bool_]:
    """Which users `Population.subset` takes, (users,), from places or from an array of bool."""
    places = np.asarray(users)
    if places.dtype == bool and places.shape == (len(population),):
        places = np.flatnonzero(places)
    if places.ndim != 1 or places.dtype.kind not in "iu" or not len(places):
        raise PopulationError(
            f"users are {places.dtype} of shape {places.shape} but must be places or {len(population)} of bool, at "
            "least one user: give whole numbers"
        )
    if int(places.min()) < 0 or int(places.max()) >= len(population) or len(np.unique(places)) < len(places):
        raise PopulationError(f"users must be distinct places from 0 to {len(population) - 1}: give each once")
    chosen = np.zeros(len(population), bool)
    chosen[places] = True
    return chosen


def _copied_rows(field: Field, rows: NDArray[np.bool_], count: int) -> Field:
    """The `count` rows where `rows` is true, read in pieces; those of a large memory map go to disk again."""
    if isinstance(field, PackedField):
        return _copied_lists(field, rows)
    out = _like(field, count, field.dtype)
    step, done = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field)))), 0
    for start in range(0, len(field), step):
        piece = field[start : start + step][rows[start : start + step]]
        out[done : done + len(piece)] = piece
        done += len(piece)
    return out


def _copied_lists(field: PackedField, rows: NDArray[np.bool_]) -> PackedField:
    offsets = offsets_of(np.diff(field.offsets)[rows])
    out = _like(field.values, int(offsets[-1]), field.dtype)
    step, done = max(1, _COPY_BYTES // max(1, field.nbytes // max(1, len(field)))), 0
    for start in range(0, len(field), step):
        bounds = field.offsets[start : start + step + 1]
        chosen = np.repeat(rows[start : start + step], np.diff(bounds))
        piece = field.values[bounds[0] : bounds[-1]][chosen]
        out[done : done + len(piece)] = piece
        done += len(piece)
    return replace(field, values=out, offsets=offsets)


def _like(field: Field, count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Room for `count` rows of the shape of those of a field: on disk if it is a large memory map."""
    shape = (count, *field.shape[1:])
    if is_mapped(field) and field.nbytes > _IN_MEMORY and count:
        with tempfile.TemporaryFile() as file:  # the map outlives its file, which has no name to clean up
            return np.memmap(file, dtype, "w+", shape=shape)
    return np.empty(shape, dtype)


def _opened_field(folder: Path, name: str, packed: Any) -> Field:
    """A field of a store as memory maps; `packed` is what the manifest says of one of lists."""
    if packed is None:
        return _mapped(folder / f"field.{name}.npy")
    values, offsets = _mapped(folder / f"values.{name}.npy"), _mapped(folder / f"offsets.{name}.npy")
    try:
        width, pad = packed["width"], packed["pad"]
        if type(width) is not int or not isinstance(pad, int | float):
            raise TypeError(f"width is {width!r} and pad {pad!r}")
        return PackedField(values, offsets, width, np.array(pad).astype(values.dtype))
    except PopulationError as error:
        raise PopulationError(f"{str(folder)!r}: field {name!r}: {error}") from None
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise PopulationError(
            f"{str(folder / MANIFEST)!r} does not say width and pad of {name!r} ({short(error)}): {WAY_OUT}"
        ) from None


def _mapped(path: Path) -> NDArray[Any]:
    """An `.npy` file as a memory map."""
    try:
        return np.lib.format.open_memmap(regular(path), mode="r")
    except Exception as error:  # NumPy reads a header as Python code, and fails in as many ways
        found = short(error).partition("; expected")[0]  # NumPy goes on with bytes of the file
        raise PopulationError(f"{str(path)!r} cannot be opened ({found}): prepare or save the data again") from None
