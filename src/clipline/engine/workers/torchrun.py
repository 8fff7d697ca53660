"""Processes that torchrun started, on one machine or many: joins them, and checks that settings and data agree."""

from __future__ import annotations

import atexit
import hashlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ... import __version__
from ...data.population import Population
from ...errors import SettingError, refuse
from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import ClippedSum
from ...lr_schedules import schedule_text
from ...privacy.events import Sampling
from ..core.problem import Problem
from .group import ProcessGroup, connected
from .transport import DistributedTransport, LostConnectionError

TIMEOUT = timedelta(days=30)  # ranks wait while rank 0 evaluates or writes; torchrun ends all when one dies
# Between GPUs nothing is sent before all ranks have said that they are there: NCCL ends a process that waits so long.
GPU_TIMEOUT = timedelta(hours=1)
_of_gpus: list[dist.ProcessGroup] = []  # the group of NCCL, if it was made here


@dataclass(frozen=True)
class Rank:
    """The rank of this process among torchrun's."""

    rank: int
    size: int
    local_rank: int  # on this host

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, the only one that samples, draws noise, updates the model, prints and writes."""
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """`device`; for "cuda" without an index, this process's own GPU."""
        if device.type != "cuda" or device.index is not None:
            return device
        if self.local_rank >= torch.cuda.device_count():
            limit = f"at most the GPUs of this host, {torch.cuda.device_count()}"
            raise refuse("nproc-per-node", self.local_rank + 1, limit, "start one process a GPU, or use the cpu")
        return torch.device("cuda", self.local_rank)


def torchrun_rank() -> Rank | None:
    """The rank of this process among those that torchrun started; None if it is the only one."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names) or int(os.environ["WORLD_SIZE"]) < 2:
        return None
    return Rank(
        int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    )


def join_group() -> Rank:
    """Initialise torch.distributed, once in a process; a group that the caller has made is used as it is."""
    own = torchrun_rank()
    if own is None:
        raise refuse("workers", "torchrun", "a number where torchrun started nothing", "start with torchrun")
    if not dist.is_initialized():
        on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
        if on_gpus and own.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(own.local_rank)
        # Control messages go over gloo; parameters and sums over that of their device.
        hook = sys.excepthook
        dist.init_process_group("gloo", timeout=TIMEOUT)
        if on_gpus:
            _of_gpus[:] = [dist.new_group(backend="nccl", timeout=GPU_TIMEOUT)]
        sys.excepthook = hook  # torch installs one that prefixes the caller's later errors with the rank
        atexit.register(_destroy_group)
    return own


def from_rank_0(value: Any) -> Any:
    """Broadcast: rank 0's `value` on every rank; `value` itself without torchrun."""
    if torchrun_rank() is None:
        return value
    join_group()
    box = [value]
    with connected():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def agree(facts: Mapping[str, object]) -> None:
    """Refuse, on every rank with the same message, facts that differ between ranks."""
    own = {name: str(fact) for name, fact in facts.items()}
    gathered: list[Any] = [None] * join_group().size
    with connected():
        dist.all_gather_object(gathered, own)
    for rank, of_rank in enumerate(gathered):
        for name in sorted({*gathered[0], *of_rank}):
            if of_rank.get(name) != gathered[0].get(name):
                raise SettingError(
                    f"{name}={of_rank.get(name)} on rank {rank} must be rank 0's, {gathered[0].get(name)}: start every "
                    "rank with the same command, versions and data"
                )


class TorchrunBackend:
    """All of torchrun's processes train. Each must be started with the same settings and data, which is checked."""

    def __init__(self, trainer: LocalTrainer, problem: Problem, sampling: Sampling) -> None:
        self.rank = join_group()
        self.size = self.rank.size
        population, (run,) = problem.population, problem.runs
        self._fingerprint = partial(population.fingerprint, times=False)
        self._streams = run.streams
        self._facts = {
            "clipline": __version__,
            "numpy": np.__version__,
            "torch": torch.__version__,
            "parameters": _digest({name: tuple(shape) for name, shape in problem.model.named_shapes.items()}),
            "personal parameters": ", ".join(problem.model.personal_shapes),
            "dtype": problem.model.vector.dtype,
            "device": problem.device.type,
            "sampling": sampling,
            "local": replace(problem.local, lr_schedule=schedule_text(problem.local.lr_schedule, problem.rounds)),
            "precision": problem.precision,
            **_population_facts(population),
        }
        transport = DistributedTransport(next(iter(_of_gpus), None))
        self._group = ProcessGroup(trainer, problem, [sampling], self.rank.rank, self.size, transport)

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of the one request: PRIVATE. Within `running`, on rank 0."""
        return self._group.sums(requests)

    @contextmanager
    def running(self) -> Iterator[None]:
        """On rank 0: check that all ranks agree; on leaving, end the other ranks' `serve`."""
        if not self.rank.leads:
            raise refuse("rank", self.rank.rank, "0 to run a training", "call serve() on the other ranks")
        self._agree()
        try:
            yield
        finally:
            with suppress(LostConnectionError):  # the run is over: nothing is lost
                self._group.stop()

    def serve(self) -> None:
        """On the other ranks: check that all agree, then train what rank 0 requests until its run ends.

        Ctrl-C and SIGTERM, which torchrun sends to all ranks, are ignored here: rank 0 handles them between two rounds.
        """
        self._agree()
        main = threading.current_thread() is threading.main_thread()
        taken = (signal.SIGINT, signal.SIGTERM) if main else ()
        before = {one: signal.signal(one, signal.SIG_IGN) for one in taken}
        try:
            self._group.serve()
        finally:
            self._streams.key.renew()  # the run is over: nothing of it can be drawn again
            for one, handler in before.items():
                signal.signal(one, handler)

    def _agree(self) -> None:
        """Compare the facts; seed and data by checksums that mean nothing without this call's salt."""
        salt, key = from_rank_0(secrets.token_hex(16)), self._streams.key
        key.restore(from_rank_0(key.unprivate_bytes))  # of a run that rank 0 begins or resumes
        secret = {"seed": self._streams.seed, "values of the data": self._fingerprint()}
        salted = {f"{name} (salted checksum)": _digest((salt, value)) for name, value in secret.items()}
        agree({**self._facts, **salted})


def _population_facts(population: Population) -> dict[str, object]:
    """What is known of a population without reading all of it: examples of each user, shapes and types."""
    fields = {name: (field.shape[1:], str(field.dtype)) for name, field in population.fields.items()}
    offsets = hashlib.blake2b(population.offsets.tobytes(), digest_size=8).hexdigest()
    return {"users": len(population), "examples": population.examples, "population": _digest((offsets, fields))}


def _digest(fact: object) -> str:
    """A short checksum of a fact that is too long to show."""
    return hashlib.blake2b(str(fact).encode(), digest_size=8).hexdigest()


def _destroy_group() -> None:
    if dist.is_initialized():
        _of_gpus.clear()
        dist.destroy_process_group()
