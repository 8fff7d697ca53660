"""The plain trainer: one user after the other. For large models also the fastest way on a CPU core.

Where a user touches few rows of some parameters, no other row is read, trained or written (`train_rows`).
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from ...errors import CliplineError, ModuleError, RunError, first_line
from ...federated.backend import CohortRequest, PersonalRows
from ...federated.local_sgd import Batch
from ..isolation.guard import IsolationError, enough_resources, users_own
from ..isolation.made_up_data import FILLS, made_up, parameters_to_try
from .batches import plan_steps, select_rows
from .local_optimisers import SingleUser
from .problem import Problem, UserSteps
from .row_fields import RowUsage, TouchedRows, build_updates, renumber_rows, starting_params
from .updates import Dense, Updates
from .user_random import random_layer_keys
from .working_model import LossOf

_MAX_BLOCK_VALUES = 1 << 24  # numbers in a block of updates: 64 MiB of float32
_TRIAL_EXAMPLES = 8  # at most


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
        self.made_up = self._run_trials()
        if problem.row_fields:
            check_rows(problem, self.made_up, min(problem.local.batch_size, _TRIAL_EXAMPLES))

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Updates (params after local SGD - params) of the requests' users in blocks, one request after the other."""
        most = 1 if self.problem.row_fields else max(1, min(64, _MAX_BLOCK_VALUES // self.problem.model.dim))
        for request_index, request in enumerate(requests):
            users = request.cohort.users
            for start in range(0, len(users), most):
                block_users = users[start : start + most]
                places = np.arange(start, start + len(block_users))
                personal = None if request.personal is None else request.personal.of_users(places)
                updates = self.block(request.params, block_users, request.round_index, request.run, personal)
                yield updates, np.full(len(block_users), request_index)

    @property
    def in_words(self) -> str:
        """What runs, for the caller to read."""
        return "one by one" + (f": {self.reason}" if self.reason else "")

    def block(
        self,
        params: Tensor,
        users: NDArray[np.int64],
        round_index: int,
        run: int = 0,
        personal: PersonalRows | None = None,
    ) -> Updates:
        """The updates of these users, not clipped: PRIVATE. A user without examples gives zeros.

        Personal parameters start as `personal` says, or as they are at first, and end there. With `row_fields` it is
        one user.
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
        updates = params.new_empty(len(users), 0 if self.problem.row_fields else self.problem.model.dim)
        by_rows: list[Updates] = []
        rows = self.problem.personal_rows(personal, np.arange(len(users)))
        version = params._version
        with self.problem.users_apart() as self._generator:
            for i, key in enumerate(keys.tolist()):
                examples = self.problem.examples.between(int(starts[i]), int(starts[i] + sizes[i]))
                batches = [order[i, step, :count] for step, count in enumerate(plan.counts[i].tolist()) if count]
                steps = UserSteps(params, examples, batches, random_keys[i], lr, rows[i])
                if self.problem.row_fields:
                    by_rows.append(self._train_by_rows(key, steps))
                elif not self._train_isolated(key, partial(self._train_dense, steps, updates[i])):
                    updates[i] = math.nan
            self.problem.isolation.after_block()
            if len(keys):
                self._note_draws(int(keys[-1]))
        if personal is not None:
            personal.write(np.arange(len(users)), rows)
        if params._version != version:
            raise ModuleError("the round's parameters changed while a user trained: train on the model that is given")
        if not self.problem.row_fields:
            return Updates([Dense(0, updates)])
        (only,) = by_rows
        return only

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

    def _train_dense(self, steps: UserSteps, out: Tensor) -> None:
        """One user's SGD steps on all parameters; writes the update to `out` (dim,)."""
        model = self.problem.model
        model.load(steps.params, steps.personal)
        descend(self.problem, steps, steps.examples, list(model.trainable.values()), self._reference(steps.params))
        released, own = model.parts()
        torch.sub(released, steps.params, out=out)
        if len(own) and bool(out.isfinite().all()):  # an update that is not finite counts as failed
            steps.personal.copy_(own)

    def _reference(self, params: Tensor) -> Batch | None:
        """The round's parameters by name, if the loss wants them: a copy, which nobody else reads."""
        if not self.problem.takes_reference:
            return None
        own = starting_params(params.clone().unsqueeze(0), self.problem.model.named_shapes, {})
        return {name: piece[0] for name, piece in own.items()}

    def _train_by_rows(self, key: int, steps: UserSteps) -> Updates:
        """One user's update, of the rows alone that the user touches; if training fails, NaN, which adds nothing."""
        made: list[Updates] = []
        trained = self._train_isolated(key, lambda: made.append(train_rows(self.problem, steps)))
        return made[0] if trained else Updates([Dense(0, torch.full_like(steps.params, math.nan).unsqueeze(0))])

    def _run_trials(self) -> Callable[[int], Batch]:
        """Train a synthetic user, to find mistakes that every user would run into. Gives a source of such examples."""
        given = self.problem.trial_batch
        first: Exception | None = None
        for fill in FILLS:
            made = partial(self._synthetic_examples, fill=fill)
            try:
                with enough_resources():
                    self._trial(made)
                return made
            except (IsolationError, RunError, Warning):
                raise
            except Exception as error:
                first = first or error
            if given is not None:
                break
        if isinstance(first, CliplineError):
            raise first
        assert first is not None
        reason = first_line(first)
        examples = "made-up examples" if given is None else "trial_batch"
        raise ModuleError(
            f"model or loss fails on {examples} ({type(first).__name__}: {reason}): mend it, or give a trial_batch of "
            f"your own making that it can take{self._hint(first, reason)}"
        ) from first

    def _hint(self, error: Exception, reason: str) -> str:
        """The end of an error: what a batch holds, or how a loss is called. From made-up examples, not from data."""
        if isinstance(error, KeyError):
            return f"; a batch has the fields {', '.join(self._synthetic_examples(1, 'zeros'))}"
        if isinstance(self.problem.loss, nn.modules.loss._Loss):
            return "; a loss is called as loss(model, batch): call the model in it, and this on what the model gives"
        if isinstance(error, FloatingPointError):
            return "; made-up whole numbers are 0 or 1: a loss that divides by their sum needs .clamp(min=1) on it, say"
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
        population = problem.population
        lengths = {f"{name}_length": width for name, width in population.column_options.get("lengths", {}).items()}
        return problem.examples.to_device(made_up(population.fields, count, fill, problem.trial_batch, lengths))

    def _trial(self, made: Callable[[int], Batch]) -> None:
        """One step of a synthetic user."""
        count = min(self.problem.local.batch_size, _TRIAL_EXAMPLES)
        problem = self.problem
        params, rows = problem.model.initial, torch.arange(count, device=problem.device)
        random_keys = torch.zeros(1, len(problem.model.random_layers), 2, dtype=torch.int32, device=problem.device)
        own = problem.model.initial_personal.clone()
        steps = UserSteps(params, made(count), [rows], random_keys, problem.local.lr, own)
        on_error, problem.on_error = problem.on_error, "raise"
        try:
            with problem.users_apart() as self._generator:
                if problem.row_fields:
                    self._train_isolated(0, lambda: train_rows(problem, steps))
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


def descend(
    problem: Problem, steps: UserSteps, examples: Batch, leaves: Sequence[Tensor], reference: Batch | None
) -> None:
    """All steps of a user, of these parameters in place: those of the round, in their order, then personal ones.

    A user whose loss is not finite fails: some of torch's gradients at NaN depend on memory alignment.
    """
    model, local = problem.model, problem.local
    optimiser = None if local.plain_sgd else SingleUser(local, leaves, steps.lr, len(model.named_shapes))
    finite_marker = steps.params.new_zeros(())
    for step, rows in enumerate(steps.batches):
        model.set_keys(steps.random_keys[step])
        batch = {name: select_rows(field, rows) for name, field in examples.items()}
        loss = problem.reduced(problem.losses(model.module, batch, reference), len(rows))
        if not loss.requires_grad:
            raise ModuleError("the loss does not depend on the model's trainable parameters: return what it computed")
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        if optimiser is not None:
            optimiser.step(gradients)
        else:
            with torch.no_grad():
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    if gradient is not None:  # else the loss does not use it, and it stays
                        leaf.sub_(gradient, alpha=steps.lr)
        finite_marker += 0.0 * loss.detach()  # becomes and stays NaN if a loss is not finite
    if bool(finite_marker.isnan()):
        raise FloatingPointError("the loss is not a finite number")


def train_rows(problem: Problem, steps: UserSteps) -> Updates:
    """One user's update."""
    shapes = problem.model.named_shapes
    heights = {name: shapes[name][0] for name in problem.row_fields}
    one = {name: field.unsqueeze(0) for name, field in steps.examples.items()}
    one, rows = renumber_rows(one, problem.row_fields, heights)
    first = starting_params(steps.params.unsqueeze(0), shapes, rows)
    of_user = problem.model.personal_pieces(steps.personal.unsqueeze(0))
    moving = {name: piece[0].clone().requires_grad_() for name, piece in (first | of_user).items()}
    reference = {name: piece[0].clone() for name, piece in first.items()} if problem.takes_reference else None
    with problem.model.substituting(moving):
        descend(problem, steps, {name: field[0] for name, field in one.items()}, list(moving.values()), reference)
    updates = build_updates([moving[name].detach().unsqueeze(0) for name in shapes], first, shapes, rows)
    if of_user and bool(updates.norms().isfinite().all()):  # an update that is not finite counts as failed
        steps.personal.copy_(torch.cat([moving[name].detach().reshape(-1) for name in of_user]))
    return updates


def check_rows(problem: Problem, made_up: Callable[[int], Batch], count: int) -> None:
    """Refuse a loss that uses rows which the fields do not name, as a penalty on all weights does.

    Tried on synthetic examples with one row more than they touch, at several parameters: its gradient must be 0.
    """
    one = {name: field.unsqueeze(0) for name, field in made_up(count).items()}
    shapes = problem.model.named_shapes
    for name, field in problem.row_fields.items():
        rows, places = RowUsage(one[field], shapes[name][0]).touched()
        if rows.rows.shape[1] == shapes[name][0]:
            continue  # they touch every row: there is no spare one
        spare = F.pad(rows.rows, (0, 1))
        batch = {key: value[0] for key, value in {**one, field: places}.items()}
        for params in parameters_to_try(problem.model.initial):
            first = starting_params(params.unsqueeze(0), shapes, {name: TouchedRows(spare, spare >= 0)})
            own = problem.model.personal_pieces(problem.model.initial_personal.unsqueeze(0))
            pieces = {**first, **own}.items()
            leaves = {f"model.{key}": piece[0].clone().requires_grad_() for key, piece in pieces}
            reference = {key: piece[0].clone() for key, piece in first.items()}
            with problem.users_apart():
                of_model = LossOf(problem.model.module, problem.loss)
                loss = problem.reduced(functional_call(of_model, leaves, (batch, reference)), count)
                (gradient,) = torch.autograd.grad(loss, [leaves[f"model.{name}"]], allow_unused=True)
                problem.isolation.after_user()
            if gradient is not None and bool((gradient[-1] != 0).any()):
                raise ModuleError(
                    f"the loss uses rows of {name!r} that field {field!r} does not name, and row_fields would "
                    "leave them out: drop it from row_fields, or take the penalty or the tied weights out of the "
                    "loss"
                )
