"""Sparse rows times a weight, and what steps of SGD change in that weight, without ever moving it.

The gradient of X W is X^T G, with G the gradient of the product. So after some steps a user's weight is W less lr times
the sum of X^T G, and X (a few features a row) and G (one row an example) are all that has to be kept. W is read where
it lies, the same for all users of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_DENSE = 4  # terms for each row of the weight, beyond which they are added up to one


def bag(features: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """(batch, width) whole numbers, (height, out) and (batch, width) values -> (batch, out): sums of values times rows.

    A layer that uses its weight through this function alone trains faster where `row_fields` names the weight. There a
    value of 0 is skipped, whatever the row.
    """
    if isinstance(weight, Noted) and not values.requires_grad:
        return weight.ledger.product(features, values)
    return F.embedding_bag(features, weight, per_sample_weights=values, mode="sum")


class Noted(Tensor):
    """A weight with a ledger of its products; the ledger learns too when anything else is done with it."""

    ledger: Ledger

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` gives for plain tensors. Anything but questions of shape and type makes the ledger incomplete."""
        if func not in _QUESTIONS:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, Noted):
                    tensor.ledger.complete = False
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_ASKED: tuple[Any, ...] = (Tensor.device, Tensor.dtype, Tensor.is_cuda, Tensor.ndim, Tensor.shape)
_QUESTIONS = frozenset(
    {Tensor.__len__, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.size, *(one.__get__ for one in _ASKED)}
)


@dataclass(frozen=True, eq=False)
class Terms:
    """A matrix as a sum: row numbers[i] has factors[i] times row sources[i] of the table, and so on for every i."""

    numbers: Tensor  # (terms,) int64
    sources: Tensor  # (terms,) int64
    factors: Tensor  # (terms,)
    table: Tensor  # (any, out)

    @staticmethod
    def joined(parts: Sequence[Terms]) -> Terms:
        """The sum of several; at least one."""
        if len(parts) == 1:
            return parts[0]
        starts = torch.tensor([0, *(len(part.table) for part in parts[:-1])]).cumsum(dim=0).tolist()
        return Terms(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.sources + start for part, start in zip(parts, starts, strict=True)]),
            torch.cat([part.factors for part in parts]),
            torch.cat([part.table for part in parts]),
        )

    def in_order(self) -> tuple[Tensor, Tensor, Terms]:
        """Rows, ascending; where the terms of each begin, and at last where they end; the terms in that order."""
        numbers, order = self.numbers.sort(stable=True)
        rows, counts = torch.unique_consecutive(numbers, return_counts=True)
        starts = F.pad(counts.cumsum(dim=0), (1, 0))
        return rows, starts, Terms(numbers, self.sources[order], self.factors[order], self.table)

    def rows(self, starts: Tensor) -> Tensor:
        """(starts, out): the sum of the terms from each start to the next, of the last to the end."""
        return F.embedding_bag(self.sources, self.table, starts, per_sample_weights=self.factors, mode="sum")


class Ledger:
    """One user's steps of SGD at rate `lr` on `weight`, (height, out), which stays as it is: PRIVATE.

    Hand `noted()` to the model in the weight's place. After a loss has been computed, `products` are the tensors whose
    gradients `step` wants. Where `complete` is false the weight was used otherwise than through `bag`, and what the
    ledger says is not all.
    """

    def __init__(self, weight: Tensor, lr: float) -> None:
        self._weight = weight.detach()
        self._lr = lr
        self._open: list[Terms] = []  # of the step that is being taken: the table is the product itself
        self._taken: list[Terms] = []
        self._so_far: tuple[Tensor, Tensor] | None = None
        self.complete = True

    def noted(self) -> Noted:
        """The weight where it lies. Not kept here: a circle of references would outlive the user."""
        weight = self._weight.as_subclass(Noted)
        weight.ledger = self
        return weight

    def product(self, features: Tensor, values: Tensor) -> Tensor:
        """`bag` with the weight after the steps so far."""
        with torch.no_grad():
            kept = values != 0
            places = kept.flatten().nonzero().squeeze(1)
            numbers, factors = features.flatten()[places], values.flatten()[places]
            counts = kept.sum(dim=1)
            starts = counts.cumsum(dim=0).sub_(counts)
            product = Terms(numbers, numbers, factors, self._weight).rows(starts)
            if self._taken:
                where, change = self._change()
                product += Terms(numbers, where[numbers], factors, change).rows(starts)
        if torch.is_grad_enabled():
            product.requires_grad_()
            sources = places.div(max(1, features.shape[1]), rounding_mode="floor")
            self._open.append(Terms(numbers, sources, factors * -self._lr, product))
        return product

    @property
    def products(self) -> list[Tensor]:
        """The products since the last step."""
        return [product.table for product in self._open]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of SGD, from the gradients of `products`; None where the loss does not use one."""
        for product, gradient in zip(self._open, gradients, strict=True):
            if gradient is not None:
                self._taken.append(replace(product, table=gradient.contiguous()))
                self._so_far = None
        self._open = []

    def terms(self) -> Terms:
        """All that the steps have changed in the weight."""
        if self._taken:
            return Terms.joined(self._taken)
        none = torch.empty(0, dtype=torch.int64)
        return Terms(none, none, self._weight.new_empty(0), self._weight.new_zeros(1, self._weight.shape[1]))

    def _change(self) -> tuple[Tensor, Tensor]:
        """Where each row of the weight stands among those that have moved, (height,), and by how much they did.

        The last row of the second is 0, and there stand all those that have not.
        """
        if self._so_far is None:
            rows, starts, terms = self.terms().in_order()
            change = terms.rows(starts)
            where = torch.full((len(self._weight),), len(rows))
            places = torch.arange(len(rows))
            where[rows] = places
            self._so_far = where, change
            if len(terms.numbers) > _DENSE * len(rows):
                self._taken = [Terms(rows, places, change.new_ones(len(rows)), change)]
        return self._so_far
