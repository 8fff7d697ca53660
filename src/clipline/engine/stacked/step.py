"""One SGD step for every user of a stack, under vmap. On a GPU `gpu/recorded_step.py` compiles and replays it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ...federated.local_sgd import Batch, LocalTraining, Loss, takes_reference
from ..core.local_optimisers import LocalOptimiser
from ..core.working_model import LossOf, WorkingModel
from .vmap_layers import StackSafe

Arguments = tuple[list[Tensor], Tensor, Batch, Tensor, Tensor]  # of a step: stack, random_keys, batch, kept, rates


class StackStep:
    """The eager step: `torch.func.vmap` of the loss, then one backward pass for all users."""

    def __init__(self, model: WorkingModel, loss: Loss, local: LocalTraining, *, plain: bool = False) -> None:
        """With `plain` a step of plain SGD, whatever `local` says."""
        self.names = [*model.named_shapes, *model.personal_shapes]
        self._shared = len(model.named_shapes)  # the first of the names: those that are released
        self.local = local
        self._optimiser = None if plain or local.plain_sgd else LocalOptimiser(local)
        self._takes_reference = takes_reference(loss)
        self._pulled = self._optimiser is not None and local.proximal > 0
        self.per_example = False  # whether the loss gives one number for each example; `probe` sets it
        self.check: Callable[[], None] | None = None  # called where Python has run a step: did users leave something?
        self._loss = LossOf(model.module, loss)
        self._keys = ["model." + f"{name}.key".lstrip(".") for name in model.random_layers]
        self.random_keys = len(self._keys)
        self._random_layers = list(model.random_layers.values())
        self._losses = vmap(self._loss_of_one, randomness="error")

    def complete(self, first: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All pieces of a stack whose parameters begin as `first` (1 or users, *shape).

        These are the parameters, then the round's parameters once more for a loss that asks for them, and once more to
        be pulled to, then the optimiser's state. Pieces may share memory: copy them.
        """
        pieces = dict(first)
        released = list(first.items())[: self._shared]
        if self._takes_reference:
            pieces |= {f"{name} of the round": piece for name, piece in released}
        if self._pulled:  # not those of the loss, which may write into them
            pieces |= {f"{name} pulled to": piece for name, piece in released}
        if self._optimiser is not None:
            state = self._optimiser.init([piece[:1] for piece in first.values()])
            pieces |= {f"state {number}": piece for number, piece in enumerate(state)}
        return pieces

    def __call__(
        self, stack: Sequence[Tensor], random_keys: Tensor, batch: Batch, kept: Tensor, rates: float | Tensor
    ) -> None:
        """Update the parameters of every user, (users, *shape) each, in place, and with them the rest of the stack.

        The stack is `complete`.
        `random_keys` (users, layers, 2) are the keys of the model's random layers, `kept` (users, width) is false for
        padding in a batch, and `rates` is the learning rate, or one for each user.
        """
        own, rest = stack[: len(self.names)], stack[len(self.names) :]
        leaves = [piece.detach().requires_grad_() for piece in own]
        reference, rest = _split(rest, self._shared if self._takes_reference else 0)
        anchor, state = _split(rest, self._shared if self._pulled else 0)
        seen = dict(zip(self.names, reference, strict=False))
        losses = self._losses(dict(zip(self.names, leaves, strict=True)), random_keys, batch, kept, seen)
        # A user's loss depends on that user's parameters only: the gradient of the sum holds each user's own.
        gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        # If a loss is not finite, make the user's update NaN, so that it adds nothing: some of torch's gradients at NaN
        # depend on memory alignment.
        rates = rates + 0.0 * losses.detach().to(stack[0].dtype)
        working = kept.any(dim=1)
        if self._optimiser is not None:
            self._optimiser.step(own, gradients, state, anchor, rates, working if self.per_example else None)
            return
        for piece, gradient in zip(own, gradients, strict=True):
            if gradient is None:  # the loss does not use it
                continue
            along = (-1, *[1] * (piece.ndim - 1))
            step = gradient.to(piece.dtype) * rates.view(along)
            piece.sub_(step if not self.per_example else torch.where(working.view(along), step, 0.0))

    def _loss_of_one(
        self, named: dict[str, Tensor], random_keys: Tensor, batch: Batch, kept: Tensor, reference: Batch
    ) -> Tensor:
        state = {f"model.{name}": param for name, param in named.items()}
        state |= dict(zip(self._keys, random_keys.unbind(0), strict=True))
        for source in self._random_layers:
            source.draws = 0
        with StackSafe() as safe:
            losses: Tensor = functional_call(self._loss, state, (batch, reference))
        spoiled: Tensor = safe.spoiled(self.local.reduced(losses, kept) if self.per_example else losses)
        return spoiled


def _split(pieces: Sequence[Tensor], count: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return pieces[:count], pieces[count:]
