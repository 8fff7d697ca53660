"""The plain trainer: one user after the other. For large models also the fastest way on a CPU core."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functional_call

from ..errors import CliplineError, ModuleError
from ..federated.backend import CohortRequest, PersonalRows
from ..federated.local_sgd import Batch, LossOf, per_example, users_own
from .batches import plan_steps
from .cpu.allocator import keep_freed_memory
from .isolation.guard import IsolationError
from .isolation.made_up_data import FILLS, made_up, parameters_to_try
from .local_optimisers import SingleUser
from .problem import Problem
from .sparse.native import compiled
from .sparse.outer_products import SparseOuterProducts
from .sparse.recorded_weight import StepRecord
from .sparse.row_fields import TouchedRows, build_updates, renumber_rows, starting_params, together, touched
from .updates import Dense, Updates
from .user_random import random_layer_keys

_MAX_BLOCK_VALUES = 1 << 24  # numbers in a block of updates: 64 MiB of float32
_RECORDED_BLOCK = 16  # users in a block if all updates are recorded, which take little memory
_TRIAL_EXAMPLES = 8  # at most
_RECORDED_DTYPES = (torch.float32, torch.float64)


class RetainedStateWarning(UserWarning):
    """A model or loss keeps state between calls; it is restored after every user."""


class OneByOne:
    """Trains users one after the other on the problem's working copy of the model.

    A user whose training fails adds nothing and is not within the clip, unless the problem's `on_error` says otherwise.
    Errors that every user would run into are found on construction, on made-up examples or the `trial_batch`.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.reason = ""  # why users do not train stacked, where that was the engine's choice
        self._leftover = ""  # what the last user changed in model or loss, if anything
        self._generator = torch.default_generator  # or the device's, while users train
        # Parameters whose SGD steps are recorded (`StepRecord`): those that the trial sees used through `bag` only.
        dtype = problem.model.vector.dtype
        # A record is of plain SGD: momentum, say, would move a row in steps whose batch does not touch it.
        cpu = problem.device.type == "cpu" and problem.precision != "bf16" and dtype in _RECORDED_DTYPES
        plain = cpu and problem.local.plain_sgd
        self.recorded = frozenset(problem.row_fields) if plain else frozenset[str]()
        # Before forking: otherwise each worker would compile.
        self._library = compiled(dtype) if self.recorded and problem.fast.compile_c else None
        self.made_up = self._run_trials()
        if problem.row_fields:
            self._check_rows()

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Updates (params after local SGD - params) of the requests' users in blocks, one request after the other."""
        if self.problem.fast.keep_freed_memory and self.problem.device.type == "cpu":
            keep_freed_memory()
        for request_index, request in enumerate(requests):
            users = request.cohort.users
            start = 0
            while start < len(users):
                block_users = users[start : start + self._block_size(len(users) - start)]
                places = np.arange(start, start + len(block_users))
                personal = None if request.personal is None else request.personal.of_users(places)
                yield (
                    self.block(request.params, block_users, request.round_index, request.run, personal),
                    np.full(len(block_users), request_index),
                )
                start += len(block_users)

    @property
    def in_words(self) -> str:
        """What runs, for the caller to read."""
        return "one by one" + (f": {self.reason}" if self.reason else "")

    @property
    def runs_c(self) -> bool:
        """Whether compiled C code is in use, which rounds otherwise than torch."""
        return self._library is not None

    def _block_size(self, left: int) -> int:
        """The number of users in the next block, of `left` users."""
        if not self.problem.row_fields:
            return max(1, min(64, _MAX_BLOCK_VALUES // self.problem.model.dim))
        if self.recorded != set(self.problem.row_fields):
            return 1
        # Blocks of equal size: every block costs a pass over the sum, however few its users.
        return -(-left // -(-left // _RECORDED_BLOCK))

    def block(
        self,
        params: Tensor,
        users: NDArray[np.int64],
        round_index: int,
        run: int = 0,
        personal: PersonalRows | None = None,
    ) -> Updates:
        """The updates of these users, not clipped: PRIVATE. A user without examples gives zeros.

        Personal parameters start as `personal` says, or as they are at first, and end there.
        """
        population, streams = self.problem.population, self.problem.runs[run].streams
        lr = self.problem.runs[run].rate(round_index)
        keys_for = partial(streams.user_keys, round_index=round_index, identities=population.identities(users))
        plan, keys = plan_steps(population, users, self.problem.local, keys_for), keys_for("dropout")
        starts, sizes = population.offsets[users], self.problem.local.examples_of(population, users)
        random_keys = torch.from_numpy(random_layer_keys(keys, plan.longest, len(self.problem.model.random_layers))).to(
            self.problem.device
        )
        order = torch.from_numpy(plan.rows - starts[:, None, None]).to(self.problem.device)
        whole = starting_params(params.unsqueeze(0), self.problem.model.named_shapes, {})
        updates = params.new_empty(len(users), 0 if self.problem.row_fields else self.problem.model.dim)
        user_updates: list[Updates] = []
        rows = self.problem.personal_rows(personal, np.arange(len(users)))
        version = params._version
        with self.problem.users_apart() as self._generator:
            for i, key in enumerate(keys.tolist()):
                examples = self.problem.examples.between(int(starts[i]), int(starts[i] + sizes[i]))
                batches = [order[i, step, :count] for step, count in enumerate(plan.counts[i].tolist()) if count]
                steps = _UserSteps(params, whole, examples, batches, random_keys[i], lr, rows[i])
                if self.problem.row_fields:
                    user_updates.append(self._train_by_rows(key, steps))
                elif not self._train_isolated(key, partial(self._train_dense, steps, updates[i])):
                    updates[i] = math.nan
            self.problem.isolation.after_block()
            if len(keys):
                self._note_draws(int(keys[-1]))
        if personal is not None:
            personal.write(np.arange(len(users)), rows)
        if params._version != version:
            raise ModuleError("the round's parameters changed while a user trained: train on the model that is given")
        return together(user_updates) if self.problem.row_fields else Updates([Dense(0, updates)])

    def _train_isolated(self, key: int, train: Callable[[], object]) -> bool:
        """Train one user with all generators seeded by the user's key; restore all state after. False if it failed.

        Within the problem's `users_apart`.
        """
        self._generator.manual_seed(key)
        self.problem.isolation.seed(key)
        if not torch.is_grad_enabled():  # a model may have turned gradients off
            torch.set_grad_enabled(True)
        failed = False
        try:
            train()
        except BaseException as error:
            if self.problem.on_error == "raise" or not isinstance(error, Exception) or not users_own(error):
                self.problem.isolation.after_user()  # a later call would take the leftovers for the caller's state
                raise
            failed = True
        self._leftover = self.problem.isolation.after_user()
        return not failed

    def _note_draws(self, key: int) -> None:
        """Note whether the last user, who had this key, drew from torch's global generator. Too slow for every user."""
        state = self._generator.get_state()
        unused = torch.equal(state, self._generator.manual_seed(key).get_state())
        self.problem.draws_globally = self.problem.draws_globally or not unused

    def _train_dense(self, steps: _UserSteps, out: Tensor) -> None:
        """One user's SGD steps on all parameters; writes the update to `out` (dim,)."""
        model = self.problem.model
        model.load(steps.params, steps.personal)
        finite_marker = steps.params.new_zeros(())
        reference = self._reference(steps.params)
        local = self.problem.local
        leaves = list(model.trainable.values())
        optimiser = None if local.plain_sgd else SingleUser(local, leaves, steps.lr, len(model.named_shapes))
        for step, rows in enumerate(steps.batches):
            model.set_keys(steps.random_keys[step])
            batch = {name: self.problem.examples.select_rows(field, rows) for name, field in steps.examples.items()}
            loss = self._reduce_loss(self.problem.losses(model.module, batch, reference), len(rows))
            if optimiser is None:
                model.sgd_step(loss, steps.lr)
            else:
                optimiser.step(model.gradients(loss))
            finite_marker += 0.0 * loss.detach()  # becomes and stays NaN if a loss is not finite
        released, own = model.parts()
        torch.sub(released, steps.params, out=out)
        _check_finite(finite_marker)
        if len(own) and bool(out.isfinite().all()):  # an update that is not finite counts as failed
            steps.personal.copy_(own)

    def _reference(self, params: Tensor) -> Batch | None:
        """The round's parameters by name, if the loss wants them: a copy, which nobody else reads."""
        if not self.problem.takes_reference:
            return None
        own = starting_params(params.clone().unsqueeze(0), self.problem.model.named_shapes, {})
        return {name: piece[0] for name, piece in own.items()}

    def _train_by_rows(self, key: int, steps: _UserSteps) -> Updates:
        """One user's update if the user touches few rows of some parameters: no other row is read, trained or written.

        If a recorded parameter is used in another way than through `bag`, the user starts again on a matrix of rows.
        """
        made: list[Updates] = []
        incomplete: set[str] = set()

        def train() -> None:
            made[:] = [self._train_rows(steps, self.recorded, incomplete)]

        trained = self._train_isolated(key, lambda: _ignore_errors_if(incomplete, train))
        if incomplete:
            incomplete.clear()
            trained = self._train_isolated(key, lambda: made.append(self._train_rows(steps, frozenset(), incomplete)))
        return made[-1] if trained and made else self._failed_update(steps.params)

    def _train_rows(self, steps: _UserSteps, recorded: frozenset[str], incomplete: set[str]) -> Updates:
        """One user's SGD steps. Recorded parameters that were used otherwise go to `incomplete`: start again."""
        shapes = self.problem.model.named_shapes
        fields = {name: field for name, field in self.problem.row_fields.items() if name not in recorded}
        heights = {name: shapes[name][0] for name in fields}
        one, rows = renumber_rows({name: field.unsqueeze(0) for name, field in steps.examples.items()}, fields, heights)
        first = starting_params(steps.params.unsqueeze(0), shapes, rows) if rows else steps.whole
        records = {name: StepRecord(first[name][0], steps.lr, self._library) for name in recorded}
        moving = {name: piece[0].clone().requires_grad_() for name, piece in first.items() if name not in records}
        of_user = self.problem.model.personal_pieces(steps.personal.unsqueeze(0))
        moving |= {name: piece[0].clone().requires_grad_() for name, piece in of_user.items()}
        held = {name: records[name].stand_in() if name in records else moving[name] for name in (*shapes, *of_user)}
        finite_marker = steps.params.new_zeros(())
        takes_reference, local = self.problem.takes_reference, self.problem.local
        reference = {name: piece[0].clone() for name, piece in first.items()} if takes_reference else None
        shared = len(moving) - len(of_user)
        optimiser = None if local.plain_sgd else SingleUser(local, list(moving.values()), steps.lr, shared)
        try:
            with self.problem.model.substituting(held):
                for step, rows_of_batch in enumerate(steps.batches):
                    self.problem.model.set_keys(steps.random_keys[step])
                    batch = {
                        name: self.problem.examples.select_rows(field[0], rows_of_batch) for name, field in one.items()
                    }
                    losses = self.problem.losses(self.problem.model.module, batch, reference)
                    loss = self._reduce_loss(losses, len(rows_of_batch))
                    if optimiser is None:
                        _sgd_step(loss, list(moving.values()), list(records.values()), steps.lr)
                    else:
                        optimiser.step(torch.autograd.grad(loss, list(moving.values()), allow_unused=True))
                    finite_marker += 0.0 * loss.detach()
        finally:
            incomplete.update(name for name, record in records.items() if not record.complete)
        _check_finite(finite_marker)
        stack: list[Tensor | list[SparseOuterProducts]] = []
        for name in shapes:
            if name in records:
                stack.append(records[name].terms())
            elif name in self.recorded:  # as outer products too: all users of a block need one kind
                change = moving[name].detach() - first[name][0]
                stack.append([SparseOuterProducts.of_rows(rows[name].rows[0], change)])
            else:
                stack.append(moving[name].detach().unsqueeze(0))
        updates = build_updates(stack, first, shapes, rows, self._library)
        if (
            of_user and not incomplete and bool(updates.norms().isfinite().all())
        ):  # an update that is not finite counts as failed
            steps.personal.copy_(torch.cat([moving[name].detach().reshape(-1) for name in of_user]))
        return updates

    def _failed_update(self, params: Tensor) -> Updates:
        """An update of NaN, which adds nothing and is not within the clip."""
        shapes = self.problem.model.named_shapes
        bad = params.new_full((1, 1), math.nan)
        rows = {
            name: TouchedRows(bad.long() * 0, bad != bad)
            for name in self.problem.row_fields
            if name not in self.recorded
        }
        stack: list[Tensor | list[SparseOuterProducts]] = []
        first = {}
        for name, shape in shapes.items():
            size = (1, *shape[1:]) if name in self.problem.row_fields else shape
            first[name] = params.new_zeros(1, *size)
            nothing = params.new_full((1, *size), math.nan)
            stack.append(
                [SparseOuterProducts.of_rows(bad[0].long() * 0, nothing[0])] if name in self.recorded else nothing
            )
        return build_updates(stack, first, shapes, rows, self._library)

    def _run_trials(self) -> Callable[[int], Batch]:
        """Train a synthetic user, to find mistakes that every user would run into. Gives a source of such examples."""
        given = self.problem.trial_batch
        first: Exception | None = None
        for fill in FILLS:
            made = partial(self._synthetic_examples, fill=fill)
            try:
                self._trial(made)
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
            f"your own making that it can take{self._types_in_words(reason)}"
        ) from first

    def _types_in_words(self, reason: str) -> str:
        """What a batch holds, where torch complains of a type; nothing otherwise. Made-up examples, nobody's."""
        if not re.search(r"dtype|scalar type|Tensor type|not implemented for '", reason):
            return ""
        batch = self._synthetic_examples(1, "zeros")
        held = ", ".join(f"{name} {str(values.dtype).removeprefix('torch.')}" for name, values in batch.items())
        return (
            f"; a batch holds {held}: convert in the loss, whole numbers that are features with .float() and labels or "
            "indices with .long()"
        )

    def _synthetic_examples(self, count: int, fill: str) -> Batch:
        problem = self.problem
        return problem.examples.to_device(made_up(problem.population.fields, count, fill, problem.trial_batch))

    def _trial(self, made: Callable[[int], Batch]) -> None:
        """One step of a synthetic user."""
        count = min(self.problem.local.batch_size, _TRIAL_EXAMPLES)
        problem = self.problem
        params, rows = problem.model.initial, torch.arange(count, device=problem.device)
        random_keys = torch.zeros(1, len(problem.model.random_layers), 2, dtype=torch.int32, device=problem.device)
        whole = starting_params(params.unsqueeze(0), problem.model.named_shapes, {})
        own = problem.model.initial_personal.clone()
        steps = _UserSteps(params, whole, made(count), [rows], random_keys, problem.local.lr, own)
        on_error, problem.on_error = problem.on_error, "raise"
        try:
            with problem.users_apart() as self._generator:
                if problem.row_fields:
                    incomplete: set[str] = set()
                    recorded = self.recorded
                    self._train_isolated(
                        0, lambda: _ignore_errors_if(incomplete, lambda: self._train_rows(steps, recorded, incomplete))
                    )
                    if incomplete:
                        self.recorded -= incomplete
                        self._train_isolated(0, lambda: self._train_rows(steps, self.recorded, incomplete))
                else:
                    self._train_isolated(0, partial(self._train_dense, steps, torch.empty_like(params)))
                problem.isolation.after_block()
                self._note_draws(0)
            if self._leftover:
                warnings.warn(
                    f"{self._leftover} changes while a user trains; it is put back after every user, so that nobody "
                    "finds what another has left there",
                    RetainedStateWarning,
                    stacklevel=2,
                )
        finally:
            problem.on_error = on_error
            problem.isolation.after_user()
            problem.model.load(problem.model.initial)

    def _check_rows(self) -> None:
        """Refuse a loss that uses rows which the fields do not name, as a penalty on all weights does.

        Tried on synthetic examples with one row more than they touch, at several parameters: its gradient must be 0.
        """
        count = min(self.problem.local.batch_size, _TRIAL_EXAMPLES)
        one = {name: field.unsqueeze(0) for name, field in self.made_up(count).items()}
        shapes = self.problem.model.named_shapes
        for name, field in self.problem.row_fields.items():
            rows, places = touched(one[field], shapes[name][0])
            if rows.rows.shape[1] == shapes[name][0]:
                continue  # they touch every row: there is no spare one
            spare = F.pad(rows.rows, (0, 1))
            batch = {key: value[0] for key, value in {**one, field: places}.items()}
            for params in parameters_to_try(self.problem.model.initial):
                first = starting_params(params.unsqueeze(0), shapes, {name: TouchedRows(spare, spare >= 0)})
                own = self.problem.model.personal_pieces(self.problem.model.initial_personal.unsqueeze(0))
                pieces = {**first, **own}.items()
                leaves = {f"model.{key}": piece[0].clone().requires_grad_() for key, piece in pieces}
                reference = {key: piece[0].clone() for key, piece in first.items()}
                with self.problem.users_apart():
                    of_model = LossOf(self.problem.model.module, self.problem.loss)
                    loss = self._reduce_loss(functional_call(of_model, leaves, (batch, reference)), count)
                    (gradient,) = torch.autograd.grad(loss, [leaves[f"model.{name}"]], allow_unused=True)
                    self.problem.isolation.after_user()
                if gradient is not None and bool((gradient[-1] != 0).any()):
                    raise ModuleError(
                        f"the loss uses rows of {name!r} that field {field!r} does not name, and row_fields would "
                        "leave them out: drop it from row_fields, or take the penalty or the tied weights out of the "
                        "loss"
                    )

    def _reduce_loss(self, losses: Tensor, count: int) -> Tensor:
        if not per_example(losses, count):
            return losses
        return self.problem.local.reduced(losses)


@dataclass(frozen=True, eq=False)
class _UserSteps:
    """What one user trains on. `whole`: all parameters by name, all of their rows, from `starting_params`."""

    params: Tensor
    whole: dict[str, Tensor]
    examples: Batch
    batches: Sequence[Tensor]  # of each step: which of the user's examples
    random_keys: Tensor
    lr: float
    personal: Tensor  # (personal,): what the user starts from, and what came of it


def _check_finite(marker: Tensor) -> None:
    """A user whose loss is not finite fails: some of torch's gradients at NaN depend on memory alignment."""
    if bool(marker.isnan()):
        raise FloatingPointError("the loss is not a finite number")


def _ignore_errors_if(incomplete: set[str], train: Callable[[], object]) -> None:
    """Train. An error is ignored if a record is incomplete: the user then starts again in another way."""
    try:
        train()
    except Exception:
        if not incomplete:
            raise


def _sgd_step(loss: Tensor, moving: Sequence[Tensor], step_records: Sequence[StepRecord], lr: float) -> None:
    """One SGD step: `moving` parameters are updated in place, for the others the step is recorded."""
    products = [step_record.products() for step_record in step_records]
    wanted = [*moving, *(product for of_record in products for product in of_record)]
    gradients = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    with torch.no_grad():
        for leaf, gradient in zip(moving, gradients, strict=False):
            if gradient is not None:
                leaf.sub_(gradient, alpha=lr)
    for step_record, of_record in zip(step_records, products, strict=True):
        step_record.step([next(gradients) for _ in of_record])
