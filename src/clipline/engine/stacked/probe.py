"""Tries a stacked step on synthetic users: does vmap support it, may batches be padded, is it right, how much memory?

torch's rules for many users at once have been wrong in silence: in 2.5 a `Linear` got no gradient, and models trained
to chance. So a stacked step is compared with plain steps before any training, on the user's own model.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...errors import CliplineError, ModuleError
from ...federated.local_sgd import Batch, per_example
from ..core.batches import select_rows
from ..core.problem import Problem
from ..core.row_fields import RowUsage, TouchedRows, starting_params
from ..gpu.compile_gain import CountWork, StepWork
from ..isolation.generators import generators_state, preserve_generators
from ..isolation.guard import exhausted, users_own
from ..isolation.made_up_data import parameters_to_try
from .step import Arguments, StackStep
from .vmap_layers import Bypass

MIN_ROOM = 256  # rows: users are padded to this times a power of four; each size is a program of its own


class CannotStack(ModuleError):
    """The model or its loss uses an operation that cannot run for stacked users."""


def vmap_reason(error: Exception) -> str:
    """Why vmap did not run a step, in one line: the operation it has no rule for, or else the error's first line."""
    text = str(error).strip() or type(error).__name__
    missing = re.search(r"[Bb]atching rule.*? for (aten::[\w.]+\w)", text)  # more follows, on reporting an issue
    return f"torch.func.vmap has no rule for {missing[1]}" if missing else text.splitlines()[0]


@dataclass(frozen=True)
class Probed:
    """What the probe found out."""

    paddable: bool  # whether a batch may be padded without changing the result
    unknown: bool  # whether that cannot be told, as all synthetic examples are equal: it is not padded then
    bytes_a_user: int
    work: StepWork  # of one step


def probe(problem: Problem, made_up: Callable[[int], Batch], stack_step: StackStep) -> Probed:
    """Run a stacked step of two synthetic users; refuse with `CannotStack` if that fails.

    Finds out the memory a user takes, whether the loss gives one number for each example (set in `stack_step`), and
    whether a batch may be padded. None of this decides whether users are kept apart: they are, either way.
    """
    width = min(problem.local.batch_size, 64)
    like = {name: torch.stack([field] * 2) for name, field in made_up(width).items()}
    arguments = made_up_step(problem, stack_step, like, problem.model.initial.unsqueeze(0))
    on_gpu = problem.device.type == "cuda"
    counting = CountWork(users=2)
    with preserve_generators(), problem.arithmetic("float32"):  # coarser arithmetic would blur the comparison
        try:
            stack_step.per_example, paddable = _check_padding(problem, made_up)
            unknown = paddable and _all_equal(made_up(width))
        except Exception as error:
            if isinstance(error, CliplineError) or not users_own(error):
                raise
            raise CannotStack(f"model or loss fails on some made-up examples ({vmap_reason(error)})") from error
        finally:
            problem.isolation.after_user()
    before = torch.cuda.memory_allocated(problem.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(problem.device)
    with preserve_generators(), problem.arithmetic(), made_up_users(problem):
        stack_step(*arguments)
        problem.isolation.after_step()
        with Bypass(), counting:  # type: ignore[no-untyped-call]
            stack_step(*arguments)
    peak = torch.cuda.max_memory_allocated(problem.device) if on_gpu else 0
    return Probed(paddable and not unknown, unknown, max(1, (peak - before) // 2), counting.work)


@contextmanager
def made_up_users(problem: Problem) -> Iterator[None]:
    """Around steps of made-up users. What fails, or draws numbers that users would share, is a `CannotStack`."""
    problem.isolation.seed(0)
    before = generators_state()
    try:
        with warnings.catch_warnings():
            # vmap warns where it falls back to a loop over the users
            warnings.filterwarnings("error", message=".*performance drop.*")
            yield
        if generators_state() != before:
            raise CannotStack(
                f"model {type(problem.model.module).__name__} or its loss draws from NumPy's or Python's generator, "
                "which users in a stack would share"
            )
        problem.isolation.after_stack()
    except CannotStack:
        problem.isolation.after_user()
        raise
    except Exception as error:
        if (told := exhausted(error)) is not None:
            raise told from None
        with suppress(ModuleError):  # one by one the change may be allowed
            problem.isolation.after_stack()
        reason = vmap_reason(error)
        if any(getattr(part, "gradient_checkpointing", False) is True for part in problem.model.module.modules()):
            reason = "gradient checkpointing has no version for a stack"  # as Hugging Face models name it
        raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error


def made_up_step(problem: Problem, stack_step: StackStep, batch: Batch, params: Tensor) -> Arguments:
    """The arguments of a step of made-up users with this batch (users, width, ...): all of it counts, at rates of 1.

    `params` are the parameters of all, (1, dim), or of each.
    """
    model, (users, width) = problem.model, next(iter(batch.values())).shape[:2]
    batch, rows = dict(batch), dict[str, TouchedRows]()
    for name, field in problem.row_fields.items():
        named = RowUsage(batch[field], model.named_shapes[name][0])
        rows[name], batch[field] = named.touched(int(named.rooms(MIN_ROOM).max()))
    owners = None if len(params) == 1 else torch.arange(users, device=problem.device)
    first = starting_params(params, model.named_shapes, rows, owners)
    first |= model.personal_pieces(model.initial_personal.repeat(len(params), 1))
    stack = [piece.expand(users, *piece.shape[1:]).clone() for piece in stack_step.complete(first).values()]
    generator = torch.Generator().manual_seed(2021)
    keys = torch.randint(2**31 - 1, (users, len(model.random_layers), 2), generator=generator, dtype=torch.int32)
    kept = torch.ones(users, width, dtype=torch.bool, device=problem.device)
    return stack, keys.to(problem.device), batch, kept, model.initial.new_ones(users)


def _check_padding(problem: Problem, made_up: Callable[[int], Batch]) -> tuple[bool, bool]:
    """Whether the loss gives one number for each example, and whether padding a batch leaves the others unchanged.

    Tried on synthetic examples at several parameters. A model that mixes examples, as batch statistics do, gives other
    losses for a padded batch; its batches are then never padded.
    """
    count = min(problem.local.batch_size, 8)
    half = (count + 1) // 2
    examples = made_up(count)
    batches = [{name: field[:half] for name, field in examples.items()}]
    padded = torch.arange(count, device=problem.device)
    padded[half:] = count - 1  # with an example of another batch, as the user's first may be
    batches.append({name: select_rows(field, padded) for name, field in examples.items()})
    problem.model.module.train()
    # A frozen base in bfloat16 rounds otherwise for another number of rows: by up to 2^-8 a product.
    narrow = any(p.is_floating_point() and p.element_size() < 4 for p in problem.model.module.parameters())
    rtol = 2e-2 if narrow else 1e-3
    same = finite = False
    for params in parameters_to_try(problem.model.initial):
        losses = []
        for batch in batches:
            problem.model.set_keys(
                torch.zeros(len(problem.model.random_layers), 2, dtype=torch.int32, device=problem.device)
            )
            problem.isolation.seed(0)
            with torch.enable_grad(), torch.random.fork_rng([problem.device] if problem.device.type == "cuda" else []):
                whole = starting_params(params.clone().unsqueeze(0), problem.model.named_shapes, {})
                reference = {name: piece[0] for name, piece in whole.items()}
                losses.append(problem.losses(problem.model.load(params), batch, reference).detach())
            problem.isolation.after_user()
        if not per_example(losses[1], count):
            return False, False
        unpadded_losses, padded_losses = losses[0].double(), losses[1][:half].double()
        if bool(unpadded_losses.isfinite().all()):
            alike = torch.isclose(unpadded_losses, padded_losses, rtol=rtol, atol=1e-6)
            same = bool(alike.all()) and (same or not finite)
            finite = True
    return True, same


def _all_equal(batch: Batch) -> bool:
    """Whether there are several examples, and all are the same: those that mix examples would not show it."""
    several = any(len(field) > 1 for field in batch.values())
    return several and all(
        bool((field.to(torch.float64) == field[:1].to(torch.float64)).all()) for field in batch.values()
    )


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
    stack, random_keys, batch, _, _ = made_up_step(problem, stack_step, batch, torch.stack(params))

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
                own = {name: field.clone() for name, field in batch.items()}
                stack_step(after, random_keys.clone(), own, kept, rates)
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
