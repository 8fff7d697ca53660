"""How parameters reach the processes that train together, and how their sums become one."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Transport(Protocol):
    """What the ranks of a team do together once a round; all call the same at the same time."""

    def everyones(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, a vector a run, on every rank; on the others the argument says number, shape, type."""
        ...

    def room(self, rank: int, params: Sequence[Tensor]) -> Tensor:
        """(runs, dim + 1) float64: where this rank adds up its users, with anything in it."""
        ...

    def add_up(self, totals: Tensor, rank: int) -> None:
        """Add the totals of all ranks into those of rank 0."""
        ...


class DistributedTransport:
    """Over torch.distributed's default group: between machines, and between GPUs."""

    def everyones(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, written into the others' own."""
        for own in params:
            dist.broadcast(own, src=0)
        return params

    def room(self, rank: int, params: Sequence[Tensor]) -> Tensor:
        """New memory."""
        return torch.empty(len(params), len(params[0]) + 1, dtype=torch.float64, device=params[0].device)

    def add_up(self, totals: Tensor, rank: int) -> None:
        """One reduction."""
        dist.reduce(totals, dst=0)


class SharedMemoryTransport:
    """In memory that processes of one machine share, made before they are forked; only signals are sent.

    A total lies where that of the next round will: use it up before the next round begins.
    """

    def __init__(self, like: Tensor, size: int, runs: int = 1) -> None:
        dim = len(like)
        params = mmap.mmap(-1, max(1, runs * dim) * like.element_size())
        self._params = torch.frombuffer(params, dtype=like.dtype, count=runs * dim).view(runs, dim)
        totals = mmap.mmap(-1, size * runs * (dim + 1) * 8)
        self._totals = torch.frombuffer(totals, dtype=torch.float64).view(size, runs, dim + 1)

    def everyones(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, where all can read them."""
        here = self._params[: len(params)].unbind()
        if dist.get_rank() == 0:
            for place, own in zip(here, params, strict=True):
                place.copy_(own)
        dist.barrier()
        return here

    def room(self, rank: int, params: Sequence[Tensor]) -> Tensor:
        """The rank's own."""
        return self._totals[rank, : len(params)]

    def add_up(self, totals: Tensor, rank: int) -> None:
        """Every rank adds up a slice of all totals, in the order of ranks."""
        ranks = len(self._totals)
        slices = [whole.flatten().tensor_split(ranks)[rank] for whole in self._totals[:, : len(totals)]]
        for other in slices[1:]:
            slices[0].add_(other)
        dist.barrier()
