"""Sparse rows times a weight, and what steps of SGD change in that weight, without ever moving it.

The gradient of X W is X^T G, with G the gradient of the product. So after some steps a user's weight is W less lr times
the sum of X^T G, and X (a few features a row) and G (one row an example) are all that has to be kept. W is read where
it lies, the same for all users of a round.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...errors import ModuleError
from .outer_products import Moved, SparseOuterProducts, moved

_PARTS = 32  # of a ledger's terms: more are joined, as every step looks at all of them
_DENSE = 2  # terms for each row of the weight, beyond which they are added up to one


def bag(features: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """(batch, width) whole numbers, (height, out) and (batch, width) values -> (batch, out): sums of values times rows.

    A place with value 0 is padding, whatever its number; numbers beyond the last row are allowed only there. A layer
    that uses its weight through this function alone trains faster where `row_fields` names the weight.
    """
    if features.shape != values.shape or features.ndim != 2:
        raise ModuleError(
            f"features of shape {tuple(features.shape)} and values of shape {tuple(values.shape)} must both be (batch, "
            "width): give every feature its value"
        )
    if isinstance(weight, RecordedWeight) and len(weight) and not values.requires_grad:
        return weight.ledger.product(features, values)
    columns = (values != 0).any(dim=0).nonzero()
    used = int(columns[-1]) + 1 if len(columns) else 1  # columns of padding alone cost like others
    places = features[:, :used].long().clamp(max=len(weight) - 1)
    return F.embedding_bag(places, weight, per_sample_weights=values[:, :used], mode="sum")


class UsedOtherwise(Exception):
    """A noted weight was to be used otherwise than through `bag`."""


class RecordedWeight(Tensor):
    """A weight with a ledger of its products; anything else that is to be done with it is refused, and noted too.

    It has a shape and a type but no memory: the weight that it stands for is that of all users, and what could write
    into it would let a user's data out. What passes `__torch_function__` by, as scripted functions do, arrives at
    `__torch_dispatch__`.
    """

    ledger: StepRecord

    @staticmethod
    def of(weight: Tensor, ledger: StepRecord) -> RecordedWeight:
        """In the place of `weight`."""
        noted: RecordedWeight = Tensor._make_wrapper_subclass(
            RecordedWeight, weight.shape, dtype=weight.dtype, device=weight.device
        )
        noted.ledger = ledger
        return noted

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Noted{tuple(self.shape)}"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions of shape and type alone. All else makes the ledger incomplete and is not done."""
        if func not in _QUESTIONS:
            _refuse(args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The same for what does not ask `__torch_function__`."""
        _refuse(args, kwargs)


def _refuse(*arguments: Any) -> NoReturn:
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, RecordedWeight):
            tensor.ledger.complete = False
    raise UsedOtherwise


_ASKED: tuple[Any, ...] = (Tensor.device, Tensor.dtype, Tensor.is_cuda, Tensor.ndim, Tensor.shape)
_QUESTIONS = frozenset(
    {Tensor.__len__, Tensor.dim, Tensor.is_floating_point, Tensor.numel, Tensor.size, *(one.__get__ for one in _ASKED)}
)


class StepRecord:
    """One user's steps of SGD at rate `lr` on `weight`, (height, out), which stays as it is: PRIVATE.

    Hand `noted()` to the model in the weight's place. After a loss has been computed, `products()` are the tensors
    whose gradients `step` wants. Where `complete` is false the weight was to be used otherwise than through `bag`, and
    what the ledger says is not all.
    """

    def __init__(self, weight: Tensor, lr: float, library: ctypes.CDLL | None = None) -> None:
        self._weight = weight.detach()
        self._lr = lr
        self._library = library  # of terms.c, if that is to be used
        self._open: list[SparseOuterProducts] = []  # of the step that is being taken: the table is the product itself
        self._ending: list[SparseOuterProducts] = []  # the same once its gradients are being computed
        self._taken: list[SparseOuterProducts] = []
        self._now: Moved | None = None  # the weight after the steps that were taken
        self.complete = True

    def noted(self) -> RecordedWeight:
        """What stands for the weight. Not kept here: a circle of references would outlive the user."""
        return RecordedWeight.of(self._weight, self)

    def product(self, features: Tensor, values: Tensor) -> Tensor:
        """`bag` with the weight after the steps so far."""
        with torch.no_grad():
            if self._now is None:
                self._now = moved(self._weight, self._taken, self._library)
            product, terms = self._now.product(features.long(), values.to(self._weight.dtype))
        if torch.is_grad_enabled():
            product.requires_grad_()
            self._open.append(SparseOuterProducts(terms.numbers, terms.sources, terms.factors.mul_(-self._lr), product))
            return product.clone()  # which may be changed in place, and a leaf may not
        return product

    def products(self) -> list[Tensor]:
        """Those since the last step. What is multiplied from now until `step` is a repetition and does not count."""
        self._ending, self._open = self._open, []
        return [product.table for product in self._ending]

    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One step of SGD, from the gradients of `products`; None where the loss does not use one."""
        for product, gradient in zip(self._ending, gradients, strict=True):
            if gradient is not None:
                self._taken.append(
                    SparseOuterProducts(product.numbers, product.sources, product.factors, gradient.contiguous())
                )
                self._now = None
        self._open, self._ending = [], []
        if len(self._taken) > _PARTS:
            self._taken = [SparseOuterProducts.joined(self._taken)]
        if sum(len(part.numbers) for part in self._taken) > _DENSE * len(self._weight):
            self._taken = [SparseOuterProducts.joined(self._taken).added_up()]

    def terms(self) -> list[SparseOuterProducts]:
        """All that the steps have changed in the weight, in parts; at least one."""
        return self._taken or [SparseOuterProducts.none(self._weight)]
