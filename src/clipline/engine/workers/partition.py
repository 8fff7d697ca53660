"""Partitions a cohort among processes, by the number of local steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...federated.backend import CohortRequest
from ...federated.sampling import Cohort

StepsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # how many local steps each of these users takes


def requests_of_rank(requests: Sequence[CohortRequest], steps_of: StepsOf, rank: int, size: int) -> list[CohortRequest]:
    """The requests with the users of process `rank` only; the users of all requests are partitioned together."""
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
