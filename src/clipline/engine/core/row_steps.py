"""One user's training where the user touches few rows of some parameters: no other row is read, trained or written."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from ...errors import ModuleError
from ...federated.local_sgd import Batch
from ..isolation.made_up_data import parameters_to_try
from .local_optimisers import SingleUser
from .problem import Problem, UserSteps, check_finite_loss
from .row_fields import TouchedRows, build_updates, renumber_rows, starting_params, touched
from .updates import Updates
from .working_model import LossOf


def train_rows(problem: Problem, steps: UserSteps) -> Updates:
    """One user's update."""
    shapes, local = problem.model.named_shapes, problem.local
    heights = {name: shapes[name][0] for name in problem.row_fields}
    one = {name: field.unsqueeze(0) for name, field in steps.examples.items()}
    one, rows = renumber_rows(one, problem.row_fields, heights)
    first = starting_params(steps.params.unsqueeze(0), shapes, rows)
    of_user = problem.model.personal_pieces(steps.personal.unsqueeze(0))
    moving = {name: piece[0].clone().requires_grad_() for name, piece in (first | of_user).items()}
    leaves, finite_marker = list(moving.values()), steps.params.new_zeros(())
    reference = {name: piece[0].clone() for name, piece in first.items()} if problem.takes_reference else None
    optimiser = None if local.plain_sgd else SingleUser(local, leaves, steps.lr, len(first))
    with problem.model.substituting(moving):
        for step, rows_of_batch in enumerate(steps.batches):
            problem.model.set_keys(steps.random_keys[step])
            batch = {name: problem.examples.select_rows(field[0], rows_of_batch) for name, field in one.items()}
            loss = problem.reduced(problem.losses(problem.model.module, batch, reference), len(rows_of_batch))
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
            if optimiser is not None:
                optimiser.step(gradients)
            else:
                with torch.no_grad():
                    for leaf, gradient in zip(leaves, gradients, strict=True):
                        if gradient is not None:
                            leaf.sub_(gradient, alpha=steps.lr)
            finite_marker += 0.0 * loss.detach()
    check_finite_loss(finite_marker)
    updates = build_updates([moving[name].detach().unsqueeze(0) for name in shapes], first, shapes, rows)
    if of_user and bool(updates.norms().isfinite().all()):  # an update that is not finite counts as failed
        steps.personal.copy_(torch.cat([moving[name].detach().reshape(-1) for name in of_user]))
    return updates


def failed_rows(problem: Problem, params: Tensor) -> Updates:
    """An update of NaN, which adds nothing and is not within the clip."""
    shapes = problem.model.named_shapes
    row = torch.zeros(1, 1, dtype=torch.int64, device=params.device)
    rows = {name: TouchedRows(row, row > 0) for name in problem.row_fields}
    first = starting_params(params.unsqueeze(0), shapes, rows)
    return build_updates([torch.full_like(piece, math.nan) for piece in first.values()], first, shapes, rows)


def check_rows(problem: Problem, made_up: Callable[[int], Batch], count: int) -> None:
    """Refuse a loss that uses rows which the fields do not name, as a penalty on all weights does.

    Tried on synthetic examples with one row more than they touch, at several parameters: its gradient must be 0.
    """
    one = {name: field.unsqueeze(0) for name, field in made_up(count).items()}
    shapes = problem.model.named_shapes
    for name, field in problem.row_fields.items():
        rows, places = touched(one[field], shapes[name][0])
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
