"""Compares a stacked step with plain steps on synthetic users, before any training: a wrong stack is refused.

torch's rules for many users at once have been wrong in silence: in 2.5 a `Linear` got no gradient, and models trained
to chance. What differs from one version to another, or for a layer that nobody tried, is found here on the user's own
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ...errors import CliplineError
from ...federated.local_sgd import Batch, per_example
from ..core.problem import Problem
from ..isolation.generators import preserve_generators
from ..isolation.guard import users_own
from ..isolation.made_up_data import parameters_to_try
from .probe import CannotStack, made_up_step
from .step import StackStep

_EXAMPLES = 4  # of each synthetic user, at most
# The distance allowed, as a share of the gradient. Wrong stacks are near 1; of right ones most are at 1e-6, and a deep
# ResNet is at 3e-3, where rounding moves a value across a kink.
_TOLERANCE = 0.05
_FLOOR = 0.1  # share of the whole gradient: smaller ones are compared with this, as they may be rounding errors alone
NEIGHBOURS = (1000.0, math.nan)  # factors of one user's data and parameters, which nobody else may notice
_ROUNDING = 1e-4  # share of a user's step: where nothing but another user's data differ, most steps are equal


class WrongStack(CannotStack):
    """A stacked step gives another result than a plain one."""


def check_agreement(problem: Problem, made_up: Callable[[int], Batch], stack_step: StackStep, *, padded: bool) -> None:
    """Refuse with `WrongStack` if a stacked step of synthetic users moves a parameter otherwise than plain steps do.

    `stack_step` is one of plain SGD: what it subtracts is the gradient. What other optimisers do with it is the same
    code in both ways of training.

    Three users with other examples, other parameters (`parameters_to_try`) and other random keys; layers such as
    dropout draw the same numbers from them in both ways. If batches may be `padded`, that of the last user is. A user
    whose loss is not finite, or who fails, cannot be compared and is left out.

    Then the last user gets other data, and the steps of the others must not notice.

    Both in float32 (or the parameters' own type), whatever the precision of the training: in bfloat16 right stacks
    differ by up to a third. The stacked step is the eager one, from which compiled programs are made.
    """
    width = min(problem.local.batch_size, _EXAMPLES)
    params = list(parameters_to_try(problem.model.initial))
    users = len(params)
    counts = [width] * (users - 1) + [(width + 1) // 2 if padded else width]
    device = problem.device
    batch = {name: field.reshape(users, width, *field.shape[1:]) for name, field in made_up(users * width).items()}
    (stack, random_keys, batch, _, _), _, _ = made_up_step(problem, stack_step, batch, torch.stack(params))

    plain = plain_gradients(problem, params, stack, random_keys, batch, counts)
    # With steps as long as the parameters, their difference keeps the digits of the gradient.
    lengths = [1 + float(one.norm()) for one in params]
    rates = torch.tensor(
        [length / (_norm(one) or 1.0) if one else 1.0 for length, one in zip(lengths, plain, strict=True)],
        dtype=stack[0].dtype, device=device,
    )  # fmt: skip
    kept = torch.arange(width, device=device) < torch.tensor(counts, device=device)[:, None]
    names = stack_step.names

    def moves(stack: Sequence[Tensor], batch: Batch) -> list[Tensor]:
        """How far a stacked step moves each parameter, (users, *shape) float64, over the rates."""
        after = [piece.clone() for piece in stack]
        problem.model.module.train()
        with preserve_generators(), problem.arithmetic("float32"), problem.model.unreadable():
            problem.isolation.seed(0)
            try:
                stack_step(
                    after, random_keys.clone(), {name: field.clone() for name, field in batch.items()}, kept, rates
                )
            finally:
                problem.isolation.after_stack()
        along = [rates.view(-1, *[1] * (piece.ndim - 1)).double() for piece in after]
        return [(a - b).double() / -rate for a, b, rate in zip(after, stack, along, strict=True)][: len(names)]

    stacked = moves(stack, batch)
    for user, gradients in enumerate(plain):
        if gradients is not None:
            compare(problem, {name: piece[user] for name, piece in zip(names, stacked, strict=True)}, gradients)
    for factor in NEIGHBOURS:
        try:
            other = moves([*map(partial(other_last, factor), stack)], other_last_batch(batch, factor))
        except Exception as error:
            if isinstance(error, CliplineError) or not users_own(error):
                raise
            continue  # users train alone where a stack fails on somebody's data
        compare_neighbours(problem, dict(zip(names, zip(stacked, other, strict=True), strict=True)))


def other_last(factor: float, values: Tensor) -> Tensor:
    """(users, ...) values with the last user's times this factor, unless they are whole numbers."""
    changed = values.clone()
    if changed.is_floating_point():
        changed[-1] *= factor
    return changed


def other_last_batch(batch: Batch, factor: float) -> Batch:
    """`other_last` of each field. On a GPU the last user has the first one's data instead, unless the factor is 1.

    A model may make an index of a number, and one out of range ends the process there.
    """
    if factor == 1 or all(field.device.type == "cpu" for field in batch.values()):
        return {name: other_last(factor, field) for name, field in batch.items()}
    others = {name: field.clone() for name, field in batch.items()}
    for field in others.values():
        field[-1].copy_(field[0])
    return others


def compare_neighbours(problem: Problem, moves: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse with `WrongStack` if users but the last move otherwise, (users, ...), where that one has other data."""
    tolerance = max(_ROUNDING, 8 * torch.finfo(problem.model.vector.dtype).eps)
    lengths = {name: float(one[:-1].norm()) for name, (one, _) in moves.items()}
    whole = math.hypot(*filter(math.isfinite, lengths.values()))
    for name, (one, other) in moves.items():
        length, off = lengths[name], float((one[:-1] - other[:-1]).norm())
        if math.isfinite(length) and not off <= tolerance * max(length, _FLOOR * whole):
            raise WrongStack(
                f"a stacked step of made-up users moves parameter {name!r} of one user otherwise where another has "
                f"other data (by {off:.3g}, and it moves by {length:.3g}), so that "
                f'{type(problem.model.module).__name__} or its loss would mix users: use engine="one-by-one"'
            )


def plain_gradients(
    problem: Problem,
    params: Sequence[Tensor],
    stack: Sequence[Tensor],
    random_keys: Tensor,
    batch: Batch,
    counts: Sequence[int],
) -> list[list[Tensor] | None]:
    """The gradients of each user by plain autograd, as one by one; None for a user who cannot be compared."""
    found: list[list[Tensor] | None] = []
    model = problem.model
    for user, count in enumerate(counts):
        own = {name: field[user, :count] for name, field in batch.items()}
        with problem.users_apart(), problem.arithmetic("float32"), torch.enable_grad():
            problem.isolation.seed(0)
            model.set_keys(random_keys[user])
            pieces = dict(zip(model.trainable, stack, strict=False))
            reference = {name: pieces[name][user].clone() for name in model.named_shapes if name in pieces}
            try:
                if problem.row_fields:
                    leaves = [piece[user].clone().requires_grad_() for piece in pieces.values()]
                    with model.substituting(dict(zip(pieces, leaves, strict=True))):
                        loss = problem.losses(model.module, own, reference)
                else:
                    leaves = list(model.trainable.values())
                    loss = problem.losses(model.load(params[user]), own, reference)
                loss = problem.local.reduced(loss) if per_example(loss, count) else loss
                gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
                finite = bool(loss.isfinite()) and all(
                    bool(one.isfinite().all()) for one in gradients if one is not None
                )
            except Exception as error:
                if not users_own(error):
                    raise
                finite = False
            problem.isolation.after_user()
        found.append(
            [torch.zeros_like(leaf) if one is None else one.detach().clone()
             for leaf, one in zip(leaves, gradients, strict=True)] if finite else None
        )  # fmt: skip
    model.load(model.initial)
    return found


def compare(problem: Problem, stacked: dict[str, Tensor], plain: Sequence[Tensor]) -> None:
    """Refuse with `WrongStack` if a user's gradients by a stack and by plain autograd differ."""
    tolerance, whole = _tolerance(problem), _norm(plain)
    for (name, got), wanted in zip(stacked.items(), plain, strict=True):
        length = float(wanted.double().norm())
        off = float((got - wanted.double()).norm())
        if not off <= tolerance * max(length, _FLOOR * whole):  # also where a stacked one is not finite
            raise WrongStack(
                f"a stacked step gives parameter {name!r} another gradient than a plain one on made-up examples (they "
                f"are {off:.3g} apart, the plain one is {length:.3g} long), so that with torch {torch.__version__} "
                f'{type(problem.model.module).__name__} would train wrongly: use engine="one-by-one"'
            )


def _tolerance(problem: Problem) -> float:
    """More for parameters in a type of few digits, frozen ones included: 0.5 for bfloat16."""
    params = [problem.model.vector, *problem.model.module.parameters()]
    coarsest = max(torch.finfo(param.dtype).eps for param in params if param.is_floating_point())
    return min(0.5, max(_TOLERANCE, 64 * coarsest))


def _norm(pieces: Sequence[Tensor]) -> float:
    return float(torch.stack([piece.double().norm() for piece in pieces]).norm())
