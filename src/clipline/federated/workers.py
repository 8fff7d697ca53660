"""Who trains a cohort and adds it up: this process, or several that share the users among them."""

from __future__ import annotations

import heapq
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..errors import WorkerError
from ..privacy.events import Sampling
from .clients import Clients
from .clipping import ClippedSum, aggregate, part_of_sum
from .exchange import Exchange
from .sampling import Cohort

StepsOf = Callable[[NDArray[np.int64]], NDArray[np.int64]]  # how many local steps each of these users takes

_STOP, _TRAIN = range(2)  # what rank 0 may ask of the others


class Workforce(Protocol):
    """Trains a cohort and gives the one private sum of a round."""

    @property
    def size(self) -> int:
        """Number of processes that train."""
        ...

    def at_work(self) -> AbstractContextManager[None]:
        """The time of a run: what it needs is there within, and gone afterwards."""
        ...

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits: PRIVATE."""
        ...

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Begin to train the cohort that comes next, if that is of use before its clip is known."""
        ...


@dataclass(frozen=True, eq=False)
class Alone:
    """Everybody trains in this process."""

    clients: Clients

    @property
    def size(self) -> int:
        """One process."""
        return 1

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Nothing to prepare; what a device has begun is not kept."""
        try:
            yield
        finally:
            self.clients.forget()

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits: PRIVATE."""
        updates = self.clients.train(params, cohort, round_index)
        return aggregate(updates, clip, cohort, len(params), params.device)

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """A GPU that has work to go on with is never idle."""
        self.clients.begin(params, cohort, round_index)


def share_out(users: NDArray[np.int64], steps: NDArray[np.int64], size: int) -> list[NDArray[np.int64]]:
    """The users (ascending) of each of `size` workers: the longest first, each to whoever has least to do so far.

    Where two have equally little, to the one with fewer users, then to the lower rank: every process that asks gets the
    same answer. No worker has more steps than the average and one user's.
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [(0, 0, rank) for rank in range(size)]
    order = np.lexsort((users, -steps))
    for user, work in zip(users[order].tolist(), steps[order].tolist(), strict=True):
        load, count, rank = loads[0]
        shares[rank].append(user)
        heapq.heapreplace(loads, (load + work, count + 1, rank))
    return [np.sort(np.array(share, np.int64)) for share in shares]


class LostConnectionError(WorkerError):
    """Another process of the team has gone."""


@dataclass(eq=False)
class Team:
    """One of several processes that train a cohort together, in touch by torch.distributed's default group.

    Rank 0 asks (`clipped_sum`, `stop`), the others `serve`. Each trains, clips and adds up its share of the users; the
    float64 sums are added at rank 0, once a round. What one process would give differs by the order of those additions
    alone: by some 1e-16 of the sum of the clipped updates' absolute values in every coordinate; the bits' sum is exact.
    """

    clients: Clients
    steps_of: StepsOf
    sampling: Sampling
    rank: int
    size: int
    exchange: Exchange
    _in_step: bool = True  # whether all ranks wait for rank 0: only then can it ask for anything
    # What rank 0 asks for. Kept: a tensor that Python has dropped is freed by torch's thread, fatal as Python ends.
    _said: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))

    def clipped_sum(self, params: Tensor, cohort: Cohort, round_index: int, clip: float) -> ClippedSum:
        """The sum of the cohort's clipped updates and bits, at rank 0: PRIVATE.

        An error of rank 0's own share is raised as it is, one of another rank as a `WorkerError` with its traceback;
        both only when all have finished their shares.
        """
        self._in_step = False
        with connected(round_index):
            self._order(_TRAIN, round_index, len(cohort.users), clip)
            dist.broadcast(torch.from_numpy(cohort.users.copy()), src=0)
            params = self.exchange.everyones(params)
        total, error = self._share(params, cohort.users, round_index, clip)
        with connected(round_index):
            failures = self._added_up(total, error)
        self._in_step = True
        if error is not None:
            raise error
        for rank, text in failures.items():
            raise WorkerError(
                f"worker {rank} of {self.size} failed in round {round_index} ({text.strip().splitlines()[-1]}): mend "
                f"what its traceback shows, or take workers=1 to look closer\n{text}"
            )
        return ClippedSum(total, clip, cohort.sampling)

    def serve(self) -> None:
        """On every other rank: do what rank 0 asks until it says stop."""
        like = torch.empty_like(self.clients.flat.initial)
        while True:
            with connected():
                order, round_index, count, clip = self._order().tolist()
                if order == _STOP:
                    return
                users = torch.empty(int(count), dtype=torch.int64)
                dist.broadcast(users, src=0)
                params = self.exchange.everyones(like)
            total, error = self._share(params, users.numpy(), int(round_index), clip)
            with connected():
                self._added_up(total, error)

    def stop(self) -> None:
        """End the others' `serve`. They are lost, and end of themselves, if rank 0 was torn out of a round."""
        if self._in_step:
            with connected():
                self._order(_STOP)

    def _order(self, *numbers: float) -> Tensor:
        """What rank 0 asks for, on all ranks: (order, round_index, users, clip), all exact in float64."""
        for place, number in enumerate(numbers):
            self._said[place] = number
        dist.broadcast(self._said, src=0)
        return self._said

    def _share(
        self, params: Tensor, users: NDArray[np.int64], round_index: int, clip: float
    ) -> tuple[Tensor, Exception | None]:
        """The sum of this rank's users, (dim + 1,) float64, or the error that came between."""
        try:
            cohort = Cohort(share_out(users, self.steps_of(users), self.size)[self.rank], self.sampling)
            updates = self.clients.train(params, cohort, round_index)
            return part_of_sum(updates, clip, self.exchange.room(self.rank, params)), None
        except Exception as error:
            return params.new_empty(0), error

    def _added_up(self, total: Tensor, error: Exception | None) -> dict[int, str]:
        """Add everybody's `total` into rank 0's; where somebody failed, tell rank 0 who and how instead.

        All wait for all first, processor to processor: a lost process is noticed there and not, as by a GPU, never.
        """
        failed = torch.tensor([0.0 if error is None else 1.0])
        dist.all_reduce(failed)
        if not failed.item():
            self.exchange.add_up(total, self.rank)
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
