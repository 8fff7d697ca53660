"""A block of users who train together: who they are, what they need, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...federated.local_sgd import Batch
from ..batches import Steps
from ..sparse.row_fields import Touched


@dataclass(frozen=True, eq=False)
class Block:
    """Users sorted by work, each of request `requests[owner]`, and all that their training needs but the parameters."""

    users: NDArray[np.int64]
    owners: NDArray[np.int64]
    steps: Steps
    examples: Batch
    rows: dict[str, Touched]
    chances: Tensor
    counts: Tensor
    rates: Tensor

    def of_users(self, chosen: NDArray[np.int64]) -> Block:
        """Some of the users, in this order."""
        places = torch.from_numpy(chosen).to(self.counts.device)
        steps = Steps(self.steps.rows[chosen], self.steps.counts[chosen], self.steps.widths[chosen])
        return Block(
            self.users[chosen],
            self.owners[chosen],
            steps,
            {name: _picked(field, places) for name, field in self.examples.items()},
            {name: Touched(one.rows[places], one.used[places]) for name, one in self.rows.items()},
            self.chances[places],
            self.counts[places],
            self.rates[places],
        )

    def tensors(self) -> list[Tensor]:
        """All that lies on the device."""
        touched = [tensor for one in self.rows.values() for tensor in (one.rows, one.used)]
        return [*self.examples.values(), *touched, self.chances, self.counts, self.rates]


@dataclass(frozen=True, eq=False)
class Trained:
    """Users of a block, part by part, and their parameters after training from `first` on: PRIVATE."""

    block: Block
    first: dict[str, Tensor]
    stacks: Sequence[tuple[slice, list[Tensor]]]


def _picked(field: Tensor, places: Tensor) -> Tensor:
    """field[places], for types too that torch cannot pick from."""
    if field.dtype == torch.uint16:
        return field.view(torch.int16)[places].view(torch.uint16)
    return field[places]
