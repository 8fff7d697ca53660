"""The backend of one process, and the step that all backends share: train, clip, add up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import ClippedSum, PartialSums
from ..gpu.streams import LateScalar
from ..isolation.generators import preserve_generators


@dataclass(frozen=True, eq=False)
class SingleProcess:
    """Trains all users in this process."""

    trainer: LocalTrainer

    @property
    def size(self) -> int:
        """One process."""
        return 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nothing to start or end."""
        yield

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request: PRIVATE."""
        params = requests[0].params
        memory = torch.empty(len(requests), len(params) + 1, dtype=torch.float64, device=params.device)
        sums = PartialSums(memory)
        add_up(self.trainer, requests, sums)
        return finished(sums, requests)


def add_up(trainer: LocalTrainer, requests: Sequence[CohortRequest], sums: PartialSums) -> None:
    """Train the requests' users in this process, block by block; clip and add each block: PRIVATE."""
    with preserve_generators():  # here too, and not only by each block: once is enough
        for updates, owners in trainer.train(requests):
            # Read only now: on a GPU reading the clip waits for the round before, and this block is already launched.
            clips = [request.clip for request in requests]
            sums.add(updates, clips, owners)


def finished(sums: PartialSums, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
    """The sum of each request, once all parts of it are added: PRIVATE."""
    samplings = [request.cohort.sampling for request in requests]
    return sums.finished([request.clip for request in requests], samplings, LateScalar)
