"""The users of a store, read with NumPy alone: peers have no clipline in their environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fields = dict[str, NDArray[Any]]  # name -> (examples, ...)


class StoredUsers:
    """The training users of a store folder; the arrays stay on disk until a user is read."""

    def __init__(self, store: Path, *, even: bool, max_examples: int | None) -> None:
        folder = store / "train"
        self.max_examples = max_examples
        self.offsets: NDArray[np.int64] = np.load(folder / "offsets.npy")
        if even:
            self.offsets = even_offsets(self.offsets, max_examples)
        self._fields = {
            path.name.removeprefix("field.").removesuffix(".npy"): np.load(path, mmap_mode="r")
            for path in sorted(folder.glob("field.*.npy"))
        }

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sizes(self) -> NDArray[np.int64]:
        """(users,): examples that each one trains on."""
        return kept(np.diff(self.offsets), self.max_examples)

    def fields(self, user: int) -> Fields:
        """What one user trains on: the first `max_examples` examples."""
        first, end = (int(offset) for offset in self.offsets[user : user + 2])
        rows = slice(first, end if self.max_examples is None else min(end, first + self.max_examples))
        return {name: np.asarray(field[rows]) for name, field in self._fields.items()}


def kept(sizes: NDArray[np.int64], max_examples: int | None) -> NDArray[np.int64]:
    """Examples that users of these sizes train on."""
    return sizes if max_examples is None else np.minimum(sizes, max_examples)


def even_offsets(offsets: NDArray[np.int64], max_examples: int | None) -> NDArray[np.int64]:
    """As many users on the same rows, all with the same number of examples: the mean, rounded down, at least one.

    A round of 100 of them has the arithmetic of a usual round, and no user is longer than another.
    """
    sizes = kept(np.diff(offsets), max_examples)
    each = int(sizes.mean())
    if each < 1:
        raise SystemExit(f"{len(sizes)} users of {int(offsets[-1])} examples have none each: take another store")
    return np.arange(len(offsets), dtype=np.int64) * each
