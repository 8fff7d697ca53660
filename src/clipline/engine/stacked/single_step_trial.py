"""Tries on made-up examples which weights users can share, and compares the result with plain steps.

Users are kept apart by vmap, whatever the trial finds; a weight that is used otherwise later is refused then.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ...errors import ModuleError
from ...federated.local_sgd import Batch
from ..core.problem import Problem
from ..core.updates import ChannelsLast, Dense, Rows, Updates
from ..isolation.generators import generators_state, preserve_generators
from ..isolation.guard import exhausted
from ..isolation.made_up_data import parameters_to_try
from .agreement import NEIGHBOURS, compare, compare_neighbours, other_last_batch, plain_gradients
from .factored_updates import FactoredUpdates
from .probe import CannotStack, vmap_reason
from .shared_step import NotShared, SharedStep
from .vmap_layers import Bypass

_USERS = 3  # of the trial
_RATE = 2.0**-10  # a power of two: dividing by it rounds nothing


def shared_step(problem: Problem, made_up: Callable[[int], Batch]) -> SharedStep:
    """A step that shares all weights that can be; `CannotStack` if none can, or if it trains wrongly."""
    trial = _Trial(problem, made_up)
    shared = frozenset(problem.model.named_shapes)
    while shared:
        step = SharedStep(problem.model, problem.loss, shared)
        try:
            trial.run(step, problem.model.initial)
        except NotShared as error:  # at first also those that no layer multiplies with, such as biases
            shared = (shared & step.seen) - error.names
            continue
        if shared <= step.seen:
            with Bypass():  # type: ignore[no-untyped-call]
                trial.run(step, problem.model.initial)
            trial.check_agreement(step)
            return step
        shared &= step.seen
    raise CannotStack("no layer of the model has a weight that users could share")


def bytes_a_user(problem: Problem, made_up: Callable[[int], Batch], step: SharedStep) -> int:
    """Bytes that a user takes in a step: what the backward pass needs, and the updates."""
    kept: list[int] = []

    def counted(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
        updates = _Trial(problem, made_up).run(step, problem.model.initial)
    formed = sum(one.numel() * one.element_size() for one in _tensors(updates))
    return max(1, (sum(kept) + formed) // _USERS)


def equal_widths(
    problem: Problem, made_up: Callable[[int], Batch], step: SharedStep, widths: Sequence[int]
) -> list[int]:
    """Those of the widths at which a block gives users the same updates, to the last bit, as the widest does.

    Refused with `CannotStack` if at the widest itself a user's update depends on the place in the block.
    """
    trial, widest = _Trial(problem, made_up), max(widths)
    places = torch.arange(widest, device=problem.device)
    shift, equal = widest // 2 + 1, sorted(widths)

    def numbers(params: Tensor, users: Tensor) -> list[Tensor]:
        return [one.nan_to_num() for one in _tensors(trial.run(step, params, users, of=widest))]

    for params in parameters_to_try(problem.model.initial):  # of one set of numbers few may show it
        rows = numbers(params, places)
        if not all(map(torch.equal, (one.roll(-shift, 0) for one in rows), numbers(params, places.roll(-shift)))):
            raise CannotStack("a user's update would be rounded otherwise at another place among the users")
        equal = [
            width
            for width in equal
            if width == widest or all(map(torch.equal, (one[:width] for one in rows), numbers(params, places[:width])))
        ]
    return equal


class _Trial:
    """Steps of synthetic users, each with other examples and random keys, kept apart from everything else."""

    def __init__(self, problem: Problem, made_up: Callable[[int], Batch]) -> None:
        self._problem, self._made_up = problem, made_up

    def run(
        self, step: SharedStep, params: Tensor, users: Tensor | None = None, of: int = _USERS, factor: float = 1.0
    ) -> Updates:
        """A step of these users `of` so many, or all of them; `CannotStack` where it fails.

        The data of the last user are multiplied by `factor`.
        """
        problem, keys = self._problem, self._keys(of)
        order = torch.arange(of, device=problem.device) if users is None else users
        examples = {name: problem.examples.select_rows(field, order) for name, field in self._made_up(of).items()}
        examples = other_last_batch(examples, factor)
        problem.model.module.train()
        with preserve_generators(), problem.arithmetic("float32"), torch.enable_grad(), problem.model.unreadable():
            problem.isolation.seed(0)
            before = generators_state()
            try:
                with warnings.catch_warnings():
                    # vmap warns where it falls back to a loop over the users
                    warnings.filterwarnings("error", message=".*performance drop.*")
                    updates = step(params, examples, keys[order], _RATE)
                if generators_state() != before:
                    raise CannotStack(
                        f"model {type(problem.model.module).__name__} or its loss draws from NumPy's or Python's "
                        "generator, which users would share"
                    )
                problem.isolation.after_stack()
            except (CannotStack, NotShared):
                problem.isolation.after_user()
                raise
            except Exception as error:
                if (told := exhausted(error)) is not None:
                    raise told from None
                with suppress(ModuleError):  # one by one the change may be allowed
                    problem.isolation.after_stack()
                reason = vmap_reason(error)
                raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error
        return updates

    def check_agreement(self, step: SharedStep) -> None:
        """Refuse with `WrongStack` if a parameter moves otherwise than by plain steps, at several parameters.

        Or if, at the last of these, users move otherwise where another has other data.
        """
        problem, keys = self._problem, self._keys(_USERS)
        batch = {name: field.unsqueeze(1) for name, field in self._made_up(_USERS).items()}
        shapes = problem.model.named_shapes
        sizes = [shape.numel() for shape in shapes.values()]
        for params in parameters_to_try(problem.model.initial):
            rows = self.run(step, params).dense(problem.model.dim).double() / -_RATE
            plain = plain_gradients(problem, [params] * _USERS, [], keys, batch, [1] * _USERS)
            for row, gradients in zip(rows, plain, strict=True):
                if gradients is not None:
                    pieces = torch.split(row, sizes)
                    named = zip(shapes.items(), pieces, strict=True)
                    compare(problem, {name: piece.view(shape) for (name, shape), piece in named}, gradients)
        for factor in NEIGHBOURS:
            try:
                other = self.run(step, params, factor=factor).dense(problem.model.dim).double() / -_RATE
            except CannotStack:
                continue  # blocks are halved where one fails on somebody's data
            both = zip(torch.split(rows, sizes, dim=1), torch.split(other, sizes, dim=1), strict=True)
            compare_neighbours(problem, dict(zip(shapes, both, strict=True)))

    def _keys(self, users: int) -> Tensor:
        generator = torch.Generator().manual_seed(2021)
        size = users, len(self._problem.model.random_layers), 2
        return torch.randint(2**31 - 1, size, generator=generator, dtype=torch.int32).to(self._problem.device)


def _tensors(updates: Updates) -> list[Tensor]:
    """All numbers of the updates, (users, ...) each."""
    found: list[Tensor] = []
    for piece in updates.pieces:
        if isinstance(piece, FactoredUpdates):
            found += [piece.inputs, piece.outputs]
        elif isinstance(piece, Dense | Rows | ChannelsLast):
            found.append(piece.values)
    return found
