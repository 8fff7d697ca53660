"""Protocols for training a cohort and summing its updates: the border between Algorithm 1 and the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .clipping import ClippedSum, UserUpdates
from .sampling import Cohort


class PersonalRows:
    """Personal parameters of a request's users, outside the release: PRIVATE.

    A trainer reads where user `i` of the cohort starts and writes what came of it. Parts of a cohort, as of a worker,
    share the memory of the whole.
    """

    __slots__ = ("_places", "_start", "_trained")

    def __init__(self, start: Tensor, trained: Tensor, places: NDArray[np.int64] | None = None) -> None:
        self._start, self._trained = start, trained  # (users, personal) each, on the processor
        self._places = np.arange(len(start)) if places is None else places

    def __repr__(self) -> str:
        return "PersonalRows(private)"

    def of_users(self, chosen: NDArray[np.int64]) -> PersonalRows:
        """Those of some users, by their places in the cohort."""
        return PersonalRows(self._start, self._trained, self._places[chosen])

    def start(self, chosen: NDArray[np.int64]) -> Tensor:
        """(users, personal): what these users start from."""
        return self._start[torch.from_numpy(self._places[chosen])]

    def empty(self) -> PersonalRows:
        """The same start with zeros as the result, to be filled here in part and elsewhere, and added up."""
        return PersonalRows(self._start, torch.zeros_like(self._start))

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Start and result of the whole cohort, for whoever moves them between processes."""
        return self._start, self._trained

    def result(self) -> Tensor:
        """(users, personal): what came of the whole cohort, a copy."""
        return self._trained.clone()

    def write(self, chosen: NDArray[np.int64], rows: Tensor) -> None:
        """What these users have trained. A user whose row is not finite keeps what was there."""
        rows = rows.detach().to(self._start)
        kept = torch.where(rows.isfinite().all(dim=1, keepdim=True), rows, self.start(chosen))
        self._trained[torch.from_numpy(self._places[chosen])] = kept


@dataclass(frozen=True, eq=False)
class CohortRequest:
    """A round's request: train this cohort from `params`, clip each update at `clip`, and add the updates up."""

    params: Tensor  # (dim,)
    cohort: Cohort
    round_index: int
    read_clip: Callable[[], float]
    run: int = 0  # index among the runs that train side by side
    personal: PersonalRows | None = None  # where the model has personal parameters

    @cached_property
    def clip(self) -> float:
        """The clip of this round. On a GPU reading it waits for the previous round: launch training first."""
        return self.read_clip()


class LocalTrainer(Protocol):
    """Trains the users of cohorts, each from the request's parameters and on the user's own examples."""

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[UserUpdates, NDArray[np.int64]]]:
        """Blocks of updates, and for each user the index in `requests` of the user's request: PRIVATE.

        Blocks may share memory: use one before asking for the next.
        """
        ...


class Backend(Protocol):
    """Trains cohorts, clips the updates and adds them up, in one process or many."""

    @property
    def size(self) -> int:
        """Number of processes that train."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """A context around the rounds of a run: starts worker processes, if any, and ends them afterwards."""
        ...

    def sums(self, requests: Sequence[CohortRequest]) -> Sequence[ClippedSum]:
        """The sum of each request: PRIVATE. The next call may reuse the memory: use the sums before."""
        ...
