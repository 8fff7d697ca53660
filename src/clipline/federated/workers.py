"""Who trains a cohort and adds it up: this process, or several that share the users among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .clients import Clients
from .clipping import ClippedSum, aggregate
from .sampling import Cohort


class Workforce(Protocol):
    """Trains a cohort and gives the one private sum of a round."""

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits: PRIVATE."""
        ...


@dataclass(frozen=True, eq=False)
class Alone:
    """Everybody trains in this process."""

    clients: Clients

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits: PRIVATE."""
        updates = self.clients.train(params, cohort, round_index)
        return aggregate(updates, clip, cohort, len(params), params.device)
