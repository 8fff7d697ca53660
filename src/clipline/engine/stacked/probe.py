"""Tries a stacked step on synthetic users: does vmap support it, may batches be padded, how much memory is needed?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ...errors import CliplineError, ModuleError
from ...federated.local_sgd import Batch, per_example
from ..core.problem import Problem
from ..core.row_fields import RowUsage, TouchedRows, build_updates, starting_params
from ..core.updates import broadcast
from ..gpu.compile_gain import CountWork, StepWork
from ..gpu.kernels.noise import kernel_calls
from ..gpu.programs.kernels_ahead import compile_ahead
from ..isolation.generators import generators_state, preserve_generators
from ..isolation.guard import exhausted, users_own
from ..isolation.made_up_data import parameters_to_try
from .layers import PatchConv2d
from .step import Arguments, StackStep
from .vmap_layers import Bypass

MIN_ROOM = 256  # rows: users are padded to this times a power of four; each size is a program of its own


class CannotStack(ModuleError):
    """The model or its loss uses an operation that cannot run for stacked users."""


def vmap_reason(error: Exception) -> str:
    """Why vmap did not run a step, in one line: the operation it has no rule for, or else the error's first line."""
    text = str(error).strip() or type(error).__name__
    missing = re.search(
        r"[Bb]atching rule.*? for (aten::[\w.]+\w)", text
    )  # torch goes on to ask for an issue on GitHub
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
    arguments, first, rows = made_up_step(problem, stack_step, like, problem.model.initial.unsqueeze(0))
    on_gpu = problem.device.type == "cuda"
    counting = CountWork(users=2)
    with (
        preserve_generators(),
        problem.arithmetic("float32"),
    ):  # float32: coarser arithmetic would blur the comparison
        try:
            stack_step.per_example, paddable = _check_padding(problem, made_up)
            unknown = paddable and _all_equal(made_up(width))
        except Exception as error:
            if isinstance(error, CliplineError) or not users_own(error):
                raise
            raise CannotStack(f"model or loss fails on some made-up examples ({vmap_reason(error)})") from error
        finally:
            problem.isolation.after_user()
    if on_gpu and problem.fast.kernels and problem.fast.kernels_ahead:
        with suppress(RuntimeError):  # for want of memory, say: nothing depends on it
            _compile_kernels(problem, stack_step, arguments, first, rows)
    before = torch.cuda.memory_allocated(problem.device) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(problem.device)
    with preserve_generators(), problem.arithmetic():
        try:
            problem.isolation.seed(0)
            states_before = generators_state()
            with warnings.catch_warnings():
                # vmap warns where it falls back to a loop over the users
                warnings.filterwarnings("error", message=".*performance drop.*")
                stack_step(*arguments)
            problem.isolation.after_step()
            with Bypass(), counting:  # type: ignore[no-untyped-call]
                stack_step(*arguments)
            if generators_state() != states_before:
                raise CannotStack(
                    f"model {type(problem.model.module).__name__} or its loss draws from NumPy's or Python's "
                    "generator, which users in a stack would share"
                )
            problem.isolation.after_stack()
        except CannotStack:
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
    peak = torch.cuda.max_memory_allocated(problem.device) if on_gpu else 0
    return Probed(paddable and not unknown, unknown, max(1, (peak - before) // 2), counting.work)


def made_up_step(
    problem: Problem, stack_step: StackStep, batch: Batch, params: Tensor
) -> tuple[Arguments, Mapping[str, Tensor], Mapping[str, TouchedRows]]:
    """The arguments of a step of made-up users with this batch (users, width, ...): all of it counts, at rates of 1.

    With their first parameters and the rows that they touch. `params` are the parameters of all, (1, dim), or of each.
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
    return (stack, keys.to(problem.device), batch, kept, model.initial.new_ones(users)), first, rows


def _compile_kernels(
    problem: Problem,
    stack_step: StackStep,
    arguments: Arguments,
    first: Mapping[str, Tensor],
    rows: Mapping[str, TouchedRows],
) -> None:
    """Compile the kernels of a step, of the sums of its updates and of the noise in threads; change nothing."""
    stack, shapes = arguments[0], problem.model.named_shapes

    def step() -> None:
        if not any(isinstance(part, nn.Conv2d | PatchConv2d | nn.GroupNorm) for part in problem.model.module.modules()):
            return  # the others have few kernels
        with preserve_generators(), problem.arithmetic():
            problem.isolation.seed(0)
            try:
                stack_step(*tree_map_only(Tensor, Tensor.clone, arguments))
            finally:
                problem.isolation.after_failure()

    copies = [piece.clone() for piece in stack[: len(shapes)]]
    starts = [
        partial(broadcast, before, torch.empty_like(piece))
        for before, piece in zip(first.values(), copies, strict=False)
    ]
    updates = build_updates(copies, first, shapes, rows)
    totals = torch.zeros(1, problem.model.dim, dtype=torch.float64, device=problem.device)
    sums = partial(updates.add_to, totals, torch.ones(len(updates), dtype=torch.float64, device=problem.device))
    noise = kernel_calls(problem.device, problem.model.dim + 1) if problem.fast.device_noise else []
    layouts = [(name, field.shape, field.dtype) for name, field in [*first.items(), *arguments[2].items()]]
    kind = str(problem.model.module), problem.device, problem.precision, *layouts
    compile_ahead(problem.device, step, *starts, updates.norms, sums, *noise, kind=kind)


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
    batches.append({name: problem.examples.select_rows(field, padded) for name, field in examples.items()})
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
