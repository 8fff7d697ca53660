"""One step of SGD for every user of a stack: as it is written, or traced once, compiled and replayed on a GPU."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ...federated.local_sgd import Batch, LocalSGD, Loss, LossOf
from ..working_model import WorkingModel
from .dynamic_batch import copied, traced
from .vmap_layers import StackSafe

_WARM_UP = 1  # calls with so many users before they are recorded: the compiler and cuBLAS set themselves up
_VERSIONS = 2  # of a compiled program before it is taken to be one for a single number of users
_WIDTHS = 32  # users: up to so many every even number is recorded, up to twice as many every fourth, and so on


class SlowEngineWarning(UserWarning):
    """Users train in a slower way than they might."""


Arguments = tuple[list[Tensor], Tensor, Batch, Tensor, Tensor]  # of a step: stack, chances, batch, kept, rates


class StackStep:
    """The step as it is written: `torch.func.vmap` of the loss, then torch's own gradient of all users at once."""

    def __init__(self, flat: WorkingModel, loss: Loss, local: LocalSGD) -> None:
        self.names = list(flat.named_shapes)
        self.local = local
        self.per_example = False  # whether the loss gives one number for each example: found out by a trial
        self._loss = LossOf(flat.module, loss)
        self._keys = ["model." + f"{name}.key".lstrip(".") for name in flat.chances]
        self.chances = len(self._keys)
        self._sources = list(flat.chances.values())
        self._losses = vmap(self._loss_of_one, randomness="error")

    def __call__(
        self, stack: Sequence[Tensor], chances: Tensor, batch: Batch, kept: Tensor, rates: float | Tensor
    ) -> None:
        """Move the parameters of every user, (users, *shape) each, in place.

        `chances` (users, chances, 2) are the keys of the model's random layers, `kept` (users, width) says which
        examples of each batch are real, and `rates` is the learning rate, or one for each user.
        """
        leaves = [piece.detach().requires_grad_() for piece in stack]
        losses = self._losses(dict(zip(self.names, leaves, strict=True)), chances, batch, kept)
        # A user's loss depends on that user's parameters alone: the gradient of the sum holds each user's own.
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        # A loss that is no finite number spoils the user's update, which then adds nothing: some of torch's gradients
        # at NaN depend on where in memory it lies.
        rates = rates + 0.0 * losses.detach().to(stack[0].dtype)
        working = kept.any(dim=1)
        for piece, gradient in zip(stack, gradients, strict=True):
            if gradient is None:  # the loss does not use it
                continue
            along = (-1, *[1] * (piece.ndim - 1))
            step = gradient.to(piece.dtype) * rates.view(along)
            piece.sub_(step if not self.per_example else torch.where(working.view(along), step, 0.0))

    def _loss_of_one(self, named: dict[str, Tensor], chances: Tensor, batch: Batch, kept: Tensor) -> Tensor:
        state = {f"model.{name}": param for name, param in named.items()}
        state |= dict(zip(self._keys, chances.unbind(0), strict=True))
        for source in self._sources:
            source.draws = 0
        with StackSafe() as safe:
            losses: Tensor = functional_call(self._loss, state, (batch,))
        spoiled: Tensor = safe.spoiled(self.local.reduced(losses, kept) if self.per_example else losses)
        return spoiled


class Program:
    """A `StackStep` as one flat program: traced and compiled when it is first called, for any number of users."""

    def __init__(self, step: StackStep) -> None:
        self.step = step
        self._versions = 0  # how often the compiler had to work
        self._compiled: Callable[..., Any] | None = None
        self._copies: dict[int, torch.dtype] | None = None

    @property
    def any_width(self) -> bool:
        """Whether one compiled program serves any number of users, as far as was seen; otherwise keep to one."""
        return self._versions <= _VERSIONS

    def copies(self, arguments: Arguments) -> dict[int, torch.dtype]:
        """The pieces of the stack of which a copy is best kept, and its type: a step would make it anew every time."""
        if self._copies is None:
            self._copies = {}
            if torch.is_autocast_enabled(arguments[0][0].device.type):
                with suppress(Exception):  # whatever is wrong is told when the step is taken
                    self._copies = copied(self.step, arguments)
        return self._copies

    def __call__(self, arguments: Arguments, copies: Mapping[int, Tensor]) -> None:
        """Take the step; see `StackStep` for the arguments. The copies are as `copies` says, and kept up to date."""
        given = (*arguments, list(copies.values()))
        for tensor in tree_leaves(given):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        if self._compiled is not None:
            self._compiled(*given)
            return
        try:  # the compiler works while the program is first called
            program = torch.no_grad()(torch.compile(traced(self.step, arguments, copies), backend=self._inductor))
            program(*given)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            slow = f"the step of many users cannot be compiled ({reason}); it runs as it is written, which is slower"
            warnings.warn(slow, SlowEngineWarning, stacklevel=2)

            def program(*given: Any) -> None:
                self.step(*given[:-1])

            program(*given)
        self._compiled = program

    def _inductor(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self._versions += 1
        from torch._inductor.compile_fx import compile_fx  # takes a second to import

        return cast("Callable[..., Any]", compile_fx(graph, inputs))


class GraphedStep:
    """A program's steps on a GPU, recorded for some numbers of users and then replayed.

    Everything it reads and writes stays in place: fill `stack` and the `copies` of some of it, `examples`, `counts`,
    `chances` and `rates`, set `place` to 0, and every `replay(active)` takes the next step of the first so many users.
    """

    def __init__(
        self, program: Program, stack: Sequence[Tensor], like: Batch, *, users: int, steps: int, width: int
    ) -> None:
        """Room for `users` with at most `steps` steps of `width` examples like these: (users, steps, width, ...)."""
        device = stack[0].device
        self._program = program
        self.stack = [piece.new_zeros(users, *piece.shape[1:]) for piece in stack]
        self.examples = {name: field.new_zeros(steps, users, width, *field.shape[3:]) for name, field in like.items()}
        self.counts = torch.zeros(steps, users, dtype=torch.int64, device=device)
        self.chances = torch.zeros(steps, users, program.step.chances, 2, dtype=torch.int32, device=device)
        self.rates = stack[0].new_zeros(users)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(width, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._calls: Counter[int] = Counter()
        self._pool: Any = None
        kept = program.copies(self._arguments(min(2, users)))
        self.copies = {piece: torch.zeros_like(self.stack[piece], dtype=dtype) for piece, dtype in kept.items()}

    def replay(self, active: int) -> None:
        """Take the next step of the first `active` users, and of a few more who have none: for them nothing changes."""
        users = min(rounded_up(active), len(self.rates)) if self._program.any_width else len(self.rates)
        if users not in self._graphs:
            self._calls[users] += 1
            if self._calls[users] <= _WARM_UP or self.place.device.type != "cuda":
                self._run(users)
                return
            self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.current_stream(self.place.device)
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._run(users)
            self._graphs[users] = graph
        self._graphs[users].replay()

    def _run(self, users: int) -> None:
        self._program(self._arguments(users), {piece: copy[:users] for piece, copy in self.copies.items()})
        self.place += 1

    def _arguments(self, users: int) -> Arguments:
        """Of the next step of so many users."""
        chances, counts = (_at(field, self.place)[:users] for field in (self.chances, self.counts))
        batch = {name: _at(field, self.place)[:users] for name, field in self.examples.items()}
        kept = self._places < counts.unsqueeze(1)
        return [piece[:users] for piece in self.stack], chances, batch, kept, self.rates[:users]


def rounded_up(users: int) -> int:
    """The least number that is recorded and holds so many. At least 2: a compiler makes 1 a program of its own."""
    grain = 2
    while users > grain * _WIDTHS // 2:
        grain *= 2
    return max(2, -(-users // grain) * grain)


def _at(field: Tensor, place: Tensor) -> Tensor:
    """field[place], for types too that torch cannot pick from."""
    if field.dtype == torch.uint16:
        return field.view(torch.int16).index_select(0, place)[0].view(torch.uint16)
    return field.index_select(0, place)[0]
