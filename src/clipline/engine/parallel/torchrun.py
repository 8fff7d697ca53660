"""Processes that torchrun started, on one machine or many: how they find each other, and that they agree."""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import __version__
from ...errors import SettingError, refuse
from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import ClippedSum
from ...federated.population import Population
from ...privacy.events import Sampling
from ..problem import Problem
from .forked import PATIENCE
from .group import LostConnectionError, ProcessGroup, connected
from .transport import DistributedTransport


@dataclass(frozen=True)
class Rank:
    """Which of torchrun's processes this one is."""

    rank: int
    size: int
    local_rank: int  # on this host

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which alone samples, draws noise, moves the model, prints and writes."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """`device`, or this process's own GPU where any GPU is meant."""
        if device.type != "cuda" or device.index is not None:
            return device
        if self.local_rank >= torch.cuda.device_count():
            limit = f"at most the GPUs of this host, {torch.cuda.device_count()}"
            raise refuse("nproc-per-node", self.local_rank + 1, limit, "start one process a GPU, or use the cpu")
        return torch.device("cuda", self.local_rank)


def torchrun_rank() -> Rank | None:
    """The rank of this process among those that torchrun started; None where there is no other."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) < 2:
        return None
    return Rank(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    )


def join_hosts() -> Rank:
    """Meet the others, once in the life of a process; a group that the caller has made is used as it is."""
    mine = torchrun_rank()
    if mine is None:
        raise refuse("workers", "torchrun", "a number where torchrun started nothing", "start with torchrun")
    if not dist.is_initialized():
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        if on_gpus and mine.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(mine.local_rank)
        # Small things travel between processors, parameters and sums between the devices that hold them.
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo", timeout=PATIENCE)
        atexit.register(_leave)
    return mine


def from_rank_0(value: Any) -> Any:
    """Rank 0's `value`, on every rank; `value` itself where torchrun started nothing."""
    if torchrun_rank() is None:
        return value
    join_hosts()
    box = [value]
    with connected():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def agree(facts: Mapping[str, object]) -> None:
    """Refuse, on every rank and in the same words, facts that are not the same on all."""
    mine = {name: str(fact) for name, fact in facts.items()}
    everyones: list[Any] = [None] * join_hosts().size
    with connected():
        dist.all_gather_object(everyones, mine)
    for rank, theirs in enumerate(everyones):
        for name in sorted({*everyones[0], *theirs}):
            if theirs.get(name) != everyones[0].get(name):
                raise SettingError(
                    f"{name}={theirs.get(name)} on rank {rank} must be rank 0's, {everyones[0].get(name)}: start every "
                    "rank with the same command, versions and data"
                )


class TorchrunBackend:
    """All of torchrun's processes train; each was started with the same settings and data, which is checked."""

    def __init__(self, trainer: LocalTrainer, problem: Problem, sampling: Sampling) -> None:
        self.rank = join_hosts()
        self.size = self.rank.size
        population, (run,) = problem.population, problem.runs
        self._fingerprint = partial(population.fingerprint, times=False)
        self._facts = {
            "clipline": __version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
            "parameters": hashed({name: tuple(shape) for name, shape in problem.model.named_shapes.items()}),
            "dtype": problem.model.vector.dtype,
            "device": problem.device.type,
            "sampling": sampling,
            "seed (hashed)": hashed(run.streams.seed),
            "local": problem.local,
            "precision": problem.precision,
            **facts_of(population),
        }
        self._group = ProcessGroup(trainer, problem, [sampling], self.rank.rank, self.size, DistributedTransport())

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of the one request: PRIVATE. Within `running`, on rank 0."""
        return self._group.sums(requests)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On rank 0: see that all agree, and let the others go at the end."""
        if not self.rank.leads:
            raise refuse("rank", self.rank.rank, "0 to run a training", "call serve() on the other ranks")
        self._agree()
        try:
            yield
        finally:
            with suppress(LostConnectionError):  # what is done is done
                self._group.stop()

    def serve(self) -> None:
        """On the other ranks: see that all agree, and train what rank 0 asks for until its run ends.

        Ctrl-C, which torchrun passes on to all, is for rank 0 to obey between two rounds.
        """
        self._agree()
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            self._group.serve()
        finally:
            if main:
                signal.signal(signal.SIGINT, before)

    def _agree(self) -> None:
        """The facts, and the data themselves: by checksums that mean nothing to who does not know this call's salt."""
        salt = from_rank_0(secrets.token_hex(16))
        agree({**self._facts, "values of the data (salted checksum)": hashed((salt, self._fingerprint()))})


def facts_of(population: Population) -> dict[str, object]:
    """What can be told of a population without reading it all: how many examples each user has, and of what form."""
    fields = {name: (field.shape[1:], str(field.dtype)) for name, field in population.fields.items()}
    offsets = hashlib.blake2b(population.offsets.tobytes(), digest_size=8).hexdigest()
    return {"users": len(population), "examples": population.examples, "population": hashed((offsets, fields))}


def hashed(fact: object) -> str:
    """A short fingerprint of what is too long to show."""
    return hashlib.blake2b(str(fact).encode(), digest_size=8).hexdigest()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
