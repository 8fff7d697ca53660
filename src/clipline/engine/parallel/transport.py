"""Broadcast of parameters to the ranks, and reduction of their sums: over torch.distributed, or in shared memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...federated.clipping import PartialSums


class Transport(Protocol):
    """The collective operations of a round; every rank calls the same in the same order. It owns the sums."""

    def broadcast(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, one vector a run, on every rank. Elsewhere the argument gives number, shape, type."""
        ...

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """The memory in which this rank adds up its users: one row for each run."""
        ...

    def reduce(self, rank: int) -> None:
        """Add the partial sums of all ranks into those of rank 0."""
        ...


class DistributedTransport:
    """Over torch.distributed's default group: between machines, and between GPUs."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def broadcast(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, written into the other ranks' tensors."""
        for own in params:
            dist.broadcast(own, src=0)
        return params

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """Newly allocated."""
        shape = len(params), len(params[0]) + 1
        self._memory = torch.empty(shape, dtype=torch.float64, device=params[0].device)
        return PartialSums(self._memory)

    def reduce(self, rank: int) -> None:
        """One `dist.reduce`."""
        dist.reduce(self._memory, dst=0)


class SharedMemoryTransport:
    """Shared memory of processes on one machine, allocated before they are forked; only barriers are sent.

    Every round reuses the memory of the sums: use them before the next round begins.
    """

    def __init__(self, like: Tensor, size: int, runs: int = 1) -> None:
        dim = len(like)
        params = mmap.mmap(-1, max(1, runs * dim) * like.element_size())
        self._params = torch.frombuffer(params, dtype=like.dtype, count=runs * dim).view(runs, dim)
        sums = mmap.mmap(-1, size * runs * (dim + 1) * 8)
        self._sums = torch.frombuffer(sums, dtype=torch.float64).view(size, runs, dim + 1)
        self._runs = 0  # of this round

    def broadcast(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, copied into the shared memory."""
        shared = self._params[: len(params)].unbind()
        if dist.get_rank() == 0:
            for place, own in zip(shared, params, strict=True):
                place.copy_(own)
        dist.barrier()
        return shared

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """The rank's own part of the shared memory."""
        self._runs = len(params)
        return PartialSums(self._sums[rank, : self._runs])

    def reduce(self, rank: int) -> None:
        """Every rank adds one slice of all partial sums, in the order of ranks."""
        ranks = len(self._sums)
        slices = [whole.flatten().tensor_split(ranks)[rank] for whole in self._sums[:, : self._runs]]
        for other in slices[1:]:
            slices[0].add_(other)
        dist.barrier()
