"""SGD on a weight that is multiplied by sparse rows, without ever writing to the weight: the steps are recorded.

The gradient of X W with respect to W is X^T G, with G the gradient of the product. So after some steps a user's weight
is W minus lr times the sum of X^T G, and it is enough to keep X (a few features a row) and G (one row an example). W is
read where it is, shared by all users of a round.

Plain twin: SGD on the small matrix of the user's own rows (`row_fields.py`), used for weights and users for whom the
weight is used in any other way than through `bag`.
Switch: `FastParts.recorded_weights`.
Held equal by: tests/engine/core/test_recorded_weight.py.
Buys, with outer_products.py: 88 ms a round instead of 181 (so_lr, 20 users; benchmarks/fast_parts.py, 2026-11-16).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...errors import ModuleError
from .outer_products import SparseOuterProducts, UpdatedWeight

_MAX_PARTS = 32  # of a record: more are concatenated, as every step goes through all of them
_MAX_TERMS_PER_ROW = 2  # on average over the rows of the weight: more are coalesced to one a row


def bag(features: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """Features (batch, width), weight (height, out), values (batch, width) -> (batch, out): sums of values times rows.

    As `F.embedding_bag` with `per_sample_weights`. An entry with value 0 is padding, whatever its feature; features
    beyond the last row are allowed only there. A layer that uses its weight through this function alone trains faster
    where `row_fields` names the weight.
    """
    if features.shape != values.shape or features.ndim != 2:
        raise ModuleError(
            f"features of shape {tuple(features.shape)} and values of shape {tuple(values.shape)} must both be (batch, "
            "width): give every feature its value"
        )
    if isinstance(weight, RecordedWeight) and len(weight) and not values.requires_grad:
        return weight.record.sparse_product(features, values)
    columns = (values != 0).any(dim=0).nonzero()
    used = int(columns[-1]) + 1 if len(columns) else 1  # drop columns that are all padding: they cost as much as others
    index = features[:, :used].long().clamp(max=len(weight) - 1)
    return F.embedding_bag(index, weight, per_sample_weights=values[:, :used], mode="sum")


class UnsupportedUse(Exception):
    """A recorded weight was about to be used in another way than through `bag`."""


class RecordedWeight(Tensor):
    """A stand-in for a weight that records its products through `bag`. Any other use is refused and marks the record.

    It has shape and type but no memory: the real weight is shared by all users, and writing to it would leak a user's
    data. Calls that bypass `__torch_function__`, as in scripted functions, arrive at `__torch_dispatch__`.
    """

    record: StepRecord

    @staticmethod
    def of(weight: Tensor, record: StepRecord) -> RecordedWeight:
        """The stand-in for `weight`."""
        noted: RecordedWeight = Tensor._make_wrapper_subclass(
            RecordedWeight, weight.shape, dtype=weight.dtype, device=weight.device
        )
        noted.record = record
        return noted

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RecordedWeight{tuple(self.shape)}"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Allow queries of shape and type only. Everything else makes the record incomplete and is refused."""
        if func not in _ALLOWED:
            _refuse(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse calls that bypass `__torch_function__`."""
        _refuse(args, kwargs)


def _refuse(*arguments: Any) -> NoReturn:
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, RecordedWeight):
            tensor.record.complete = False
    raise UnsupportedUse


_ALLOWED_PROPERTIES: tuple[Any, ...] = (Tensor.device, Tensor.dtype, Tensor.is_cuda, Tensor.ndim, Tensor.shape)
_ALLOWED = frozenset(
    {
        Tensor.__len__,
        Tensor.dim,
        Tensor.is_floating_point,
        Tensor.numel,
        Tensor.size,
        *(attribute.__get__ for attribute in _ALLOWED_PROPERTIES),
    }
)


class StepRecord:
    """One user's SGD steps at rate `lr` on `weight` (height, out), which is not written to: PRIVATE.

    Give `stand_in()` to the model instead of the weight. After a loss has been computed, pass the gradients of
    `products()` to `step`. If `complete` is false, the weight was about to be used in another way than through `bag`,
    and the record misses that.
    """

    def __init__(self, weight: Tensor, lr: float) -> None:
        self._weight = weight.detach()
        self._lr = lr
        # Products of this step's forward pass; the table is the product itself.
        self._forward: list[SparseOuterProducts] = []
        self._backward: list[SparseOuterProducts] = []  # the same, once the backward pass has begun
        self._steps: list[SparseOuterProducts] = []  # the change by all steps so far
        self._current: UpdatedWeight | None = None  # the weight after the steps so far
        self.complete = True

    def stand_in(self) -> RecordedWeight:
        """A stand-in for the weight. Not stored here: a reference cycle would keep it alive after the user."""
        return RecordedWeight.of(self._weight, self)

    def sparse_product(self, features: Tensor, values: Tensor) -> Tensor:
        """`bag` with the weight after the steps so far."""
        with torch.no_grad():
            if self._current is None:
                self._current = UpdatedWeight(self._weight, self._steps)
            product, terms = self._current.sparse_product(features.long(), values.to(self._weight.dtype))
        if torch.is_grad_enabled():
            product.requires_grad_()
            self._forward.append(
                SparseOuterProducts(terms.numbers, terms.sources, terms.factors.mul_(-self._lr), product)
            )
            return product.clone()  # a leaf must not be changed in place, the clone may
        return product

    def products(self) -> list[Tensor]:
        """The products since the last step. Those between this call and `step` are recomputations and do not count."""
        self._backward, self._forward = self._forward, []
        return [product.table for product in self._backward]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One SGD step from the gradients of `products()`; None for a product that the loss does not use."""
        for product, gradient in zip(self._backward, gradients, strict=True):
            if gradient is not None:
                self._steps.append(
                    SparseOuterProducts(product.numbers, product.sources, product.factors, gradient.contiguous())
                )
                self._current = None
        self._forward, self._backward = [], []
        if len(self._steps) > _MAX_PARTS:
            self._steps = [SparseOuterProducts.joined(self._steps)]
        if sum(len(part.numbers) for part in self._steps) > _MAX_TERMS_PER_ROW * len(self._weight):
            self._steps = [SparseOuterProducts.joined(self._steps).added_up()]

    def terms(self) -> list[SparseOuterProducts]:
        """The change of the weight by all steps, in one or more parts."""
        return self._steps or [SparseOuterProducts.none(self._weight)]
