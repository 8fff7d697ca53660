"""Which examples every user of a block sees at every step, and those examples as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..federated.local_sgd import Batch, LocalSGD
from ..federated.population import Population
from ..streams import counter_bits

KeysFor = Callable[[str], NDArray[np.uint64]]  # the keys of a block's users, one each, for one purpose

_NARROWEST = 5  # examples
_RESIDENT = 0.25  # of a GPU's free memory may hold the population


@dataclass(frozen=True, eq=False)
class Steps:
    """The batches of a block of users, step by step. Where a batch is short, a user's own first example fills it up."""

    rows: NDArray[np.int64]  # (users, steps, width): rows of the population; the width is the widest user's
    counts: NDArray[np.int64]  # (users, steps): how many of a batch are real; 0 where the user has no such step
    widths: NDArray[np.int64]  # (users,): how wide the user's batches are filled up, as `filled_width` says

    @property
    def longest(self) -> int:
        """Number of steps of the user with most."""
        return int(self.counts.shape[1])

    def alike(self, step: int, *, filled: bool) -> list[tuple[slice, int]]:
        """Runs of neighbours whose batches at this step are equally wide, and how wide: as they are or `filled`.

        Users without such a step are left out. The width depends on the user's own number of examples alone.
        """
        counts = self.counts[:, step]
        widths = np.where(counts > 0, self.widths, 0) if filled else counts
        ends = np.flatnonzero(np.diff(widths)) + 1
        runs = zip([0, *ends.tolist()], [*ends.tolist(), len(widths)], strict=True)
        return [(slice(start, stop), int(widths[start])) for start, stop in runs if widths[start] > 0]


def filled_width(sizes: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """How wide the batches of users with so many examples are filled up. A model sees it: nobody else's size counts.

    `batch_size`, or that over 1.4, over 2, over 2.8 ... for a user whose only batch fits into it, but not below 5, as
    every width is a block of its own.
    """
    halvings = int(2 * np.log2(max(1, batch_size))) + 1
    steps = np.unique(np.ceil(batch_size / 2 ** (np.arange(halvings + 1) / 2)).astype(np.int64))
    steps = steps[steps >= min(batch_size, _NARROWEST)]
    return np.asarray(steps[np.minimum(np.searchsorted(steps, sizes), len(steps) - 1)], np.int64)


def plan_steps(population: Population, users: NDArray[np.int64], local: LocalSGD, keys_for: KeysFor) -> Steps:
    """The same batches in the same order as `user_order` gives each user alone."""
    sizes, starts = local.examples_of(population, users), np.asarray(population.offsets[users], np.int64)
    longest = int(sizes.max(initial=0))
    widths = filled_width(sizes, local.batch_size)
    widest = int(widths.max(initial=1))  # less than batch_size only where all users have a single batch
    most = int((-(-sizes // widest)).max(initial=0))
    places = np.arange(most * widest)
    real = places < sizes[:, None]
    own = np.minimum(starts, population.examples - 1)[:, None]
    counts = np.minimum(widest, sizes[:, None] - np.arange(most) * widest).clip(0)
    epochs = []
    for epoch in range(local.epochs):
        words = counter_bits(keys_for(f"order/{epoch}")[:, None], places[:longest])
        order = np.zeros(real.shape, np.int64)
        order[:, :longest] = np.argsort(np.where(real[:, :longest], words, np.uint64(2**64 - 1)), axis=1)
        rows = np.where(real, starts[:, None] + order, own)
        epochs.append((rows.reshape(len(users), most, widest), counts))
    return Steps(*_end_to_end(epochs), widths)


def _end_to_end(
    epochs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The steps of all epochs, each user's own straight after one another: nobody waits for others."""
    if len(epochs) == 1:
        return epochs[0]
    rows = np.concatenate([rows for rows, _ in epochs], axis=1)
    counts = np.concatenate([counts for _, counts in epochs], axis=1)
    order = np.argsort(counts == 0, axis=1, kind="stable")  # steps that do not exist go to the end
    return np.take_along_axis(rows, order[:, :, None], axis=1), np.take_along_axis(counts, order, axis=1)


class Examples:
    """A population's rows as tensors on a device; all of it lies there already if it is small enough."""

    def __init__(self, population: Population, device: torch.device, dtype: torch.dtype) -> None:
        self.population = population
        self.device = device
        self.dtype = dtype
        self.bytes_each = sum(field[:1].nbytes for field in population.fields.values()) if population.examples else 0
        self._resident: dict[str, Tensor] = {}
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(field.nbytes for field in population.fields.values()) <= _RESIDENT * free:
                self._resident = {name: self._moved(field) for name, field in population.fields.items()}

    def gather(self, rows: NDArray[np.int64]) -> Batch:
        """The examples of these rows, each field (*rows.shape, ...)."""
        if self._resident:
            places = torch.from_numpy(rows).to(self.device, non_blocking=True)
            return {
                name: self._typed(field[places], self.population.fields[name].dtype)
                for name, field in self._resident.items()
            }
        fields = self.population.fields
        return {name: self._typed(self._moved(field[rows]), field.dtype) for name, field in fields.items()}

    def between(self, start: int, stop: int) -> Batch:
        """The examples of neighbouring rows, to `pick` from and not to write into: they may lie in the population."""
        fields = self.population.fields
        if self._resident:
            return {name: self._typed(field[start:stop], fields[name].dtype) for name, field in self._resident.items()}
        return {name: self._typed(self._moved(field[start:stop]), field.dtype) for name, field in fields.items()}

    def placed(self, fields: Mapping[str, NDArray[Any]]) -> Batch:
        """Examples that are no user's, as tensors like the population's."""
        return {name: self._typed(self._moved(field), field.dtype) for name, field in fields.items()}

    @staticmethod
    def pick(field: Tensor, rows: Tensor) -> Tensor:
        """field[rows], for types too that torch cannot pick from."""
        if field.dtype == torch.uint16:
            return field.view(torch.int16).index_select(0, rows).view(torch.uint16)
        return field.index_select(0, rows)

    def _moved(self, field: NDArray[Any]) -> Tensor:
        # torch can move unsigned 16-bit numbers but not pick rows of them: they travel as signed ones.
        plain = np.ascontiguousarray(field)
        plain = plain if plain.flags.writeable else plain.copy()  # torch wants to be able to write
        return torch.from_numpy(plain.view(np.int16) if plain.dtype == np.uint16 else plain).to(self.device)

    def _typed(self, rows: Tensor, dtype: np.dtype[Any]) -> Tensor:
        """Fractional data take the type of the model's parameters, other data keep theirs."""
        if dtype == np.uint16:
            return rows.view(torch.uint16)
        return rows.to(self.dtype) if rows.is_floating_point() else rows
