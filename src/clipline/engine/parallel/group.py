"""Who trains a cohort and adds it up: this process, or several that share the users among them."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import WorkerError
from ...federated.clipping import ClippedSum, aggregate
from ...federated.sampling import Cohort
from ..choose import LocalTrainer
from .jobs import Errand, Hands, StepsOf, share_of
from .transport import Transport


class Backend(Protocol):
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
class SingleProcess:
    """Everybody trains in this process."""

    clients: LocalTrainer

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


class LostConnectionError(WorkerError):
    """Another process of the team has gone."""


@dataclass(eq=False)
class ProcessGroup:
    """One of several processes that train a cohort together, in touch by torch.distributed's default group.

    Rank 0 asks (`clipped_sum`, `stop`), the others `serve`. Each trains, clips and adds up its share of the users; the
    float64 sums are added at rank 0, once a round. What one process would give differs by the order of those additions
    alone: by some 1e-16 of the sum of the clipped updates' absolute values in every coordinate; the bits' sum is exact.
    """

    hands: Hands
    steps_of: StepsOf
    rank: int
    size: int
    exchange: Transport
    runs: int = 1  # that may ask at a time
    _in_step: bool = True  # whether all ranks wait for rank 0: only then can it ask for anything
    # What rank 0 asks for. Kept: a tensor that Python has dropped is freed by torch's thread, fatal as Python ends.
    _said: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._said = torch.zeros(1 + self.runs, 4, dtype=torch.float64)

    def sums(self, errands: Sequence[Errand]) -> Tensor:
        """The sum of each errand, at rank 0: (errands, dim + 1) float64, PRIVATE.

        An error of rank 0's own share is raised as it is, one of another rank as a `WorkerError` with its traceback;
        both only when all have finished their shares.
        """
        self._in_step = False
        round_index = errands[0].round_index
        with connected(round_index):
            self._order(errands)
            dist.broadcast(torch.from_numpy(np.concatenate([errand.users for errand in errands])), src=0)
            params = self.exchange.everyones([errand.params for errand in errands])
        totals, error = self._share([replace(errand, params=own) for errand, own in zip(errands, params, strict=True)])
        with connected(round_index):
            failures = self._added_up(totals, error)
        self._in_step = True
        if error is not None:
            raise error
        for rank, text in failures.items():
            raise WorkerError(
                f"worker {rank} of {self.size} failed in round {round_index} ({text.strip().splitlines()[-1]}): mend "
                f"what its traceback shows, or take workers=1 to look closer\n{text}"
            )
        return totals

    def serve(self) -> None:
        """On every other rank: do what rank 0 asks until it asks for nothing."""
        like = [torch.empty_like(self.hands.flat.initial) for _ in range(self.runs)]
        while True:
            with connected():
                errands = self._asked(like)
            if not errands:
                return
            totals, error = self._share(errands)
            with connected():
                self._added_up(totals, error)

    def stop(self) -> None:
        """End the others' `serve`. They are lost, and end of themselves, if rank 0 was torn out of a round."""
        if self._in_step:
            with connected():
                self._order([])

    def _order(self, errands: Sequence[Errand]) -> None:
        """On rank 0: how many errands there are, and of each (run, round_index, users, clip), all exact in float64."""
        rows = [(errand.run, errand.round_index, len(errand.users), errand.clip) for errand in errands]
        self._said[: 1 + len(rows)] = torch.tensor([(len(rows), 0, 0, 0), *rows], dtype=torch.float64)
        dist.broadcast(self._said, src=0)

    def _asked(self, like: Sequence[Tensor]) -> list[Errand]:
        """On every other rank: what rank 0 asks for; its parameters may be written into `like`."""
        dist.broadcast(self._said, src=0)
        rows = self._said[1 : 1 + int(self._said[0, 0])].tolist()
        if not rows:
            return []
        counts = [int(count) for _, _, count, _ in rows]
        users = torch.empty(sum(counts), dtype=torch.int64)
        dist.broadcast(users, src=0)
        cohorts = np.split(users.numpy(), np.cumsum(counts)[:-1])
        params = self.exchange.everyones(like[: len(rows)])
        return [
            Errand(int(run), begin, cohort, int(round_index), clip)
            for (run, round_index, _, clip), begin, cohort in zip(rows, params, cohorts, strict=True)
        ]

    def _share(self, errands: Sequence[Errand]) -> tuple[Tensor, Exception | None]:
        """The sums of this rank's users, (errands, dim + 1) float64, or the error that came between."""
        try:
            totals = self.exchange.room(self.rank, [errand.params for errand in errands])
            self.hands.add_up(share_of(errands, self.steps_of, self.rank, self.size), totals)
            return totals, None
        except Exception as error:
            return torch.empty(0), error

    def _added_up(self, totals: Tensor, error: Exception | None) -> dict[int, str]:
        """Add everybody's `totals` into rank 0's; where somebody failed, tell rank 0 who and how instead.

        All wait for all first, processor to processor: a lost process is noticed there and not, as by a GPU, never.
        """
        failed = torch.tensor([0.0 if error is None else 1.0])
        dist.all_reduce(failed)
        if not failed.item():
            self.exchange.add_up(totals, self.rank)
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
