"""Local training, one user after the other: the plain way, and the fastest on a processor core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ModuleError
from ..streams import Streams
from .bags import Ledger
from .batches import Examples, plan_steps
from .chance import step_keys
from .flat_module import FlatModule
from .local import Batch, LocalSGD, Loss, LossOf, per_example
from .memory import keep_freed_memory
from .native import compiled
from .population import Population
from .precision import Precision, computing_in
from .rows import RowFields, Touched, check_row_fields, first_pieces, renumbered, together, touched, updates_of
from .sampling import Cohort
from .updates import Dense, Updates

_BLOCK_VALUES = 1 << 24  # numbers in a block of updates: 64 MiB of float32
_NOTED = 16  # users in a block whose changes are noted alone, and take little room
_NOTED_IN = (torch.float32, torch.float64)


class OneByOne:
    """Trains the users of a cohort one after the other on a single working copy of the model.

    The loss is `loss(model, batch)`, where `batch` maps the population's field names to tensors; it returns one number,
    or one for each example.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        local: LocalSGD,
        streams: Streams,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
        row_fields: RowFields | None = None,
    ) -> None:
        self.flat = FlatModule(model, device)
        self.loss = loss
        self.local = local
        self.streams = streams
        self.device = torch.device(device)
        self.precision = precision
        self.row_fields = dict(row_fields or {})
        check_row_fields(self.row_fields, self.flat, population)
        self.examples = Examples(population, self.device, self.flat.vector.dtype)
        self.draws_globally = False  # whether the model was seen to draw from torch's global generator
        # Parameters whose changes are noted and not made, until one is seen to be used otherwise than through `bag`.
        plain = self.device.type == "cpu" and precision != "bf16" and self.flat.vector.dtype in _NOTED_IN
        self.noted = set(self.row_fields) if plain else set[str]()
        if self.noted:
            compiled(self.flat.vector.dtype)  # before workers are forked, who would each do it again
        if self.row_fields:
            self._check_rows()

    def train(self, params: Tensor, cohort: Cohort, round_index: int) -> Iterator[Updates]:
        """Updates (params after local SGD - params) of the cohort's users, in blocks."""
        if self.device.type == "cpu":
            keep_freed_memory()
        start = 0
        while start < len(cohort.users):
            left = len(cohort.users) - start
            block_size = max(1, min(64, _BLOCK_VALUES // self.flat.dim))
            if self.row_fields:  # in blocks of equal size: each takes a pass over the sum, also one of few users
                block_size = -(-left // -(-left // _NOTED)) if self.noted == set(self.row_fields) else 1
            yield self.block(params, cohort.users[start : start + block_size], round_index)
            start += block_size

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Nothing: this process trains, and cannot go on meanwhile."""

    def forget(self) -> None:
        """Nothing was begun."""

    def block(self, params: Tensor, users: NDArray[np.int64], round_index: int) -> Updates:
        """The updates of these users, not clipped: PRIVATE. A user without examples gives zeros."""
        population = self.examples.population
        keys_for = partial(self.streams.user_keys, round_index=round_index, users=users)
        steps, keys = plan_steps(population, users, self.local, keys_for), keys_for("dropout")
        starts, sizes = population.offsets[users], self.local.examples_of(population, users)
        chances = torch.from_numpy(step_keys(keys, steps.longest, len(self.flat.chances))).to(self.device)
        order = torch.from_numpy(steps.rows - starts[:, None, None]).to(self.device)
        updates = params.new_empty(len(users), 0 if self.row_fields else self.flat.dim)
        whole = first_pieces(params.unsqueeze(0), self.flat.named_shapes, {})
        by_rows: list[Updates] = []
        self.flat.module.train()
        # What draws from torch's global generator draws by user too, and the caller's state is given back.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), computing_in(self.precision, self.device):
            for i, key in enumerate(keys.tolist()):
                self._global_generator().manual_seed(key)
                before = None if self.draws_globally else self._global_generator().get_state()
                examples = self.examples.between(int(starts[i]), int(starts[i] + sizes[i]))
                batches = [order[i, step, :count] for step, count in enumerate(steps.counts[i].tolist()) if count]
                if self.row_fields:
                    update = self._train_rows(params, whole, examples, batches, chances[i])
                    if update is None:  # all of a block are trained in one way
                        return self.block(params, users, round_index)
                    by_rows.append(update)
                else:
                    self._train(params, examples, batches, chances[i], out=updates[i])
                self.flat.check_buffers()
                if before is not None:
                    self.draws_globally = not torch.equal(self._global_generator().get_state(), before)
        return together(by_rows) if self.row_fields else Updates([Dense(0, updates)])

    def _train(self, params: Tensor, examples: Batch, batches: Sequence[Tensor], chances: Tensor, out: Tensor) -> None:
        """One user's steps: each batch says which of the user's examples are in it."""
        self.flat.vector.copy_(params)
        for step, rows in enumerate(batches):
            self.flat.set_keys(chances[step])
            batch = {name: self.examples.pick(field, rows) for name, field in examples.items()}
            self.flat.descend(self._reduced(self.loss(self.flat.module, batch), len(rows)), self.local.lr)
        torch.sub(self.flat.vector, params, out=out)

    def _train_rows(
        self, params: Tensor, whole: dict[str, Tensor], examples: Batch, batches: Sequence[Tensor], chances: Tensor
    ) -> Updates | None:
        """The same where a user touches few rows of some parameters: no other row is read, trained or written.

        `whole` are the parameters as `first_pieces` gives them to a user who touches all rows.
        None where a parameter was used in a way that a ledger cannot note: it is `noted` no more, and the user has to
        begin again.
        """
        shapes = self.flat.named_shapes
        fields = {name: field for name, field in self.row_fields.items() if name not in self.noted}
        heights = {name: shapes[name][0] for name in fields}
        one, rows = renumbered({name: field.unsqueeze(0) for name, field in examples.items()}, fields, heights)
        first = first_pieces(params.unsqueeze(0), shapes, rows) if rows else whole
        ledgers = {name: Ledger(first[name][0], self.local.lr) for name in self.noted}
        moving = {name: piece[0].clone().requires_grad_() for name, piece in first.items() if name not in ledgers}
        held = {name: ledgers[name].noted() if name in ledgers else moving[name] for name in shapes}
        try:
            with self.flat.holding(held):
                for step, rows_of_batch in enumerate(batches):
                    self.flat.set_keys(chances[step])
                    batch = {name: self.examples.pick(field[0], rows_of_batch) for name, field in one.items()}
                    loss = self._reduced(self.loss(self.flat.module, batch), len(rows_of_batch))
                    _descend(loss, list(moving.values()), list(ledgers.values()), self.local.lr)
        except Exception:
            if all(ledger.complete for ledger in ledgers.values()):
                raise
        if not all(ledger.complete for ledger in ledgers.values()):
            self.noted = {name for name in self.noted if ledgers[name].complete}
            return None
        stack = [ledgers[name].terms() if name in ledgers else moving[name].detach().unsqueeze(0) for name in shapes]
        return updates_of(stack, first, shapes, rows)

    def _check_rows(self) -> None:
        """Refuse a loss that uses rows which the fields do not name, as a penalty on all weights does.

        Tried with one more row than a user touches: it must not move.
        """
        population = self.examples.population
        user = int(np.argmax(np.diff(population.offsets[: 1 + min(len(population), 1000)])))
        size = min(population.size(user), self.local.batch_size)
        if size == 0:
            return
        start = int(population.offsets[user])
        examples = self.examples.gather(np.arange(start, start + size))
        one = {name: field.unsqueeze(0) for name, field in examples.items()}
        shapes = self.flat.named_shapes
        for name, field in self.row_fields.items():
            rows, places = touched(one[field], shapes[name][0])
            if rows.rows.shape[1] == shapes[name][0]:
                continue  # this user touches all of them
            spare = F.pad(rows.rows, (0, 1))
            first = first_pieces(self.flat.initial.unsqueeze(0), shapes, {name: Touched(spare, spare >= 0)})
            leaves = {f"model.{key}": piece[0].clone().requires_grad_() for key, piece in first.items()}
            batch = {key: value[0] for key, value in {**one, field: places}.items()}
            self.flat.module.train()
            loss = self._reduced(functional_call(LossOf(self.flat.module, self.loss), leaves, (batch,)), size)
            (gradient,) = torch.autograd.grad(loss, [leaves[f"model.{name}"]], allow_unused=True)
            if gradient is not None and bool((gradient[-1] != 0).any()):
                raise ModuleError(
                    f"the loss uses rows of {name!r} that field {field!r} does not name, and row_fields would leave "
                    "them out: drop it from row_fields, or take the penalty or the tied weights out of the loss"
                )

    def _reduced(self, losses: Tensor, count: int) -> Tensor:
        if not per_example(losses, count):
            return losses
        return self.local.reduced(losses)

    def _global_generator(self) -> torch.Generator:
        # Not torch.manual_seed, which without a GPU formats and keeps a stack trace at every call, in case one comes.
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            return torch.cuda.default_generators[self.device.index or torch.cuda.current_device()]
        return torch.default_generator


def _descend(loss: Tensor, moving: Sequence[Tensor], ledgers: Sequence[Ledger], lr: float) -> None:
    """One step of SGD: some parameters move, of others it is noted how they would."""
    products = [ledger.products() for ledger in ledgers]
    wanted = [*moving, *(product for own in products for product in own)]
    gradients = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    with torch.no_grad():
        for leaf, gradient in zip(moving, gradients, strict=False):
            if gradient is not None:
                leaf.sub_(gradient, alpha=lr)
    for ledger, own in zip(ledgers, products, strict=True):
        ledger.step([next(gradients) for _ in own])
