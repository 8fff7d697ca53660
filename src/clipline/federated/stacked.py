"""Local training of many users at once, each with parameters of their own: the way of a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from ..errors import ModuleError
from ..streams import Streams
from .batches import Steps, joined, plan_steps
from .chance import step_keys
from .local import Batch, Loss, per_example
from .one_by_one import OneByOne
from .precision import computing_in
from .sampling import Cohort
from .updates import Dense, Updates

_BLOCK = 0.5  # of a GPU's free memory may be taken by a block of users
_MOST = 1024  # users in a block: more do not make a GPU faster
_ON_CORES = 32  # users in a block on processor cores


class CannotStack(ModuleError):
    """The model or its loss uses an operation that has no version for many users at once."""


@dataclass(frozen=True, eq=False)
class Visit:
    """Users to train from `params` on, in one round of one run."""

    params: Tensor  # (dim,)
    users: NDArray[np.int64]
    round_index: int
    streams: Streams
    lr: float


class Stacked:
    """Trains the users of a cohort in blocks, a block as one stack: `torch.func.vmap` over parameters and batches.

    Equal to `plain`, whose working copy of the model it uses, up to the order of additions. Users are sorted by work,
    so that a block runs only as long as its longest user, and each step runs only the users who still have one. A model
    or loss that has no version for many users is refused with `CannotStack`.
    """

    def __init__(self, plain: OneByOne, *, block_size: int | None = None, compiled: bool | None = None) -> None:
        self.plain = plain
        self.flat = plain.flat
        self._shapes = self.flat.named_shapes
        self._loss = _LossOf(self.flat.module, plain.loss)
        self._keys = ["model." + f"{name}.key".lstrip(".") for name in self.flat.chances]
        self._losses: Any = vmap(self._loss_of_one, randomness="error")
        self.compiled = False
        self._per_example = self._probe()
        self.block_size = block_size or self._fitting()
        self.compiled = plain.device.type == "cuda" if compiled is None else compiled
        if self.compiled:
            self._losses = torch.compile(self._losses)

    def train(self, params: Tensor, cohort: Cohort, round_index: int) -> Iterator[Updates]:
        """Updates (params after local SGD - params) of the cohort's users, in blocks, most work first."""
        visit = Visit(params, cohort.users, round_index, self.plain.streams, self.plain.local.lr)
        for updates, _ in self.train_together([visit]):
            yield updates

    def train_together(self, visits: Sequence[Visit]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Blocks of updates of users from several runs, side by side, and the number of the run of each user."""
        population, local = self.plain.examples.population, self.plain.local
        work = np.concatenate([local.examples_of(population, visit.users) for visit in visits])
        owners = np.repeat(np.arange(len(visits)), [len(visit.users) for visit in visits])
        users = np.concatenate([visit.users for visit in visits])
        order = np.lexsort((owners, -work))
        for start in range(0, len(order), self.block_size):
            chosen = order[start : start + self.block_size]
            yield self.block(visits, users[chosen], owners[chosen]), owners[chosen]

    def block(self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]) -> Updates:
        """The updates of users sorted by work, each in the run `visits[owner]`; not clipped: PRIVATE."""
        plain, device = self.plain, self.plain.device
        steps, keys = self._plan(visits, users, owners)
        chances = torch.from_numpy(keys).to(device, non_blocking=True)
        counts = torch.from_numpy(steps.counts).to(device, non_blocking=True)
        rates = torch.tensor([visits[owner].lr for owner in owners], dtype=plain.flat.vector.dtype, device=device)
        examples = plain.examples.gather(steps.rows)
        places = torch.arange(plain.local.batch_size, device=device)
        first = self._first(visits, owners)
        stack = [piece.clone() for piece in first]
        self.flat.module.train()
        with computing_in(plain.precision, device):
            for step in range(steps.longest):
                for run, width in self._runs(steps, step):
                    batch = {name: field[run, step, :width] for name, field in examples.items()}
                    kept = places[:width] < counts[run, step, None]
                    self._step([piece[run] for piece in stack], chances[run, step], batch, kept, rates[run])
        ends = np.cumsum([shape.numel() for shape in self._shapes.values()]).tolist()
        pieces = zip([0, *ends[:-1]], stack, first, strict=True)
        return Updates([Dense(start, piece.sub_(begun).flatten(1)) for start, piece, begun in pieces])

    def _plan(
        self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[Steps, NDArray[np.int32]]:
        """The batches of every user, and the keys of every `Chance` at every step: (users, steps, chances, 2)."""
        population, local = self.plain.examples.population, self.plain.local
        parts, keys = [], np.zeros(len(users), np.uint64)
        for number, visit in enumerate(visits):
            own = owners == number
            parts.append((own, plan_steps(population, users[own], local, visit.streams, visit.round_index)))
            keys[own] = visit.streams.user_keys("dropout", visit.round_index, users[own])
        steps = joined(parts)
        return steps, step_keys(keys, steps.longest, len(self._keys))

    def _first(self, visits: Sequence[Visit], owners: NDArray[np.int64]) -> list[Tensor]:
        """The parameters that each user starts from, piece by piece: (users, *shape)."""
        sizes = [shape.numel() for shape in self._shapes.values()]
        if len(visits) == 1:
            pieces = torch.split(visits[0].params.expand(len(owners), -1), sizes, dim=1)
        else:
            run = torch.from_numpy(owners).to(self.plain.device)
            pieces = torch.split(torch.stack([visit.params for visit in visits]), sizes, dim=1)
            pieces = tuple(piece[run] for piece in pieces)
        return [
            piece.view(-1, *shape) if len(visits) > 1 else piece.reshape(-1, *shape)
            for piece, shape in zip(pieces, self._shapes.values(), strict=True)
        ]

    def _runs(self, steps: Steps, step: int) -> Iterator[tuple[slice, int]]:
        """Which users take this step together, and with how wide a batch.

        With a loss for each example short batches are filled up and the filling does not count; otherwise only users
        whose batches are of one size go together.
        """
        if self._per_example:
            yield slice(0, int((steps.counts[:, step] > 0).sum())), self.plain.local.batch_size
        else:
            for run in steps.alike(step):
                yield run, int(steps.counts[run.start, step])

    def _step(self, stack: list[Tensor], chances: Tensor, batch: Batch, kept: Tensor, rates: Tensor) -> None:
        """One step of SGD of every user in the stack, in place."""
        leaves = [piece.detach().requires_grad_() for piece in stack]
        if self.compiled:
            for tensor in (*leaves, chances, *batch.values(), kept):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)  # one program for any number of users
        losses = self._losses(dict(zip(self._shapes, leaves, strict=True)), chances, batch, kept)
        # A user's loss depends on that user's parameters alone: the gradient of the sum holds each user's own.
        gradients = torch.autograd.grad(losses.sum(), leaves)
        for piece, gradient in zip(stack, gradients, strict=True):
            piece.addcmul_(gradient.to(piece.dtype), rates.view(-1, *[1] * (piece.ndim - 1)), value=-1)

    def _loss_of_one(self, named: dict[str, Tensor], chances: Tensor, batch: Batch, kept: Tensor) -> Tensor:
        state = {f"model.{name}": param for name, param in named.items()}
        state |= dict(zip(self._keys, chances.unbind(0), strict=True))
        losses: Tensor = functional_call(self._loss, state, (batch,))
        return self.plain.local.reduced(losses, kept) if self._per_example else losses

    def _probe(self) -> bool:
        """Try a step of one user, alone and then twice in a stack. Says whether the loss is one for each example."""
        plain = self.plain
        population, params = plain.examples.population, plain.flat.initial
        user = int(np.argmax(np.diff(population.offsets[: 1 + min(len(population), 1000)])))
        if population.size(user) == 0:
            raise CannotStack("the first 1000 users have no examples to try the model on")
        plain.block(params, np.array([user]), 0)  # refuses what no engine can train
        rows = np.full((2, 2), int(population.offsets[user]))
        batch = plain.examples.gather(rows)
        self.flat.module.train()
        with torch.no_grad():
            self._per_example = per_example(plain.loss(self.flat.module, {k: v[0] for k, v in batch.items()}), 2)
        stack = [piece.clone() for piece in self._first([Visit(params, rows[0], 0, plain.streams, 1.0)], rows[:, 0])]
        chances = torch.zeros(2, len(self._keys), 2, dtype=torch.int32, device=plain.device)
        kept = torch.ones(2, 2, dtype=torch.bool, device=plain.device)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # torch warns where it would loop over the users instead
                self._step(stack, chances, batch, kept, torch.ones(2, device=plain.device))
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error
        return self._per_example

    def _fitting(self) -> int:
        """How many users a block may have."""
        if self.plain.device.type != "cuda":
            return _ON_CORES
        return 64


class _LossOf(nn.Module):
    """A loss as a module, so that its model can be called with other parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)
