"""Who trains a cohort and adds it up: the border between Algorithm 1 and the engine."""

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
    """What a round wants: this cohort trained from `params` on, each update clipped at `clip`, and added up."""

    params: Tensor  # (dim,)
    cohort: Cohort
    round_index: int
    read_clip: Callable[[], float]
    run: int = 0  # which of the runs that train side by side

    @cached_property
    def clip(self) -> float:
        """The clip of this round. On a GPU reading it waits for the round before: train first, then read it."""
        return self.read_clip()


class LocalTrainer(Protocol):
    """Trains the users of cohorts, each from the request's parameters on their own examples."""

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[UserUpdates, NDArray[np.int64]]]:
        """Blocks of updates, and for each user the place in `requests` of the request it belongs to: PRIVATE.

        A block may lie where the next one will: use it before asking for the next.
        """
        ...


class Backend(Protocol):
    """Trains cohorts, clips and adds up, in one process or many."""

    @property
    def size(self) -> int:
        """Number of processes that train."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Around the rounds of a run: starts what they need and ends it afterwards."""
        ...

    def sums(self, requests: Sequence[CohortRequest]) -> Sequence[ClippedSum]:
        """The sum of each request: PRIVATE. Use them up before asking again: they may lie in the same memory."""
        ...
