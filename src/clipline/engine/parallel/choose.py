"""Chooses the backend: this process, several on this machine, or those that torchrun started."""

from __future__ import annotations

from typing import Literal

from ...errors import check_whole
from ...federated.backend import Backend, LocalTrainer
from ...privacy.events import Sampling
from ..problem import Problem
from .forked import ForkedBackend, warn_of_too_many
from .single import SingleProcess
from .torchrun import TorchrunBackend

Workers = int | Literal["torchrun"]


def choose_backend(workers: Workers, trainer: LocalTrainer, problem: Problem, sampling: Sampling) -> Backend:
    """The backend of this process alone (1), of `workers` processes on this machine, or of torchrun's processes."""
    if workers == "torchrun":
        return TorchrunBackend(trainer, problem, sampling)
    check_whole("workers", workers, at_least=1, way_out="1 is this process alone, 'torchrun' all that it started")
    if workers == 1:
        return SingleProcess(trainer)
    forked = ForkedBackend(trainer, problem, [sampling], workers)
    warn_of_too_many(workers)
    return forked
