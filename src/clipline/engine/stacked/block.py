"""A block of stacked users: what their training needs, and their trained parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...federated.local_sgd import Batch
from ..core.batches import Steps
from ..core.row_fields import TouchedRows


@dataclass(frozen=True, eq=False)
class Block:
    """Users sorted by work, user i of request `requests[owners[i]]`, and all that training needs except parameters."""

    users: NDArray[np.int64]
    owners: NDArray[np.int64]
    places: NDArray[np.int64]  # in the cohort of the request
    steps: Steps
    examples: Batch
    rows: dict[str, TouchedRows]
    random_keys: Tensor
    counts: Tensor
    rates: Tensor

    def of_users(self, chosen: NDArray[np.int64]) -> Block:
        """Some of the users, in this order."""
        index = torch.from_numpy(chosen).to(self.counts.device, non_blocking=True)
        steps = Steps(self.steps.rows[chosen], self.steps.counts[chosen], self.steps.widths[chosen])
        return Block(
            self.users[chosen],
            self.owners[chosen],
            self.places[chosen],
            steps,
            {name: _picked(field, index) for name, field in self.examples.items()},
            {name: TouchedRows(one.rows[index], one.used[index]) for name, one in self.rows.items()},
            self.random_keys[index],
            self.counts[index],
            self.rates[index],
        )

    def between(self, start: int, stop: int, rooms: Mapping[str, int]) -> Block:
        """Users `start` to `stop`, with as many steps as the longest of them has, and rows padded to these numbers."""
        users = slice(start, stop)
        longest = int((self.steps.counts[users] > 0).any(axis=0).sum())  # steps follow each other without gaps
        steps = Steps(self.steps.rows[users, :longest], self.steps.counts[users, :longest], self.steps.widths[users])
        return Block(
            self.users[users],
            self.owners[users],
            self.places[users],
            steps,
            {name: field[users, :longest] for name, field in self.examples.items()},
            {name: self.rows[name].of_users(users).padded_to(room) for name, room in rooms.items()},
            self.random_keys[users, :longest],
            self.counts[users, :longest],
            self.rates[users],
        )

    def tensors(self) -> list[Tensor]:
        """All tensors on the device."""
        touched = [tensor for one in self.rows.values() for tensor in (one.rows, one.used)]
        return [*self.examples.values(), *touched, self.random_keys, self.counts, self.rates]


@dataclass(frozen=True, eq=False)
class Trained:
    """Slices of a block's users with their parameters after training; `first` is what they started from: PRIVATE."""

    block: Block
    first: dict[str, Tensor]
    stacks: Sequence[tuple[slice, list[Tensor]]]


def _picked(field: Tensor, index: Tensor) -> Tensor:
    """field[index], also for uint16, which torch cannot index."""
    if field.dtype == torch.uint16:
        return field.view(torch.int16)[index].view(torch.uint16)
    return field[index]
