"""Protocols for training a cohort and summing its updates: the border between Algorithm 1 and the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .clipping import ClippedSum, UserUpdates
from .sampling import Cohort


@dataclass(frozen=True, eq=False)
class CohortRequest:
    """A round's request: train this cohort from `params`, clip each update at `clip`, and add the updates up."""

    params: Tensor  # (dim,)
    cohort: Cohort
    round_index: int
    read_clip: Callable[[], float]
    run: int = 0  # index among the runs that train side by side

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
