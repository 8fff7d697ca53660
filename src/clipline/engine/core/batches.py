"""Batches: which examples each user of a block sees at each step, and those examples as tensors on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.packed_field import Field, PackedField
from ...data.population import Population
from ...federated.local_sgd import Batch, LocalTraining
from ...random.streams import counter_bits

KeysFor = Callable[[str], NDArray[np.uint64]]  # the keys of a block's users, one each, for one purpose

_MIN_WIDTH = 5  # examples: batches are not padded to a narrower width
_MOVED_BYTES = 1 << 26  # of padded lists to move to a GPU in one go
_RESIDENT_SHARE = 0.25  # of the free GPU memory: a population that needs less is kept on the GPU


@dataclass(frozen=True, eq=False)
class Steps:
    """The batches of a block of users, step by step. Short batches are padded with the user's own first example."""

    rows: NDArray[np.int64]  # (users, steps, width): rows of the population; width of the widest user
    counts: NDArray[np.int64]  # (users, steps): real examples of each batch; 0 where the user has no such step
    widths: NDArray[np.int64]  # (users,): the width to which the user's batches are padded, from `padded_width`

    @property
    def longest(self) -> int:
        """Number of steps of the user with most."""
        return int(self.counts.shape[1])

    def alike(self, step: int, *, filled: bool) -> list[tuple[slice, int]]:
        """Slices of consecutive users whose batches at this step have the same width, and that width.

        With `filled` the width is the padded one, otherwise the number of real examples. Users without such a step are
        left out. A user's width depends on the user's own number of examples alone.
        """
        counts = self.counts[:, step]
        widths = np.where(counts > 0, self.widths, 0) if filled else counts
        ends = np.flatnonzero(np.diff(widths)) + 1
        runs = zip([0, *ends.tolist()], [*ends.tolist(), len(widths)], strict=True)
        return [(slice(start, stop), int(widths[start])) for start, stop in runs if widths[start] > 0]


def padded_width(sizes: NDArray[np.int64], batch_size: int) -> NDArray[np.int64]:
    """The width to which the batches of users with so many examples are padded, from each user's own size alone.

    The model sees the width, so nobody else's size may decide it. It is `batch_size`, or for a user with a single batch
    the smallest of batch_size / 1.4, / 2, / 2.8 ... that holds it, but not below 5: every width is a block of its own.
    """
    widths = _widths(batch_size)
    return np.asarray(widths[np.minimum(np.searchsorted(widths, sizes), len(widths) - 1)], np.int64)


@cache
def _widths(batch_size: int) -> NDArray[np.int64]:
    """The widths that batches may be padded to, ascending."""
    halvings = int(2 * np.log2(max(1, batch_size))) + 1
    widths = np.unique(np.ceil(batch_size / 2 ** (np.arange(halvings + 1) / 2)).astype(np.int64))
    return np.asarray(widths[widths >= min(batch_size, _MIN_WIDTH)], np.int64)


def plan_steps(population: Population, users: NDArray[np.int64], local: LocalTraining, keys_for: KeysFor) -> Steps:
    """The batches of a block of users: the same, in the same order, as `user_order` gives each user alone."""
    sizes, starts = local.examples_of(population, users), np.asarray(population.offsets[users], np.int64)
    largest = int(sizes.max(initial=0))
    widths = padded_width(sizes, local.batch_size)
    widest = int(widths.max(initial=1))  # less than batch_size only where all users have a single batch
    most_steps = int((-(-sizes // widest)).max(initial=0))
    slots = np.arange(most_steps * widest)
    real = slots < sizes[:, None]
    padding = np.minimum(starts, population.examples - 1)[:, None]
    counts = np.minimum(widest, sizes[:, None] - np.arange(most_steps) * widest).clip(0)
    epochs = []
    for epoch in range(local.epochs):
        words = counter_bits(keys_for(f"order/{epoch}")[:, None], slots[:largest])
        order = np.zeros(real.shape, np.int64)
        order[:, :largest] = np.argsort(np.where(real[:, :largest], words, np.uint64(2**64 - 1)), axis=1)
        rows = np.where(real, starts[:, None] + order, padding)
        epochs.append((rows.reshape(len(users), most_steps, widest), counts))
    return Steps(*_concat_epochs(epochs), widths)


def _concat_epochs(
    epochs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The steps of all epochs. Each user's follow each other without gaps, so that no user waits for a longer one."""
    if len(epochs) == 1:
        return epochs[0]
    rows = np.concatenate([rows for rows, _ in epochs], axis=1)
    counts = np.concatenate([counts for _, counts in epochs], axis=1)
    order = np.argsort(counts == 0, axis=1, kind="stable")  # steps that do not exist go to the end
    return np.take_along_axis(rows, order[:, :, None], axis=1), np.take_along_axis(counts, order, axis=1)


class Examples:
    """A population's examples as tensors on a device. A population that is small enough stays on the GPU."""

    def __init__(self, population: Population, device: torch.device, dtype: torch.dtype) -> None:
        self.population = population
        self.device = device
        self.dtype = dtype
        self.bytes_each = sum(field[:1].nbytes for field in population.fields.values()) if population.examples else 0
        self._resident: dict[str, Tensor] = {}
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(field.nbytes for field in population.fields.values()) <= _RESIDENT_SHARE * free:
                self._resident = {name: self._all_moved(field) for name, field in population.fields.items()}

    def gather(self, rows: NDArray[np.int64]) -> Batch:
        """The examples of these rows, each field (*rows.shape, ...)."""
        if self._resident:
            index = torch.from_numpy(rows).to(self.device, non_blocking=True)
            return {
                name: self._cast(field[index], self.population.fields[name].dtype)
                for name, field in self._resident.items()
            }
        fields = self.population.fields
        return {name: self._cast(self._moved(field[rows]), field.dtype) for name, field in fields.items()}

    def between(self, start: int, stop: int) -> Batch:
        """The examples of rows start to stop, for `select_rows`. Read only: they may be views of the population."""
        fields = self.population.fields
        if self._resident:
            return {name: self._cast(field[start:stop], fields[name].dtype) for name, field in self._resident.items()}
        return {name: self._cast(self._moved(field[start:stop]), field.dtype) for name, field in fields.items()}

    def to_device(self, fields: Mapping[str, NDArray[Any]]) -> Batch:
        """Synthetic examples, which are no user's, as tensors like the population's."""
        return {name: self._cast(self._moved(field), field.dtype) for name, field in fields.items()}

    def _all_moved(self, field: Field) -> Tensor:
        """All rows of a field. Lists are padded on the way, some at a time, as a GPU indexes rows of one width."""
        if not isinstance(field, PackedField) or not len(field):
            return self._moved(np.asarray(field))
        first = self._moved(field[:1])
        moved = first.new_empty((len(field), *first.shape[1:]))
        step = max(1, _MOVED_BYTES // max(1, field[:1].nbytes))
        for start in range(0, len(field), step):
            moved[start : start + step] = self._moved(field[start : start + step])
        return moved

    def _moved(self, field: NDArray[Any]) -> Tensor:
        # torch can move uint16 between devices but not index it: it travels as int16.
        plain = np.ascontiguousarray(field)
        if plain.dtype in (np.uint32, np.uint64):  # which torch can hardly do anything with; they fit, as was checked
            plain = plain.astype(np.int64)
        plain = plain if plain.flags.writeable else plain.copy()  # torch.from_numpy warns about read-only arrays
        return torch.from_numpy(plain.view(np.int16) if plain.dtype == np.uint16 else plain).to(self.device)

    def _cast(self, rows: Tensor, dtype: np.dtype[Any]) -> Tensor:
        return rows.view(torch.uint16) if dtype == np.uint16 else in_batch(rows, self.dtype)


def select_rows(field: Tensor, rows: Tensor) -> Tensor:
    """field[rows] along the first axis, also for uint16, which torch cannot index."""
    if field.dtype == torch.uint16:
        return field.view(torch.int16).index_select(0, rows).view(torch.uint16)
    return field.index_select(0, rows)


def in_batch(rows: Tensor, floating: torch.dtype) -> Tensor:
    """The one rule of types: what a batch holds for these rows of a field. docs/howto/own_data.md has the table.

    Floating-point data take the type `floating`, that of the model's parameters. int8, int32, uint32 and uint64 become
    int64, which torch wants for labels and indices. bool, uint8, int16 and uint16 stay: pixels and tokens are large,
    and models convert them.
    """
    if rows.dtype in (torch.int8, torch.int32, torch.uint32, torch.uint64):
        return rows.long()
    return rows.to(floating) if rows.is_floating_point() else rows
