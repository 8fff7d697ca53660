"""Users and their examples, stored flat: the examples of all users concatenated, and one offset per user."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError
from ..manifest import MANIFEST, VERSION, check_field_names, read_entries
from .fingerprint import fingerprint

_STEP = 1 << 16  # entries of a long array to check at a time, to fit the cache


@dataclass(frozen=True, eq=False)
class Population:
    """`len(population)` users; user i owns the rows `offsets[i]:offsets[i + 1]` of every field.

    A user may own no row, one, or very many. Fields are arrays whose first axis counts examples; they may be memory
    maps, in which case training reads only the rows of sampled users.
    """

    offsets: NDArray[np.int64]  # (users + 1,), from 0 to the number of examples, never falling
    fields: Mapping[str, NDArray[Any]]  # name -> (examples, ...)
    user_ids: NDArray[Any] | None = None  # (users,): the caller's ids of the users

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

        `user_ids[k]` is the owner of example k (numbers or text, in any order); the order of a user's own examples is
        kept. `known_users` adds users who may have no example at all: they can be sampled and are protected like
        others.
        """
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
        if known.size or known.ndim != 1:  # an empty list has no useful type
            _check_ids("known_users", known, "give one id for each user")
        if (
            len(known) and len(ids) and known.dtype.kind != ids.dtype.kind
        ):  # concatenated they would become another type
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
        return cls(offsets, arrays, users)

    @classmethod
    def open(cls, folder: str | Path) -> Population:
        """Open a stored population as memory maps: examples are not read until a user is sampled.

        Offsets and ids are read and checked, whoever wrote them.
        """
        path = Path(folder)
        manifest = read_entries(path, "written by Population.save", "save the population again")
        if manifest.get("version") != VERSION:
            raise PopulationError(
                f"{str(path)!r} has version {manifest.get('version')!r} but this clipline reads {VERSION}: "
                "save the population again"
            )
        names, with_ids = manifest.get("fields"), manifest.get("user_ids")
        if not isinstance(names, list) or not isinstance(with_ids, bool):
            raise PopulationError(
                f"{str(path / MANIFEST)!r} must say fields, a list of names, and user_ids, true or false: "
                "save the population again"
            )
        fields = {name: _mapped(path / f"field.{name}.npy") for name in check_field_names(names)}
        offsets, user_ids = _mapped(path / "offsets.npy"), _mapped(path / "user_ids.npy") if with_ids else None
        try:
            return cls(offsets, fields, user_ids)
        except PopulationError as error:
            raise PopulationError(f"{str(path)!r}: {error}") from None

    def save(self, folder: str | Path) -> Path:
        """Store as one `.npy` file per array, for `open`. The folder must not exist yet or be empty."""
        names = check_field_names(self.fields)
        path = Path(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise PopulationError(f"{str(path)!r} is in use: give a folder that is new or empty")
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "offsets.npy", self.offsets)
        for name, field in self.fields.items():
            np.save(path / f"field.{name}.npy", field)
        if self.user_ids is not None:
            np.save(path / "user_ids.npy", self.user_ids)
        manifest = json.dumps({"version": VERSION, "fields": names, "user_ids": self.user_ids is not None})
        (path / MANIFEST).write_text(manifest, encoding="utf-8")  # last: a folder with a manifest is complete
        return path

    def fingerprint(self, *, times: bool = True) -> str:
        """A checksum of offsets, user ids and every field: name, type, shape and values. Two are equal if the data are.

        Memory maps of files above 1 GiB are not read: size, modification time in nanoseconds (unless `times` is False)
        and the checksum in the store's manifest, if there is one, are used instead. So a large file that was copied,
        and has another time, counts as changed; one that was moved does not.

        PRIVATE: it has no noise, and whoever can guess all of the data can check the guess by it.
        """
        return fingerprint(self._arrays(), times=times)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays, by unique names."""
        ids = {} if self.user_ids is None else {"user_ids": self.user_ids}
        return {"offsets": self.offsets, **ids, **{f"field {name!r}": field for name, field in self.fields.items()}}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def examples(self) -> int:
        """Number of examples of all users together."""
        return int(self.offsets[-1])

    def largest(self) -> int:
        """Number of examples of the user with most. Goes through all users."""
        return max(int(np.diff(part).max(initial=0)) for part in _overlapping(self.offsets))

    def size(self, user: int) -> int:
        """Number of examples of one user."""
        return int(self.offsets[user + 1] - self.offsets[user])

    def identities(self, users: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The keys of these users' randomness: a function of each user's own id and nothing else.

        Integer ids are used as they are, other ids are hashed. Without `user_ids` the position in the population is
        the id.
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


def _refuse_mixed(name: str, ids: object) -> None:
    """Refuse lists of mixed types. NumPy would convert all, so one user's id could change the others' ids and keys."""
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
    """`offsets` as int64, refused unless they start at 0 and never fall: otherwise two users could share a row."""
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
    # Only types that torch knows. Python objects would also be stored as pickles, which run code when they are opened.
    if field.dtype.kind not in "biufc" or field.dtype.char in "gG" or not field.dtype.isnative:
        raise PopulationError(
            f"field {name!r} is {field.dtype} but must hold numbers that torch knows: convert it, as with "
            "astype(np.float32) or astype(np.int64)"
        )


def _check_user_ids(ids: object, users: int) -> None:
    """Refuse ids that do not name each user once: a user with two entries would count as two users."""
    if not isinstance(ids, np.ndarray):
        raise PopulationError(f"user_ids are {_type(ids)} but must be a NumPy array: convert them with np.asarray")
    _check_ids("user_ids", ids, "give each user's id once, or leave user_ids out")
    if len(ids) != users:
        raise PopulationError(
            f"user_ids has {len(ids)} entries but must have {users}, one for each user: "
            "give each user's id once, or leave user_ids out"
        )
    if not (_rise(ids) or _rise(np.sort(ids))):  # the ids of a store are sorted already
        raise PopulationError(
            "user_ids name somebody twice but each entry must be another user: join the rows of one user, as "
            "Population.from_arrays does"
        )


def _check_ids(name: str, ids: NDArray[Any], way_out: str) -> None:
    """Refuse arrays that cannot be ids: more than one axis, objects, dates, NaN."""
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
    """Whether ids are strictly increasing, and so distinct."""
    return all(bool((part[1:] > part[:-1]).all()) for part in _overlapping(ids))


def _overlapping(array: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Chunks of an array, each starting with the last entry of the one before; a memory map is not loaded whole."""
    return (array[start : start + _STEP + 1] for start in range(0, len(array) - 1, _STEP))


def _as_array(name: str, values: ArrayLike) -> NDArray[Any]:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise PopulationError(f"{name} cannot become a NumPy array ({error}): give rows of equal shape") from None


def _mapped(path: Path) -> NDArray[Any]:
    """An `.npy` file as a memory map."""
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:  # NumPy parses the header as a Python literal, which can fail in many ways
        raise PopulationError(f"{str(path)!r} cannot be opened ({error}): save the population again") from None


def _type(thing: object) -> str:
    return f"of type {type(thing).__name__}"
