"""How parameters reach the processes that train together, and how their sums become one."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange(Protocol):
    """What the ranks of a team do together once a round; all call the same at the same time."""

    def everyones(self, params: Tensor) -> Tensor:
        """Rank 0's `params`, on every rank; on the others the argument says shape, type and device."""
        ...

    def room(self, rank: int, params: Tensor) -> Tensor:
        """(dim + 1,) float64: where this rank adds up its users, with anything in it."""
        ...

    def add_up(self, total: Tensor, rank: int) -> None:
        """Add the totals of all ranks into that of rank 0."""
        ...


class Sent:
    """Over torch.distributed's default group: between machines, and between GPUs."""

    def everyones(self, params: Tensor) -> Tensor:
        """Rank 0's parameters, written into the others' own."""
        dist.broadcast(params, src=0)
        return params

    def room(self, rank: int, params: Tensor) -> Tensor:
        """New memory."""
        return torch.empty(len(params) + 1, dtype=torch.float64, device=params.device)

    def add_up(self, total: Tensor, rank: int) -> None:
        """One reduction."""
        dist.reduce(total, dst=0)


class Shared:
    """In memory that processes of one machine share, made before they are forked; only signals are sent.

    A total lies where that of the next round will: use it up before the next round begins.
    """

    def __init__(self, like: Tensor, size: int) -> None:
        dim = len(like)
        self._params = torch.frombuffer(mmap.mmap(-1, max(1, dim) * like.element_size()), dtype=like.dtype, count=dim)
        totals = mmap.mmap(-1, size * (dim + 1) * 8)
        self._totals = torch.frombuffer(totals, dtype=torch.float64).view(size, dim + 1)

    def everyones(self, params: Tensor) -> Tensor:
        """Rank 0's parameters, where all can read them."""
        if dist.get_rank() == 0:
            self._params.copy_(params)
        dist.barrier()
        return self._params

    def room(self, rank: int, params: Tensor) -> Tensor:
        """The rank's own."""
        return self._totals[rank]

    def add_up(self, total: Tensor, rank: int) -> None:
        """Every rank adds up a slice of all totals, in the order of ranks."""
        slices = [whole.tensor_split(len(self._totals))[rank] for whole in self._totals]
        for other in slices[1:]:
            slices[0].add_(other)
        dist.barrier()
