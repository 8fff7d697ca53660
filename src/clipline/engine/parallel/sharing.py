"""Which process trains which users of a cohort."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ...federated.backend import CohortRequest
from ...federated.sampling import Cohort

StepsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # how many local steps each of these users takes


def share_of(requests: Sequence[CohortRequest], steps_of: StepsOf, rank: int, size: int) -> list[CohortRequest]:
    """The requests with the users of one of `size` processes only; the users of all requests are shared out at once."""
    users = np.concatenate([request.cohort.users for request in requests])
    places = share_out(steps_of(users), size)[rank]
    ends = np.cumsum([len(request.cohort.users) for request in requests])[:-1]
    parts = np.split(users[places], np.searchsorted(places, ends))
    return [
        replace(request, cohort=Cohort(part, request.cohort.sampling))
        for request, part in zip(requests, parts, strict=True)
    ]


def share_out(steps: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """The places (ascending) of each of `size` workers: the longest first, each to whoever has least to do so far.

    Where two have equally little, to the one with fewer users, then to the lower rank: every process that asks gets the
    same answer. No worker has more steps than the average and one user's.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, 0, rank) for rank in range(size)]
    order = np.argsort(-steps, kind="stable")
    for place, work in zip(order.tolist(), steps[order].tolist(), strict=True):
        load, count, rank = loads[0]
        shares[rank].append(place)
        heapq.heapreplace(loads, (load + work, count + 1, rank))
    return [np.sort(np.array(share, np.int64)) for share in shares]
