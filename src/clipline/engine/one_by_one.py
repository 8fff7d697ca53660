"""Local training, one user after the other: the plain way, and the fastest on a processor core."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import CliplineError, ModuleError, check_choice
from ..federated.local_sgd import Batch, LocalSGD, Loss, LossOf, OnError, per_example, users_own
from ..federated.population import Population
from ..federated.sampling import Cohort
from ..streams import Streams
from .batches import Examples, plan_steps
from .cpu.huge_pages import keep_freed_memory
from .isolation.generators import kept_generators
from .isolation.guard import Isolation, IsolationError
from .isolation.made_up_data import FILLS, check_trial_batch, made_up, parameters_to_try
from .precision import Precision, computing_in
from .sparse.native import compiled
from .sparse.outer_products import SparseOuterProducts
from .sparse.recorded_weight import StepRecord
from .sparse.row_fields import (
    RowFields,
    Touched,
    check_row_fields,
    first_pieces,
    renumbered,
    together,
    touched,
    updates_of,
)
from .updates import Dense, Updates
from .user_random import step_keys
from .working_model import WorkingModel

_BLOCK_VALUES = 1 << 24  # numbers in a block of updates: 64 MiB of float32
_NOTED = 16  # users in a block whose changes are noted alone, and take little room
_TRIED = 8  # made-up examples at most
_NOTED_IN = (torch.float32, torch.float64)


class RememberingWarning(UserWarning):
    """A model or loss keeps something between calls, which is put back after every user."""


class OneByOne:
    """Trains the users of a cohort one after the other on a single working copy of the model.

    The loss is `loss(model, batch)`, where `batch` maps the population's field names to tensors; it returns one number,
    or one for each example. A user whose training fails adds nothing and is not within the clip, unless `on_error` is
    "raise", which is for study: an error, and what it says, would tell something of that user. What would fail for
    everybody is found when this is made, on made-up examples or those of `trial_batch`.
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
        on_error: OnError = "zero",
        trial_batch: Mapping[str, Any] | None = None,
    ) -> None:
        self.flat = WorkingModel(model, device)
        self.loss = loss
        self.local = local
        self.streams = streams
        self.device = torch.device(device)
        self.precision = precision
        self.on_error = check_choice("on_error", on_error, ("zero", "raise"))
        self.row_fields = dict(row_fields or {})
        check_row_fields(self.row_fields, self.flat, population)
        self.examples = Examples(population, self.device, self.flat.vector.dtype)
        self._left = ""  # what the last user had changed
        self.draws_globally = False  # whether the model was seen to draw from torch's global generator
        self.isolation = Isolation(self.flat.module, loss, self.flat.trainable)
        # Parameters whose changes are noted and not made: those that the trial sees used through `bag` alone.
        plain = self.device.type == "cpu" and precision != "bf16" and self.flat.vector.dtype in _NOTED_IN
        self.noted = frozenset(self.row_fields) if plain else frozenset[str]()
        if self.noted:
            compiled(self.flat.vector.dtype)  # before workers are forked, who would each do it again
        given = None if trial_batch is None else check_trial_batch(trial_batch, population.fields)
        self.made_up = self._tried(given)
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
        keys_for = partial(self.streams.user_keys, round_index=round_index, identities=population.identities(users))
        steps, keys = plan_steps(population, users, self.local, keys_for), keys_for("dropout")
        starts, sizes = population.offsets[users], self.local.examples_of(population, users)
        chances = torch.from_numpy(step_keys(keys, steps.longest, len(self.flat.chances))).to(self.device)
        order = torch.from_numpy(steps.rows - starts[:, None, None]).to(self.device)
        whole = first_pieces(params.unsqueeze(0), self.flat.named_shapes, {})
        updates = params.new_empty(len(users), 0 if self.row_fields else self.flat.dim)
        by_rows: list[Updates] = []
        version = params._version
        with self._apart():
            for i, key in enumerate(keys.tolist()):
                examples = self.examples.between(int(starts[i]), int(starts[i] + sizes[i]))
                batches = [order[i, step, :count] for step, count in enumerate(steps.counts[i].tolist()) if count]
                if self.row_fields:
                    by_rows.append(self._user_rows(key, params, whole, examples, batches, chances[i]))
                elif not self._user(key, partial(self._train, params, examples, batches, chances[i], updates[i])):
                    updates[i] = math.nan
            self.isolation.after_block()
        if params._version != version:
            raise ModuleError("the round's parameters changed while a user trained: train on the model that is given")
        return together(by_rows) if self.row_fields else Updates([Dense(0, updates)])

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Within, users train; random generators that belong to the caller are given back as they were."""
        self.flat.module.train()
        self.isolation.before_block()
        devices = [self.device] if self.device.type == "cuda" else []
        with kept_generators(), torch.random.fork_rng(devices), computing_in(self.precision, self.device):
            yield

    def _user(self, key: int, train: Callable[[], object]) -> bool:
        """Train one user with random numbers of the user's own, and leave nothing behind. False if that failed."""
        self._global_generator().manual_seed(key)
        self.isolation.seed(key)
        before = None if self.draws_globally else self._global_generator().get_state()
        failed = False
        try:
            with torch.enable_grad():
                train()
        except BaseException as error:
            if self.on_error == "raise" or not isinstance(error, Exception) or not users_own(error):
                self.isolation.after_user()  # what is left must not pass for the caller's own, in a later call
                raise
            failed = True
        self._left = self.isolation.after_user()
        if before is not None:
            self.draws_globally = not torch.equal(self._global_generator().get_state(), before)
        return not failed

    def _train(self, params: Tensor, examples: Batch, batches: Sequence[Tensor], chances: Tensor, out: Tensor) -> None:
        """One user's steps: each batch says which of the user's examples are in it."""
        self.flat.vector.copy_(params)
        finite = params.new_zeros(())
        for step, rows in enumerate(batches):
            self.flat.set_keys(chances[step])
            batch = {name: self.examples.pick(field, rows) for name, field in examples.items()}
            loss = self._reduced(self.loss(self.flat.module, batch), len(rows))
            self.flat.descend(loss, self.local.lr)
            finite += 0.0 * loss.detach()  # NaN from now on where it is not
        torch.sub(self.flat.vector, params, out=out)
        _check_finite(finite)

    def _user_rows(
        self,
        key: int,
        params: Tensor,
        whole: dict[str, Tensor],
        examples: Batch,
        batches: Sequence[Tensor],
        chances: Tensor,
    ) -> Updates:
        """The same where a user touches few rows of some parameters: no other row is read, trained or written.

        A user for whom a noted parameter is used in another way than through `bag` begins again with rows of his own.
        """
        steps = _RowSteps(params, whole, examples, batches, chances)
        made: list[Updates] = []
        incomplete: set[str] = set()

        def train() -> None:
            made[:] = [self._train_rows(steps, self.noted, incomplete)]

        trained = self._user(key, lambda: _unless(incomplete, train))
        if incomplete:
            incomplete.clear()
            trained = self._user(key, lambda: made.append(self._train_rows(steps, frozenset(), incomplete)))
        return made[-1] if trained and made else self._failed_rows(params)

    def _train_rows(self, steps: _RowSteps, noted: frozenset[str], incomplete: set[str]) -> Updates:
        """One user's steps. `incomplete` gets the noted parameters that were used in another way: begin again then."""
        shapes = self.flat.named_shapes
        fields = {name: field for name, field in self.row_fields.items() if name not in noted}
        heights = {name: shapes[name][0] for name in fields}
        one, rows = renumbered({name: field.unsqueeze(0) for name, field in steps.examples.items()}, fields, heights)
        first = first_pieces(steps.params.unsqueeze(0), shapes, rows) if rows else steps.whole
        records = {name: StepRecord(first[name][0], self.local.lr) for name in noted}
        moving = {name: piece[0].clone().requires_grad_() for name, piece in first.items() if name not in records}
        held = {name: records[name].noted() if name in records else moving[name] for name in shapes}
        finite = steps.params.new_zeros(())
        try:
            with self.flat.holding(held):
                for step, rows_of_batch in enumerate(steps.batches):
                    self.flat.set_keys(steps.chances[step])
                    batch = {name: self.examples.pick(field[0], rows_of_batch) for name, field in one.items()}
                    loss = self._reduced(self.loss(self.flat.module, batch), len(rows_of_batch))
                    _descend(loss, list(moving.values()), list(records.values()), self.local.lr)
                    finite += 0.0 * loss.detach()
        finally:
            incomplete.update(name for name, record in records.items() if not record.complete)
        _check_finite(finite)
        stack: list[Tensor | list[SparseOuterProducts]] = []
        for name in shapes:
            if name in records:
                stack.append(records[name].terms())
            elif name in self.noted:  # as terms too: all users of a block have the same kinds
                change = moving[name].detach() - first[name][0]
                stack.append([SparseOuterProducts.of_rows(rows[name].rows[0], change)])
            else:
                stack.append(moving[name].detach().unsqueeze(0))
        return updates_of(stack, first, shapes, rows)

    def _failed_rows(self, params: Tensor) -> Updates:
        """An update that is not a number: it adds nothing and is not within."""
        shapes = self.flat.named_shapes
        bad = params.new_full((1, 1), math.nan)
        rows = {name: Touched(bad.long() * 0, bad != bad) for name in self.row_fields if name not in self.noted}
        stack: list[Tensor | list[SparseOuterProducts]] = []
        first = {}
        for name, shape in shapes.items():
            size = (1, *shape[1:]) if name in self.row_fields else shape
            first[name] = params.new_zeros(1, *size)
            nothing = params.new_full((1, *size), math.nan)
            stack.append(
                [SparseOuterProducts.of_rows(bad[0].long() * 0, nothing[0])] if name in self.noted else nothing
            )
        return updates_of(stack, first, shapes, rows)

    def _tried(self, given: Mapping[str, NDArray[Any]] | None) -> Callable[[int], Batch]:
        """Train a made-up user, to find mistakes that everybody would run into. Gives a way to make up examples."""
        first: Exception | None = None
        for fill in FILLS:
            made = partial(self._made_up, fill=fill, given=given)
            try:
                self._try(made)
                return made
            except (IsolationError, MemoryError, Warning):
                raise
            except Exception as error:
                first = first or error
            if given is not None:
                break
        if isinstance(first, CliplineError):
            raise first
        assert first is not None
        reason = (str(first).strip() or type(first).__name__).splitlines()[0]
        examples = "made-up examples" if given is None else "trial_batch"
        raise ModuleError(
            f"model or loss fails on {examples} ({type(first).__name__}: {reason}): mend it, or give a trial_batch of "
            "your own making that it can take"
        ) from first

    def _made_up(self, count: int, fill: str, given: Mapping[str, NDArray[Any]] | None) -> Batch:
        return self.examples.placed(made_up(self.examples.population.fields, count, fill, given))

    def _try(self, made: Callable[[int], Batch]) -> None:
        """One step of one user who does not exist."""
        count = min(self.local.batch_size, _TRIED)
        params, examples, rows = self.flat.initial, made(count), torch.arange(count, device=self.device)
        chances = torch.zeros(1, len(self.flat.chances), 2, dtype=torch.int32, device=self.device)
        on_error, self.on_error = self.on_error, "raise"
        try:
            with self._apart():
                if self.row_fields:
                    incomplete: set[str] = set()
                    whole = first_pieces(params.unsqueeze(0), self.flat.named_shapes, {})
                    steps = _RowSteps(params, whole, examples, [rows], chances)
                    self._user(0, lambda: _unless(incomplete, lambda: self._train_rows(steps, self.noted, incomplete)))
                    if incomplete:
                        self.noted -= incomplete
                        self._user(0, lambda: self._train_rows(steps, self.noted, incomplete))
                else:
                    self._user(0, partial(self._train, params, examples, [rows], chances, torch.empty_like(params)))
                self.isolation.after_block()
            if self._left:
                warnings.warn(
                    f"{self._left} changes while a user trains; it is put back after every user, so that nobody finds "
                    "what another has left there",
                    RememberingWarning,
                    stacklevel=2,
                )
        finally:
            self.on_error = on_error
            self.isolation.after_user()
            self.flat.vector.copy_(self.flat.initial)

    def _check_rows(self) -> None:
        """Refuse a loss that uses rows which the fields do not name, as a penalty on all weights does.

        Tried on made-up examples with one more row than they touch, at several parameters: it must not move.
        """
        count = min(self.local.batch_size, _TRIED)
        one = {name: field.unsqueeze(0) for name, field in self.made_up(count).items()}
        shapes = self.flat.named_shapes
        for name, field in self.row_fields.items():
            rows, places = touched(one[field], shapes[name][0])
            if rows.rows.shape[1] == shapes[name][0]:
                continue  # they touch all of them
            spare = F.pad(rows.rows, (0, 1))
            batch = {key: value[0] for key, value in {**one, field: places}.items()}
            for params in parameters_to_try(self.flat.initial):
                first = first_pieces(params.unsqueeze(0), shapes, {name: Touched(spare, spare >= 0)})
                leaves = {f"model.{key}": piece[0].clone().requires_grad_() for key, piece in first.items()}
                with self._apart():
                    loss = self._reduced(functional_call(LossOf(self.flat.module, self.loss), leaves, (batch,)), count)
                    (gradient,) = torch.autograd.grad(loss, [leaves[f"model.{name}"]], allow_unused=True)
                    self.isolation.after_user()
                if gradient is not None and bool((gradient[-1] != 0).any()):
                    raise ModuleError(
                        f"the loss uses rows of {name!r} that field {field!r} does not name, and row_fields would "
                        "leave them out: drop it from row_fields, or take the penalty or the tied weights out of the "
                        "loss"
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


@dataclass(frozen=True, eq=False)
class _RowSteps:
    """What one user trains on: `whole` are the parameters as `first_pieces` gives them to whoever touches all rows."""

    params: Tensor
    whole: dict[str, Tensor]
    examples: Batch
    batches: Sequence[Tensor]
    chances: Tensor


def _check_finite(zero: Tensor) -> None:
    """A user with a loss that is no finite number fails: some of torch's gradients at NaN depend on memory's layout."""
    if bool(zero.isnan()):
        raise FloatingPointError("the loss is not a finite number")


def _unless(incomplete: set[str], train: Callable[[], object]) -> None:
    """Train. An error counts only if nothing is incomplete: otherwise the user begins again in another way."""
    try:
        train()
    except Exception:
        if not incomplete:
            raise


def _descend(loss: Tensor, moving: Sequence[Tensor], ledgers: Sequence[StepRecord], lr: float) -> None:
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
