"""How parameters reach the processes that train together, and how their sums become one."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...federated.clipping import PartialSums


class Transport(Protocol):
    """What the ranks do together once a round; all call the same at the same time. It owns the memory of the sums."""

    def broadcast(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, a vector a run, on every rank; on the others the argument says number, shape, type."""
        ...

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """Where this rank adds up its users: a row for each run."""
        ...

    def reduce(self, rank: int) -> None:
        """Add what all ranks have added up into the sums of rank 0."""
        ...


class DistributedTransport:
    """Over torch.distributed's default group: between machines, and between GPUs."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def broadcast(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, written into the others' own."""
        for own in params:
            dist.broadcast(own, src=0)
        return params

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """New memory."""
        shape = len(params), len(params[0]) + 1
        self._memory = torch.empty(shape, dtype=torch.float64, device=params[0].device)
        return PartialSums(self._memory)

    def reduce(self, rank: int) -> None:
        """One reduction."""
        dist.reduce(self._memory, dst=0)


class SharedMemoryTransport:
    """In memory that processes of one machine share, allocated before they are forked; only signals are sent.

    The sums of a round lie where those of the next will: use them up before the next round begins.
    """

    def __init__(self, like: Tensor, size: int, runs: int = 1) -> None:
        dim = len(like)
        params = mmap.mmap(-1, max(1, runs * dim) * like.element_size())
        self._params = torch.frombuffer(params, dtype=like.dtype, count=runs * dim).view(runs, dim)
        sums = mmap.mmap(-1, size * runs * (dim + 1) * 8)
        self._sums = torch.frombuffer(sums, dtype=torch.float64).view(size, runs, dim + 1)
        self._runs = 0  # of this round

    def broadcast(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, where all can read them."""
        here = self._params[: len(params)].unbind()
        if dist.get_rank() == 0:
            for place, own in zip(here, params, strict=True):
                place.copy_(own)
        dist.barrier()
        return here

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """In the rank's own part of the memory."""
        self._runs = len(params)
        return PartialSums(self._sums[rank, : self._runs])

    def reduce(self, rank: int) -> None:
        """Every rank adds up a slice of all sums, in the order of ranks."""
        ranks = len(self._sums)
        slices = [whole.flatten().tensor_split(ranks)[rank] for whole in self._sums[:, : self._runs]]
        for other in slices[1:]:
            slices[0].add_(other)
        dist.barrier()
