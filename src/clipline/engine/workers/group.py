"""Trains cohorts in several processes: rank 0 broadcasts requests, each rank trains a share, rank 0 gets the sum."""

from __future__ import annotations

import heapq
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import GO_ON, RunError, WorkerError, first_line
from ...federated.backend import CohortRequest, LocalTrainer, PersonalRows
from ...federated.clipping import ClippedSum, PartialSums
from ...federated.sampling import Cohort
from ...privacy.events import Sampling
from ..core.problem import Problem
from ..isolation.guard import exhausted
from .single import add_up, finished
from .transport import LOST, LostConnectionError, Transport, patience


@dataclass(eq=False)
class ProcessGroup:
    """One of several processes that train cohorts together.

    Rank 0 calls `sums` and `stop`, the others `serve`. Each trains, clips and adds up its share of the users; the
    float64 sums are reduced to rank 0 once a round. The result differs from that of one process by the order of those
    additions only: by about 1e-16 of the sum of the clipped updates' absolute values in every coordinate. The sum of
    the bits is exact.
    """

    trainer: LocalTrainer
    problem: Problem
    samplings: Sequence[Sampling]  # of each run
    rank: int
    size: int
    transport: Transport
    _longest: float = 0.0  # seconds of a round
    _synchronised: bool = True  # whether all other ranks wait for a broadcast: only then can rank 0 send one
    # What rank 0 requests. Kept: gloo may free a dropped tensor at interpreter exit.
    _header: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._header = torch.zeros(1 + len(self.samplings), 4, dtype=torch.float64)

    def sums(self, requests: Sequence[CohortRequest]) -> list[ClippedSum]:
        """The sum of each request, at rank 0: PRIVATE.

        An error of rank 0's own share is raised as it is, one of another rank as a `WorkerError` with its traceback;
        both only after all ranks have finished their shares.
        """
        self._synchronised = False
        begun = time.monotonic()
        round_index = requests[0].round_index
        with connected(round_index):
            self._send_header(requests)
            self.transport.share(torch.from_numpy(np.concatenate([request.cohort.users for request in requests])))
            params = self.transport.share_params([request.params for request in requests])
            personal = [None if request.personal is None else request.personal.empty() for request in requests]
            for rows in personal:
                if rows is not None:
                    self.transport.share(rows.tensors()[0])
        shared_requests = [
            replace(request, params=own, personal=rows)
            for request, own, rows in zip(requests, params, personal, strict=True)
        ]
        sums, error = self._train_share(shared_requests)
        self._longest = max(self._longest, time.monotonic() - begun)
        with connected(round_index):
            failed, failures = self._reduce(error)
            if not failed:
                self._collect_personal(shared_requests)
                for request, rows in zip(requests, personal, strict=True):
                    if request.personal is not None and rows is not None:
                        request.personal.tensors()[1].copy_(rows.tensors()[1])
        self._synchronised = True
        self._longest = max(self._longest, time.monotonic() - begun)
        if error is not None:
            raise error
        for rank, text in failures.items():
            if "\n" not in text:
                raise RunError(f"in worker {rank} of {self.size}, round {round_index}, {text}")
            raise WorkerError(
                f"worker {rank} of {self.size} failed in round {round_index} ({text.strip().splitlines()[-1]}): mend "
                f"what its traceback shows, or take workers=1 to look closer\n{text}"
            )
        assert sums is not None
        return finished(sums, requests)

    def serve(self) -> None:
        """On every other rank: train what rank 0 requests, until it sends an empty request."""
        buffers = [torch.empty_like(self.problem.model.initial) for _ in self.samplings]
        while True:
            with connected():
                requests = self._receive(buffers)
            if not requests:
                return
            _, error = self._train_share(requests)
            with connected():
                if not self._reduce(error)[0]:
                    self._collect_personal(requests)

    def stop(self) -> None:
        """End `serve` on the other ranks. After an error within a round nothing is sent: they end when rank 0 does."""
        if self._synchronised:
            with connected():
                self._send_header([])

    def _send_header(self, requests: Sequence[CohortRequest]) -> None:
        """On rank 0: broadcast the number of requests, and (run, round_index, users, clip) of each, all exact."""
        rows = [(one.run, one.round_index, len(one.cohort.users), one.clip) for one in requests]
        self._header[: 1 + len(rows)] = torch.tensor([(len(rows), 0, 0, 0), *rows], dtype=torch.float64)
        self.transport.share(self._header)

    def _receive(self, buffers: Sequence[Tensor]) -> list[CohortRequest]:
        """On every other rank: the requests of rank 0; the parameters may be written into `buffers`."""
        self.transport.share(self._header)
        rows = self._header[1 : 1 + int(self._header[0, 0])].tolist()
        if not rows:
            return []
        counts = [int(count) for _, _, count, _ in rows]
        users = torch.empty(sum(counts), dtype=torch.int64)
        self.transport.share(users)
        cohorts = np.split(users.numpy(), np.cumsum(counts)[:-1])
        params = self.transport.share_params(buffers[: len(rows)])
        personal = [self._receive_personal(count) for count in counts]
        return [
            CohortRequest(
                begin,
                Cohort(cohort, self.samplings[int(run)]),
                int(t),
                lambda clip=clip: clip,  # type: ignore[misc]
                int(run),
                own,
            )
            for (run, t, _, clip), begin, cohort, own in zip(rows, params, cohorts, personal, strict=True)
        ]

    def _receive_personal(self, users: int) -> PersonalRows | None:
        """Personal parameters of so many users from rank 0, if the model has any."""
        width = self.problem.model.personal_dim
        if not width:
            return None
        start = torch.empty(users, width, dtype=self.problem.model.vector.dtype)
        self.transport.share(start)
        return PersonalRows(start, torch.zeros_like(start))

    def _collect_personal(self, requests: Sequence[CohortRequest]) -> None:
        """Add up at rank 0 what users trained: each is trained by one rank, and is zero on the others."""
        for request in requests:
            if request.personal is not None:
                self.transport.add_to_first(request.personal.tensors()[1])

    def _train_share(self, requests: Sequence[CohortRequest]) -> tuple[PartialSums | None, Exception | None]:
        """The sums over this rank's share of the users, or the error of their training."""
        try:
            sums = self.transport.partial_sums(self.rank, [request.params for request in requests])
            add_up(self.trainer, requests_of_rank(requests, self.problem.steps_of, self.rank, self.size), sums)
            return sums, None
        except Exception as error:
            return None, exhausted(error) or error

    def _reduce(self, error: Exception | None) -> tuple[bool, dict[int, str]]:
        """Reduce all sums to rank 0, or gather the tracebacks there if a rank failed. Says whether one did."""
        if not self.transport.any_failed(error is not None, patience(self._longest)):
            self.transport.reduce(self.rank)
            return False, {}
        texts = self.transport.tracebacks(_text(error))
        return True, {rank: text for rank, text in enumerate(texts) if text}


def _text(error: Exception | None) -> str:
    """The traceback; of what ran out only the sentence, as the rest may tell of a user's data."""
    if isinstance(error, RunError):
        return str(error)
    return "" if error is None else "".join(traceback.format_exception(error))


@contextmanager
def connected(round_index: int | None = None) -> Iterator[None]:
    """Turn errors of the transport into a `LostConnectionError`."""
    try:
        yield
    except LostConnectionError:
        raise
    except LOST as error:
        when = "" if round_index is None else f" in round {round_index}"
        raise LostConnectionError(
            f"connection to another worker was lost{when} but all must stay: see what ended it, then {GO_ON} "
            f"({first_line(error)[:200]})"
        ) from None


def requests_of_rank(
    requests: Sequence[CohortRequest], steps_of: Callable[[NDArray[np.int64]], NDArray[np.int64]], rank: int, size: int
) -> list[CohortRequest]:
    """The requests with the users of process `rank` only, all partitioned together by their local steps."""
    users = np.concatenate([request.cohort.users for request in requests])
    positions = partition_users(steps_of(users), size)[rank]
    ends = np.cumsum([len(request.cohort.users) for request in requests])[:-1]
    shares = np.split(positions, np.searchsorted(positions, ends))
    begins = [0, *ends.tolist()]
    return [_of_users(request, share - begin) for request, share, begin in zip(requests, shares, begins, strict=True)]


def _of_users(request: CohortRequest, places: NDArray[np.int64]) -> CohortRequest:
    """The request with some users of its cohort only."""
    cohort = Cohort(request.cohort.users[places], request.cohort.sampling)
    personal = None if request.personal is None else request.personal.of_users(places)
    return replace(request, cohort=cohort, personal=personal)


def partition_users(steps: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """The positions (ascending) of each of `size` workers: longest first, each to the worker with least to do so far.

    Ties go to the worker with fewer users, then to the lower rank, so that every process computes the same partition.
    No worker has more steps than the average plus one user's.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, 0, rank) for rank in range(size)]
    order = np.argsort(-steps, kind="stable")
    for position, work in zip(order.tolist(), steps[order].tolist(), strict=True):
        load, count, rank = loads[0]
        shares[rank].append(position)
        heapq.heapreplace(loads, (load + work, count + 1, rank))
    return [np.sort(np.array(share, np.int64)) for share in shares]
