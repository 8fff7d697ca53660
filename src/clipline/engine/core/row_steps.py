"""One user's training where the user touches few rows of some parameters: no other row is read, trained or written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from ...errors import ModuleError
from ...federated.local_sgd import Batch
from ..isolation.made_up_data import parameters_to_try
from .local_optimisers import SingleUser
from .outer_products import SparseOuterProducts
from .problem import Problem, UserSteps, check_finite_loss
from .recorded_weight import StepRecord
from .row_fields import TouchedRows, build_updates, renumber_rows, starting_params, touched
from .updates import Updates
from .working_model import LossOf


def train_rows(
    problem: Problem,
    steps: UserSteps,
    recorded: frozenset[str],
    incomplete: set[str],
    *,
    noted: frozenset[str],
) -> Updates:
    """One user's SGD steps. Recorded parameters that were used otherwise go to `incomplete`: start again.

    `noted` are those that the other users of a block have as records.
    """
    shapes = problem.model.named_shapes
    fields = {name: field for name, field in problem.row_fields.items() if name not in recorded}
    heights = {name: shapes[name][0] for name in fields}
    one, rows = renumber_rows({name: field.unsqueeze(0) for name, field in steps.examples.items()}, fields, heights)
    first = starting_params(steps.params.unsqueeze(0), shapes, rows) if rows else steps.whole
    records = {name: StepRecord(first[name][0], steps.lr) for name in recorded}
    moving = {name: piece[0].clone().requires_grad_() for name, piece in first.items() if name not in records}
    of_user = problem.model.personal_pieces(steps.personal.unsqueeze(0))
    moving |= {name: piece[0].clone().requires_grad_() for name, piece in of_user.items()}
    held = {name: records[name].stand_in() if name in records else moving[name] for name in (*shapes, *of_user)}
    finite_marker = steps.params.new_zeros(())
    takes_reference, local = problem.takes_reference, problem.local
    reference = {name: piece[0].clone() for name, piece in first.items()} if takes_reference else None
    shared = len(moving) - len(of_user)
    optimiser = None if local.plain_sgd else SingleUser(local, list(moving.values()), steps.lr, shared)
    try:
        with problem.model.substituting(held):
            for step, rows_of_batch in enumerate(steps.batches):
                problem.model.set_keys(steps.random_keys[step])
                batch = {name: problem.examples.select_rows(field[0], rows_of_batch) for name, field in one.items()}
                losses = problem.losses(problem.model.module, batch, reference)
                loss = problem.reduced(losses, len(rows_of_batch))
                if optimiser is None:
                    _sgd_step(loss, list(moving.values()), list(records.values()), steps.lr)
                else:
                    optimiser.step(torch.autograd.grad(loss, list(moving.values()), allow_unused=True))
                finite_marker += 0.0 * loss.detach()
    finally:
        incomplete.update(name for name, record in records.items() if not record.complete)
    check_finite_loss(finite_marker)
    stack: list[Tensor | list[SparseOuterProducts]] = []
    for name in shapes:
        if name in records:
            stack.append(records[name].terms())
        elif name in noted:  # as outer products too: all users of a block need one kind
            change = moving[name].detach() - first[name][0]
            stack.append([SparseOuterProducts.of_rows(rows[name].rows[0], change)])
        else:
            stack.append(moving[name].detach().unsqueeze(0))
    updates = build_updates(stack, first, shapes, rows)
    if (
        of_user and not incomplete and bool(updates.norms().isfinite().all())
    ):  # an update that is not finite counts as failed
        steps.personal.copy_(torch.cat([moving[name].detach().reshape(-1) for name in of_user]))
    return updates


def failed_rows(problem: Problem, params: Tensor, noted: frozenset[str]) -> Updates:
    """An update of NaN, which adds nothing and is not within the clip."""
    shapes = problem.model.named_shapes
    bad = params.new_full((1, 1), math.nan)
    rows = {name: TouchedRows(bad.long() * 0, bad != bad) for name in problem.row_fields if name not in noted}
    stack: list[Tensor | list[SparseOuterProducts]] = []
    first = {}
    for name, shape in shapes.items():
        size = (1, *shape[1:]) if name in problem.row_fields else shape
        first[name] = params.new_zeros(1, *size)
        nothing = params.new_full((1, *size), math.nan)
        stack.append([SparseOuterProducts.of_rows(bad[0].long() * 0, nothing[0])] if name in noted else nothing)
    return build_updates(stack, first, shapes, rows)


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
