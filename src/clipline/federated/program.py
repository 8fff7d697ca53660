"""One step of SGD for every user of a stack: as it is written, or traced once, compiled and replayed on a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from .flat_module import FlatModule
from .local import Batch, LocalSGD, Loss, LossOf

_WARM_UP = 3  # calls before a program is recorded: the compiler and cuBLAS set themselves up


class StackStep:
    """The step as it is written: `torch.func.vmap` of the loss, then torch's own gradient of all users at once."""

    def __init__(self, flat: FlatModule, loss: Loss, local: LocalSGD) -> None:
        self.names = list(flat.named_shapes)
        self.local = local
        self.per_example = False  # whether the loss gives one number for each example: found out by a trial
        self._loss = LossOf(flat.module, loss)
        self._keys = ["model." + f"{name}.key".lstrip(".") for name in flat.chances]
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
        gradients = torch.autograd.grad(losses.sum(), leaves)
        working = kept.any(dim=1)
        for piece, gradient in zip(stack, gradients, strict=True):
            along = (-1, *[1] * (piece.ndim - 1))
            step = gradient.to(piece.dtype) * (rates.view(along) if isinstance(rates, Tensor) else rates)
            piece.sub_(step if not self.per_example else torch.where(working.view(along), step, 0.0))

    def _loss_of_one(self, named: dict[str, Tensor], chances: Tensor, batch: Batch, kept: Tensor) -> Tensor:
        state = {f"model.{name}": param for name, param in named.items()}
        state |= dict(zip(self._keys, chances.unbind(0), strict=True))
        losses: Tensor = functional_call(self._loss, state, (batch,))
        return self.local.reduced(losses, kept) if self.per_example else losses


class Recording:
    """A `StackStep` for a fixed number of users on a GPU: traced into one flat program, compiled, and then replayed.

    Everything it reads and writes stays in place: fill `stack`, `examples`, `counts`, `chances` and `rates`, set
    `place` to 0, and every `replay()` takes the next step.
    """

    def __init__(self, step: StackStep, shapes: Sequence[torch.Size], users: int, steps: int, like: Batch) -> None:
        device = next(iter(like.values())).device
        width = step.local.batch_size
        self._step = step
        self.stack = [torch.zeros(users, *shape, device=device) for shape in shapes]
        self.examples = {name: field.new_zeros(steps, users, width, *field.shape[2:]) for name, field in like.items()}
        self.counts = torch.zeros(steps, users, dtype=torch.int64, device=device)
        self.chances = torch.zeros(steps, users, len(step._keys), 2, dtype=torch.int32, device=device)
        self.rates = torch.zeros(users, device=device)
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(width, device=device)
        self._compiled: Callable[..., Any] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._calls = 0

    def replay(self) -> None:
        """Take the next step of all users."""
        if self._graph is not None:
            self._graph.replay()
            return
        self._calls += 1
        if self._calls <= _WARM_UP:
            self._run()
            return
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self._graph = graph
        self._graph.replay()

    def _run(self) -> None:
        chances, counts = (field.index_select(0, self.place)[0] for field in (self.chances, self.counts))
        batch = {name: _at(field, self.place) for name, field in self.examples.items()}
        arguments = (self.stack, chances, batch, self._places < counts.unsqueeze(1), self.rates)
        if self._compiled is None:
            self._compiled = _compiled(self._step, arguments)
        with torch.no_grad():
            self._compiled(*arguments)
        self.place += 1


def _at(field: Tensor, place: Tensor) -> Tensor:
    """field[place], for types too that torch cannot pick from."""
    if field.dtype == torch.uint16:
        return field.view(torch.int16).index_select(0, place)[0].view(torch.uint16)
    return field.index_select(0, place)[0]


def _compiled(step: StackStep, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The step as a flat list of operations, compiled. Tracing runs the step once on copies."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def flat_step(*arguments: Any) -> None:
        with torch.enable_grad():
            step(*arguments)

    copies = torch.utils._pytree.tree_map(torch.clone, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = make_fx(flat_step)(*copies)
    compiled: Callable[..., Any] = torch.compile(traced, dynamic=False)
    return compiled
