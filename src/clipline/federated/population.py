"""Users and their examples, stored flat: all examples of all users end to end, and one offset per user."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import PopulationError
from .fingerprint import fingerprint

_MANIFEST = "population.json"
_VERSION = 1


@dataclass(frozen=True, eq=False)
class Population:
    """`len(population)` users; user i owns the rows `offsets[i]:offsets[i + 1]` of every field.

    A user may own no row, one, or very many. Fields are arrays whose first axis counts examples; they may be memory
    maps, in which case training reads only the rows of sampled users.
    """

    offsets: NDArray[np.int64]  # (users + 1,), from 0 to the number of examples, never falling
    fields: Mapping[str, NDArray[Any]]  # name -> (examples, ...)
    user_ids: NDArray[Any] | None = None  # (users,), the caller's own names of the users

    def __post_init__(self) -> None:
        if len(self.offsets) < 2:
            raise PopulationError("population has 0 users but needs at least 1: give the user id of every example")
        if not self.fields:
            raise PopulationError("population has 0 fields but needs at least 1: give for instance x=... and y=...")
        examples = int(self.offsets[-1])
        for name, field in self.fields.items():
            if len(field) != examples:
                raise PopulationError(
                    f"field {name!r} has {len(field)} rows but must have {examples}, one for each example: "
                    "give arrays of equal length"
                )
        if int(self.offsets[0]) != 0:
            raise PopulationError(f"offsets start at {int(self.offsets[0])} but must start at 0: give users+1 offsets")
        # A memory map is not read through just to be opened: `save` has checked it.
        if not isinstance(self.offsets, np.memmap) and bool((np.diff(self.offsets) < 0).any()):
            raise PopulationError("offsets fall somewhere but must never fall: give running totals of the user sizes")
        if self.user_ids is not None and len(self.user_ids) != len(self):
            raise PopulationError(
                f"user_ids has {len(self.user_ids)} entries but must have {len(self)}, one for each user: "
                "give each user's id once, or leave user_ids out"
            )
        for name, array in self._arrays().items():
            dtype = np.asarray(array[:0]).dtype
            if dtype.hasobject and dtype.kind != "T":  # whose addresses differ from process to process
                raise PopulationError(f"{name} holds Python objects but must hold numbers or text: convert it")

    @classmethod
    def from_arrays(
        cls, user_ids: ArrayLike, *, known_users: ArrayLike | None = None, **fields: ArrayLike
    ) -> Population:
        """Group examples by user: `from_arrays(user_ids, x=images, y=labels)`.

        `user_ids[k]` says whose example k is (numbers or text, in any order); the order of a user's own examples is
        kept. `known_users` adds users who have no example at all: they can be sampled and are protected like others.
        """
        ids = np.asarray(user_ids)
        if ids.ndim != 1:
            raise PopulationError(
                f"user_ids has shape {ids.shape} but must have one axis: give one id for each example"
            )
        if ids.dtype.kind == "O":
            raise PopulationError("user_ids mixes types or holds None but must be all numbers or all text: convert it")
        if ids.dtype.kind == "f" and not np.isfinite(ids).all():
            raise PopulationError("user_ids holds NaN or infinity but must hold finite ids: drop those examples first")
        arrays = {name: np.asarray(field) for name, field in fields.items()}
        for name, field in arrays.items():
            if field.ndim == 0 or len(field) != len(ids):
                rows = 0 if field.ndim == 0 else len(field)
                raise PopulationError(
                    f"field {name!r} has {rows} rows but must have {len(ids)}, one for each entry of user_ids: "
                    "give arrays of equal length"
                )
        known = ids[:0] if known_users is None else np.asarray(known_users)
        if len(known) and len(ids) and (known.dtype.kind in "US") != (ids.dtype.kind in "US"):
            raise PopulationError(
                f"known_users are {known.dtype} and user_ids are {ids.dtype} but both must be text or both numbers: "
                "convert one of them"
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
        """Open a stored population as memory maps: nothing is read until a user is visited."""
        path = Path(folder)
        try:
            manifest = json.loads((path / _MANIFEST).read_text())
        except FileNotFoundError:
            raise PopulationError(
                f"{str(path)!r} holds no {_MANIFEST}: give a folder written by Population.save"
            ) from None
        except json.JSONDecodeError as error:
            raise PopulationError(
                f"{str(path / _MANIFEST)!r} is damaged ({error}): save the population again"
            ) from None
        if manifest.get("version") != _VERSION:
            raise PopulationError(
                f"{str(path)!r} has version {manifest.get('version')!r} but this clipline reads {_VERSION}: "
                "save the population again"
            )
        try:
            offsets = np.load(path / "offsets.npy", mmap_mode="r")
            fields = {name: np.load(path / f"field.{name}.npy", mmap_mode="r") for name in manifest["fields"]}
            user_ids = np.load(path / "user_ids.npy", mmap_mode="r") if manifest["user_ids"] else None
        except (OSError, ValueError, KeyError) as error:
            raise PopulationError(f"{str(path)!r} is incomplete ({error}): save the population again") from None
        return cls(offsets, fields, user_ids)

    def save(self, folder: str | Path) -> Path:
        """Store as one `.npy` file per array, for `open`. The folder must not exist yet or be empty."""
        path = Path(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise PopulationError(f"{str(path)!r} is in use: give a folder that is new or empty")
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "offsets.npy", self.offsets)
        for name, field in self.fields.items():
            np.save(path / f"field.{name}.npy", field)
        if self.user_ids is not None:
            np.save(path / "user_ids.npy", self.user_ids)
        manifest = {"version": _VERSION, "fields": list(self.fields), "user_ids": self.user_ids is not None}
        (path / _MANIFEST).write_text(json.dumps(manifest))  # last: a folder with a manifest is complete
        return path

    def fingerprint(self, *, times: bool = True) -> str:
        """A checksum of offsets, user ids and every field: name, type, shape and values. Two are equal if the data are.

        Memory maps of files above 1 GiB are not read through: size, modification time in nanoseconds (unless `times` is
        False) and, where the store's manifest has one, the checksum of the file stand for their values. So a large
        file that was copied, which gives it another time, counts as changed; one that was moved does not.

        PRIVATE: it has no noise, and whoever can guess all of the data can check the guess by it.
        """
        return fingerprint(self._arrays(), times=times)

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """All of it, by names that differ."""
        ids = {} if self.user_ids is None else {"user_ids": self.user_ids}
        return {"offsets": self.offsets, **ids, **{f"field {name!r}": field for name, field in self.fields.items()}}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def examples(self) -> int:
        """Number of examples of all users together."""
        return int(self.offsets[-1])

    def largest(self) -> int:
        """Number of examples of the user with most. Looks at everybody, a million at a time."""
        step = 1 << 20
        parts = (self.offsets[start : start + step + 1] for start in range(0, len(self), step))
        return max(int(np.diff(part).max(initial=0)) for part in parts)

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


def _id_bytes(user_id: object) -> bytes:
    return user_id if isinstance(user_id, bytes) else str(user_id).encode("utf-8", "surrogatepass")
