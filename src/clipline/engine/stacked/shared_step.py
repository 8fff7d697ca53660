"""The step of users with one example each: one forward and one backward pass, in which weights are shared.

Plain twin: one user after the other, `OneByOne`. Switch: `FastParts.single_step`.
Held equal by: tests/engine/stacked/test_single_step.py, and by `single_step_trial.py` on the user's own model.
Buys: an epoch of 60,000 images in 7.4 s instead of 52 (small CNN), in 0.6 instead of 6.7 (logistic regression), on one
thread of 2 cores, 2026-11-16. Opacus takes 12.2 and 0.7 at best (benchmarks/against_opacus.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.func import functional_call, vmap

from ...errors import ModuleError
from ...federated.local_sgd import Batch, Loss, per_example
from ..core.updates import ChannelsLast, Dense, Piece, Rows, Updates
from ..core.working_model import LossOf, WorkingModel
from .aligned import outer_products
from .factored_updates import FactoredUpdates
from .shared_weights import Notes, SharedWeights, Use
from .vmap_layers import StackSafe

# A sum of outer products is kept as factors if all pairs of them take so many times fewer operations than the sum
# itself: pairs are multiplied in float64, and the sum is then formed anyway, over all users at once.
_FACTORS_PAY = 8


class NotShared(ModuleError):
    """A weight that was to be shared is used in a way for which its users' gradients cannot be told apart."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"parameter {names[0]!r} is used otherwise than in the trial, where it went into a layer's products alone: "
            "let the model do the same in every call, or use FastParts(single_step=False)"
        )
        self.names = frozenset(names)


class SharedStep:
    """The updates of a block of users who take one step each, on one example each.

    The parameters in `shared` are the same tensors for all users; of the others every user has a copy under vmap.
    """

    def __init__(self, model: WorkingModel, loss: Loss, shared: frozenset[str] = frozenset()) -> None:
        self.shared = shared
        self.seen: set[str] = set()  # names of parameters that were used as weights of a layer
        self._shapes = model.named_shapes
        ends = list(accumulate(shape.numel() for shape in self._shapes.values()))
        self._starts = dict(zip(self._shapes, [0, *ends[:-1]], strict=True))
        self._loss = LossOf(model.module, loss)
        self._keys = ["model." + f"{name}.key".lstrip(".") for name in model.random_layers]
        self._random_layers = list(model.random_layers.values())
        self._notes = Notes()

    def __call__(
        self, params: Tensor, examples: Batch, random_keys: Tensor, lr: float, count: int | None = None
    ) -> Updates:
        """The updates -lr * gradient, PRIVATE, from examples (users, ...) and random keys (users, layers, 2).

        With `count`, only of the first users: the others fill the block.
        """
        users, copied = len(random_keys), params.clone()  # a model may write into its parameters
        pieces = torch.split(copied, [shape.numel() for shape in self._shapes.values()])
        named = {name: piece.view(self._shapes[name]) for name, piece in zip(self._shapes, pieces, strict=True)}
        shared = {name: named[name].detach().requires_grad_() for name in self.shared}
        own = {
            name: piece.detach().expand(users, *piece.shape).requires_grad_()
            for name, piece in named.items()
            if name not in shared
        }
        zeros = params.new_zeros(users)
        self._notes = Notes()
        # Tensors alone, one after the other: vmap looks through nested arguments, which takes as long as a product.
        loss_of_one = partial(self._loss_of_one, shared, list(own), list(examples))
        losses = vmap(loss_of_one, randomness="error")(zeros, random_keys, *own.values(), *examples.values())
        self._notes.open = True
        leaves = [*own.values(), *shared.values()]
        try:
            found = torch.autograd.grad(losses, leaves, torch.full_like(losses, -lr), allow_unused=True)
        finally:
            self._notes.open = False
        if not torch.equal(_bits(copied), _bits(params)):
            raise ModuleError(
                "the model writes into a parameter that all users share, or its loss does: compute from it without "
                "writing, or use FastParts(single_step=False)"
            )
        gradients = dict(zip([*own, *shared], found, strict=True))
        mixed = {name for name, uses in self._notes.uses.items() if len({use.kind for use in uses}) > 1}
        if wrong := sorted(mixed | {name for name in shared if gradients[name] is not None}):
            raise NotShared(wrong)
        updates: list[Piece] = [Dense(self._starts[name], gradient.reshape(users, -1)[:count])
                                for name in own if (gradient := gradients[name]) is not None]  # fmt: skip
        updates += [self._piece(name, [use.first(count) for use in uses]) for name, uses in self._notes.uses.items()]
        self._notes = Notes()
        if not updates:
            raise ModuleError("the loss does not depend on the model's trainable parameters: return what it computed")
        lost = ~losses.detach()[:count].isfinite()
        if bool(lost.any()):  # who has such a loss adds nothing: some of torch's gradients at NaN depend on alignment
            updates = [_spoiled(piece, lost) for piece in updates]
        return Updates(updates)

    def _loss_of_one(
        self,
        shared: dict[str, Tensor],
        own: Sequence[str],
        fields: Sequence[str],
        zero: Tensor,
        random_keys: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        """The loss of one user, under vmap: the model sees a batch of one example. `tensors`: own, then fields."""
        named = dict(zip(own, tensors[: len(own)], strict=True)) | shared
        state = {f"model.{name}": param for name, param in named.items()}
        state |= dict(zip(self._keys, random_keys.unbind(0), strict=True))
        for source in self._random_layers:
            source.draws = 0
        batch = {name: field.unsqueeze(0) for name, field in zip(fields, tensors[len(own) :], strict=True)}
        with SharedWeights(named, self.shared, self._notes, zero) as weights, StackSafe() as safe:
            losses: Tensor = functional_call(self._loss, state, (batch,))
        self.seen |= weights.seen
        per_example(losses, 1)  # refuses other shapes; the mean and the sum of one number are that number
        loss: Tensor = safe.spoiled(losses.reshape(()))
        return loss + zero  # batched, also where the loss uses no example

    def _piece(self, name: str, uses: Sequence[Use]) -> Piece:
        """The updates of a shared weight: as factors, unless those take more work than the updates themselves."""
        start, shape = self._starts[name], self._shapes[name]
        if uses[0].kind == "convolution":
            out, channels, height, width = (*shape[:2], *[1] * (4 - len(shape)), *shape[2:])
            values = sum((use.gradients for use in uses[1:]), uses[0].gradients)
            return ChannelsLast(start, values, (out, channels, height, width))
        inputs = _joined([use.inputs for use in uses if use.inputs is not None])
        outputs = _joined([use.gradients for use in uses])
        if uses[0].kind == "embedding":
            return _rows(start, shape[0], inputs, outputs)
        positions, width, height = inputs.shape[1], inputs.shape[2], outputs.shape[2]
        if positions == 1 or _FACTORS_PAY * positions * (width + height) < width * height:
            return FactoredUpdates(start, inputs, outputs)
        return Dense(start, outer_products(outputs, inputs))


def _bits(values: Tensor) -> Tensor:
    """The same memory as whole numbers, among which there is no NaN that differs from itself."""
    return values.view(torch.int32 if values.dtype == torch.float32 else torch.int64)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All positions of a weight's uses."""
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]


def _rows(start: int, height: int, numbers: Tensor, gradients: Tensor) -> Rows:
    """Rows of an embedding, (users, positions) and their gradients, with every row of a user once."""
    if numbers.shape[1] > 1:
        numbers, order = numbers.sort(dim=1, stable=True)
        gradients = gradients.gather(1, order.unsqueeze(2).expand_as(gradients))
        place = torch.zeros_like(numbers)
        place[:, 1:] = (numbers[:, 1:] != numbers[:, :-1]).cumsum(dim=1)
        gradients = torch.zeros_like(gradients).scatter_add_(1, place.unsqueeze(2).expand_as(gradients), gradients)
        numbers = torch.zeros_like(numbers).scatter_(1, place, numbers)
    return Rows(start, height, numbers, gradients)


def _spoiled(piece: Piece, lost: Tensor) -> Piece:
    """The piece with NaN for the users who are lost."""
    if isinstance(piece, FactoredUpdates):
        return FactoredUpdates(piece.start, piece.inputs, _with_nan(piece.outputs, lost))
    if isinstance(piece, Rows):
        return Rows(piece.start, piece.height, piece.places, _with_nan(piece.values, lost))
    if isinstance(piece, ChannelsLast):
        return ChannelsLast(piece.start, _with_nan(piece.values, lost), piece.shape)
    assert isinstance(piece, Dense)
    return Dense(piece.start, _with_nan(piece.values, lost))


def _with_nan(values: Tensor, lost: Tensor) -> Tensor:
    return values.masked_fill(lost.view(-1, *[1] * (values.ndim - 1)), math.nan)
