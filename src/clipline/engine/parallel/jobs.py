"""What runs want of a round, and how its users are shared out: one run, or several that train side by side."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...federated.clipping import ClippedSum, part_of_sum
from ...federated.sampling import Cohort
from ...privacy.events import Sampling
from ..choose import LocalTrainer
from ..working_model import WorkingModel

StepsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # how many local steps each of these users takes


@dataclass(frozen=True, eq=False)
class Errand:
    """What one run wants of a round: these users trained from `params` on, clipped and added up."""

    run: int  # its number among those that train side by side, from 0
    params: Tensor  # (dim,)
    users: NDArray[np.int64]
    round_index: int
    clip: float


class Hands(Protocol):
    """What one process does of a round."""

    @property
    def flat(self) -> WorkingModel:
        """The working copy of the model."""
        ...

    def add_up(self, errands: Sequence[Errand], totals: Tensor) -> None:
        """Write into totals (errands, dim + 1) float64 what the users add to each errand's `ClippedSum`: PRIVATE."""
        ...


@dataclass(frozen=True, eq=False)
class OneRun:
    """The hands of a single run."""

    clients: LocalTrainer
    sampling: Sampling

    @property
    def flat(self) -> WorkingModel:
        """That of the clients."""
        return self.clients.flat

    def add_up(self, errands: Sequence[Errand], totals: Tensor) -> None:
        """One errand after the other."""
        for errand, total in zip(errands, totals, strict=True):
            updates = self.clients.train(errand.params, Cohort(errand.users, self.sampling), errand.round_index)
            part_of_sum(updates, errand.clip, total)


SumsOf = Callable[[Sequence[Errand]], Tensor]  # (errands, dim + 1) float64: PRIVATE


def sums_here(hands: Hands, errands: Sequence[Errand]) -> Tensor:
    """The sum of each errand, by this process alone: (errands, dim + 1) float64, PRIVATE."""
    params = errands[0].params
    totals = torch.empty(len(errands), len(params) + 1, dtype=torch.float64, device=params.device)
    hands.add_up(errands, totals)
    return totals


def sum_of_one(sums_of: SumsOf, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
    """The sum of a single run's round, by those who can do several: PRIVATE."""
    (total,) = sums_of([Errand(0, params, cohort.users, round_index, clip)])
    return ClippedSum(total, clip, cohort.sampling)


def share_of(errands: Sequence[Errand], steps_of: StepsOf, rank: int, size: int) -> list[Errand]:
    """The same errands with the users of one of `size` workers only, who share out the users of all runs at once."""
    users = np.concatenate([errand.users for errand in errands])
    places = share_out(steps_of(users), size)[rank]
    ends = np.cumsum([len(errand.users) for errand in errands])[:-1]
    parts = np.split(users[places], np.searchsorted(places, ends))
    return [replace(errand, users=part) for errand, part in zip(errands, parts, strict=True)]


def share_out(steps: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """The places (ascending) of each of `size` workers: the longest first, each to whoever has least to do so far.

    Where two have equally little, to the one with fewer users, then to the lower rank: every process that asks gets the
    same answer. No worker has more steps than the average and one user's.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, 0, rank) for rank in range(size)]
    order = np.argsort(-steps, kind="stable")
    for place, work in zip(order.tolist(), steps[order].tolist(), strict=True):
        load, count, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + work, count + 1, rank))
    return [np.sort(np.array(share, np.int64)) for share in shares]
