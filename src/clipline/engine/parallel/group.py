"""Processes that train a cohort together: rank 0 asks, every rank trains its share, the sums are added at rank 0."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import WorkerError
from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import ClippedSum, PartialSums
from ...federated.sampling import Cohort
from ...privacy.events import Sampling
from ..problem import Problem
from .sharing import share_of
from .single import add_up, finished
from .transport import Transport


class LostConnectionError(WorkerError):
    """Another process of the group has gone."""


@dataclass(eq=False)
class ProcessGroup:
    """One of several processes that train cohorts together, over torch.distributed's default group.

    Rank 0 asks (`sums`, `stop`), the others `serve`. Each trains, clips and adds up its share of the users; the
    float64 sums are added at rank 0, once a round. What one process would give differs by the order of those additions
    alone: by some 1e-16 of the sum of the clipped updates' absolute values in every coordinate; the bits' sum is exact.
    """

    trainer: LocalTrainer
    problem: Problem
    samplings: Sequence[Sampling]  # of each run
    rank: int
    size: int
    transport: Transport
    _in_step: bool = True  # whether all ranks wait for rank 0: only then can it ask for anything
    # What rank 0 asks for. Kept: gloo may free a dropped tensor at interpreter exit.
    _order: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._order = torch.zeros(1 + len(self.samplings), 4, dtype=torch.float64)

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request, at rank 0: PRIVATE.

        An error of rank 0's own share is raised as it is, one of another rank as a `WorkerError` with its traceback;
        both only when all have finished their shares.
        """
        self._in_step = False
        round_index = requests[0].round_index
        with connected(round_index):
            self._send(requests)
            dist.broadcast(torch.from_numpy(np.concatenate([request.cohort.users for request in requests])), src=0)
            params = self.transport.broadcast([request.params for request in requests])
        everywhere = [replace(request, params=own) for request, own in zip(requests, params, strict=True)]
        sums, error = self._share(everywhere)
        with connected(round_index):
            failures = self._reduced(error)
        self._in_step = True
        if error is not None:
            raise error
        for rank, text in failures.items():
            raise WorkerError(
                f"worker {rank} of {self.size} failed in round {round_index} ({text.strip().splitlines()[-1]}): mend "
                f"what its traceback shows, or take workers=1 to look closer\n{text}"
            )
        assert sums is not None
        return finished(sums, requests)

    def serve(self) -> None:
        """On every other rank: do what rank 0 asks until it asks for nothing."""
        like = [torch.empty_like(self.problem.model.initial) for _ in self.samplings]
        while True:
            with connected():
                requests = self._received(like)
            if not requests:
                return
            _, error = self._share(requests)
            with connected():
                self._reduced(error)

    def stop(self) -> None:
        """End the others' `serve`. They are lost, and end of themselves, if rank 0 was torn out of a round."""
        if self._in_step:
            with connected():
                self._send([])

    def _send(self, requests: Sequence[CohortRequest]) -> None:
        """On rank 0: how many requests there are, and of each (run, round_index, users, clip), all exact in float64."""
        rows = [(one.run, one.round_index, len(one.cohort.users), one.clip) for one in requests]
        self._order[: 1 + len(rows)] = torch.tensor([(len(rows), 0, 0, 0), *rows], dtype=torch.float64)
        dist.broadcast(self._order, src=0)

    def _received(self, like: Sequence[Tensor]) -> list[CohortRequest]:
        """On every other rank: what rank 0 asks for; its parameters may be written into `like`."""
        dist.broadcast(self._order, src=0)
        rows = self._order[1 : 1 + int(self._order[0, 0])].tolist()
        if not rows:
            return []
        counts = [int(count) for _, _, count, _ in rows]
        users = torch.empty(sum(counts), dtype=torch.int64)
        dist.broadcast(users, src=0)
        cohorts = np.split(users.numpy(), np.cumsum(counts)[:-1])
        params = self.transport.broadcast(like[: len(rows)])
        return [
            CohortRequest(begin, Cohort(cohort, self.samplings[int(run)]), int(t), lambda clip=clip: clip, int(run))  # type: ignore[misc]
            for (run, t, _, clip), begin, cohort in zip(rows, params, cohorts, strict=True)
        ]

    def _share(self, requests: Sequence[CohortRequest]) -> tuple[PartialSums | None, Exception | None]:
        """The sums of this rank's users, or the error that came between."""
        try:
            sums = self.transport.partial_sums(self.rank, [request.params for request in requests])
            add_up(self.trainer, share_of(requests, self.problem.steps_of, self.rank, self.size), sums)
            return sums, None
        except Exception as error:
            return None, error

    def _reduced(self, error: Exception | None) -> dict[int, str]:
        """Add everybody's sums into rank 0's; where somebody failed, tell rank 0 who and how instead.

        All wait for all first, processor to processor: a lost process is noticed there, and not by a GPU, never.
        """
        failed = torch.tensor([0.0 if error is None else 1.0])
        dist.all_reduce(failed)
        if not failed.item():
            self.transport.reduce(self.rank)
            return {}
        texts = [""] * self.size if self.rank == 0 else None
        dist.gather_object(_text(error), texts, dst=0)
        return {rank: text for rank, text in enumerate(texts or ()) if text}


def _text(error: Exception | None) -> str:
    return "" if error is None else "".join(traceback.format_exception(error))


@contextmanager
def connected(round_index: int | None = None) -> Iterator[None]:
    """Say in our words that the others cannot be reached."""
    try:
        yield
    except RuntimeError as error:
        when = "" if round_index is None else f" in round {round_index}"
        raise LostConnectionError(
            f"connection to another worker was lost{when} but all must stay: see what ended it, then resume the run "
            f"({str(error).splitlines()[0][:200]})"
        ) from None
