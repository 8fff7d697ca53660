"""How the processes of a group talk: over torch.distributed, or on one machine by pipes and shared memory."""

from __future__ import annotations

import mmap
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import GO_ON, WorkerError
from ...federated.clipping import PartialSums

SILENCE = 60.0  # seconds
Result = TypeVar("Result")
# What a lost peer raises: torch.distributed, a pipe whose other end was closed, and one that nobody reads any more.
LOST = (RuntimeError, EOFError, OSError)


def patience(longest: float = 0.0) -> float:
    """Seconds that a rank may be silent: 60, or twenty times the longest round so far if that is more."""
    return max(SILENCE, 20 * longest)


class LostConnectionError(WorkerError):
    """The connection to another process of the group was lost."""


class SilentError(LostConnectionError):
    """A process of the group did not answer in time, though its connection is whole: it may be stopped."""

    def __init__(self, rank: int | None, size: int, seconds: float) -> None:
        which = "a worker" if rank is None else f"worker {rank}"
        super().__init__(
            f"{which} of {size} was silent for {seconds:.0f} s, the limit ({SILENCE:.0f} s, or 20 rounds if they "
            f"take longer): see whether it is stopped or its machine is out of reach, then {GO_ON}"
        )


class DistributedTransport:
    """Over torch.distributed's default group: between machines, and between GPUs.

    Every rank calls the same operations of a round in the same order. `of_gpus` is the group of what GPUs hold.
    """

    def __init__(self, of_gpus: dist.ProcessGroup | None = None) -> None:
        self._of_gpus = of_gpus
        self._memory = torch.empty(0)
        self._limit = patience()

    def share(self, values: Tensor) -> None:
        """Write rank 0's values into those of the other ranks."""
        self._in_time(lambda: dist.broadcast(values, src=0, group=self._group(values), async_op=True), values)

    def share_params(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0's parameters, one vector a run, written into the other ranks' tensors."""
        for own in params:
            self.share(own)
        return params

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """New memory in which this rank adds up its users: one row for each run."""
        shape = len(params), len(params[0]) + 1
        self._memory = torch.empty(shape, dtype=torch.float64, device=params[0].device)
        return PartialSums(self._memory)

    def any_failed(self, failed: bool, limit: float) -> bool:
        """Whether any rank has failed. Waits for all: their partial sums are complete then.

        Rank 0 waits at most `limit` seconds for each, and then raises a `SilentError`. The all-reduce is over gloo,
        once rank 0 has heard each: it notices a lost process, where NCCL would hang.
        """
        flag, self._limit = torch.tensor([float(failed)]), limit
        if dist.get_rank():
            dist.send(flag, dst=0)
        else:
            said = [dist.irecv(torch.zeros(1), src=rank) for rank in range(1, dist.get_world_size())]
            for rank, work in enumerate(said, start=1):
                begun = time.monotonic()
                try:
                    assert work is not None
                    work.wait(timedelta(seconds=limit))
                except RuntimeError:
                    if time.monotonic() - begun < 0.9 * limit:
                        raise  # lost, and not silent: gloo counts whole milliseconds
                    raise SilentError(rank, dist.get_world_size(), limit) from None
        self._in_time(lambda: dist.all_reduce(flag, async_op=True), flag)
        return bool(flag.item())

    def tracebacks(self, own: str) -> Sequence[str]:
        """On rank 0: those of all ranks."""
        texts = [""] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, texts, dst=0)
        return texts or ()

    def reduce(self, rank: int) -> None:
        """Add the partial sums of all ranks into those of rank 0."""
        group = self._group(self._memory)
        self._in_time(lambda: dist.reduce(self._memory, dst=0, group=group, async_op=True), self._memory)

    def add_to_first(self, values: Tensor) -> None:
        """Add all ranks' values, on the CPU, into those of rank 0."""
        self._in_time(lambda: dist.reduce(values, dst=0, async_op=True), values)

    def _group(self, values: Tensor) -> dist.ProcessGroup | None:
        return self._of_gpus if values.is_cuda else None

    def _in_time(self, begin: Callable[[], dist.Work | None], values: Tensor) -> None:
        """Rank 0 waits for the others as long as `any_failed` last said, and a second for each megabyte.

        They wait for rank 0 without a limit, as it may be measuring. Between GPUs a wait would hold the rounds up.
        """
        work, begun = begin(), time.monotonic()
        limit = self._limit + values.numel() * values.element_size() / 1e6
        assert work is not None
        try:
            if dist.get_rank() or values.device.type != "cpu":
                work.wait()
            else:
                work.wait(timedelta(seconds=limit))
        except RuntimeError:
            if dist.get_rank() or time.monotonic() - begun < 0.9 * limit:
                raise  # lost, and not silent: gloo counts whole milliseconds
            raise SilentError(None, dist.get_world_size(), limit) from None


class SharedMemory:
    """Parameters of all runs and the sums of all ranks, in memory that processes share if they are forked from here."""

    def __init__(self, like: Tensor, size: int, runs: int = 1) -> None:
        dim = len(like)
        params = mmap.mmap(-1, max(1, runs * dim) * like.element_size())
        self.params = torch.frombuffer(params, dtype=like.dtype, count=runs * dim).view(runs, dim)
        sums = mmap.mmap(-1, size * runs * (dim + 1) * 8)
        self.sums = torch.frombuffer(sums, dtype=torch.float64).view(size, runs, dim + 1)


class PipeTransport:
    """The same by pipes between rank 0 and each other rank of one machine; parameters and sums stay in shared memory.

    The end of a pipe closes with its process, so that a process that dies is noticed at once, whatever it was doing.
    (gloo may miss it: it then waits for ever to send to a peer that has just died.) Every round reuses the memory of
    the sums: use them before the next round begins.
    """

    def __init__(self, memory: SharedMemory, peers: Sequence[Connection], *, leads: bool) -> None:
        """`peers` are all other ranks where this one `leads`, or else rank 0 alone."""
        self._memory, self._peers, self._leads = memory, peers, leads
        self._runs = 0  # of this round
        if leads:
            self._allow(patience())

    def share(self, values: Tensor) -> None:
        """Rank 0 writes the values into each pipe."""
        if self._leads:
            self._send(_bytes(values))
        else:
            self._peers[0].recv_bytes_into(_bytes(values))

    def _allow(self, limit: float) -> None:
        """Rank 0 waits so long for a worker that neither reads nor writes: the system then fails the call."""
        self._limit = limit
        for peer in self._peers:
            with socket.fromfd(peer.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as one:
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    one.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(limit), int(limit % 1 * 1e6)))

    def share_params(self, params: Sequence[Tensor]) -> Sequence[Tensor]:
        """Rank 0 copies its parameters into the shared memory, and says when they are there."""
        shared = self._memory.params[: len(params)].unbind()
        if self._leads:
            for place, own in zip(shared, params, strict=True):
                place.copy_(own)
            self._send(b".")
        else:
            self._peers[0].recv_bytes()
        return shared

    def partial_sums(self, rank: int, params: Sequence[Tensor]) -> PartialSums:
        """The rank's own part of the shared memory."""
        self._runs = len(params)
        return PartialSums(self._memory.sums[rank, : self._runs])

    def any_failed(self, failed: bool, limit: float) -> bool:
        """Rank 0 hears all, and tells all."""
        if self._leads:
            self._allow(limit)
            anybody = any([failed, *(said == b"1" for said in self._hear())])
            self._send(b"1" if anybody else b"0")
            return anybody
        self._send(b"1" if failed else b"0")
        return self._peers[0].recv_bytes() == b"1"

    def tracebacks(self, own: str) -> Sequence[str]:
        """Rank 0 hears all."""
        if self._leads:
            return [own, *(said.decode() for said in self._hear())]
        self._send(own.encode())
        return ()

    def reduce(self, rank: int) -> None:
        """Every rank adds one slice of all partial sums, in the order of ranks; rank 0 waits for the others."""
        ranks = len(self._memory.sums)
        slices = [whole.flatten().tensor_split(ranks)[rank] for whole in self._memory.sums[:, : self._runs]]
        for other in slices[1:]:
            slices[0].add_(other)
        if self._leads:
            self._hear()
        else:
            self._send(b".")

    def add_to_first(self, values: Tensor) -> None:
        """Rank 0 adds what comes, in the order of ranks."""
        if not self._leads:
            self._send(_bytes(values))
            return
        for sent in self._hear():
            values += torch.frombuffer(bytearray(sent), dtype=values.dtype).view_as(values) if sent else 0

    def _hear(self) -> list[bytes]:
        """One message of each other rank."""
        return [self._in_time(rank, peer.recv_bytes) for rank, peer in enumerate(self._peers, start=1)]

    def _send(self, message: bytes | memoryview) -> None:
        for rank, peer in enumerate(self._peers, start=1):
            self._in_time(rank, partial(peer.send_bytes, message))

    def _in_time(self, rank: int, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except BlockingIOError:  # the time that `_allow` gave is over
            raise SilentError(rank, len(self._memory.sums), self._limit) from None


Transport = DistributedTransport | PipeTransport


def _bytes(values: Tensor) -> memoryview:
    """The memory of the values, which are contiguous."""
    return values.view(-1).view(torch.uint8).numpy().data if values.numel() else memoryview(bytearray())
