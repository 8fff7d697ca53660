"""Dense layers of one user on a processor core: gradients that are never formed, and the faster of two products.

The gradient of a dense layer's weights is a product, (out, rows) by (rows, in). To write a large one, read it again and
subtract it takes a processor core longer than the product does: a step of SGD adds the product to the weights itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 1 << 14  # numbers in a matrix: of smaller ones the cache holds the gradient
_LARGER = 1 << 18  # from here on oneDNN multiplies by a matrix faster than torch's BLAS: 1.2 to 1.7 times


class FusedLinearStep:
    """The two factors of each gradient of some of `params` (matrices): PRIVATE, and gone when the step is taken.

    They are kept only inside `collecting`, that is by the backward pass of a step. Whatever else autograd finds for the
    same matrix, from a penalty say, it gives as always, and both count.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._own = {id(param) for param in params}
        self._kept: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self._pass = -1  # torch's number of the backward pass whose factors are wanted

    def serve(self, values: Tensor, weight: Tensor) -> bool:
        """Whether `linear` is the way to go: `weight` (out, in) is large and one of ours, not put in its place."""
        return (
            weight.numel() >= _LARGE
            and id(weight) in self._own
            and not torch.is_autocast_enabled(values.device.type)
            and torch.autograd.forward_ad._current_level < 0  # `linear` has no rule for forward derivatives
        )

    def linear(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`."""
        out: Tensor = _Linear.apply(values, weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    @contextmanager
    def collecting(self, loss: Tensor) -> Iterator[None]:
        """Inside, the backward pass of `loss` leaves factors in the place of gradients; afterwards they are forgotten.

        A pass within that pass, as of a layer that solves an equation, asks for gradients and gets them.
        """

        def begin(_: Tensor) -> None:
            self._pass = torch._C._current_graph_task_id()

        self._kept, self._pass = [], -1
        hook = loss.register_hook(begin)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            hook.remove()
            self._kept = None

    def keep(self, weight: Tensor, grad: Tensor, values: Tensor) -> bool:
        """Take grad (rows, out) and values (rows, in), if they are wanted now and smaller than the gradient.

        Not where a hook on the weights waits for the gradient; nor a copy of the weights, or what moves with them.
        """
        if self._kept is None or self._pass != torch._C._current_graph_task_id() or id(weight) not in self._own:
            return False
        if weight._backward_hooks or grad.numel() + values.numel() > weight.numel():
            return False
        vector = weight.untyped_storage().data_ptr()  # of all parameters: they move before the factors are used
        if vector in (values.untyped_storage().data_ptr(), grad.untyped_storage().data_ptr()):
            return False
        self._kept.append((weight, grad, values))
        return True

    def subtract(self, lr: float) -> None:
        """Move every matrix by -lr times its gradient."""
        for weight, grad, values in self._kept or ():
            weight.addmm_(grad.t(), values, alpha=-lr)


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward pass hands the factors of the weights' gradient over where they are wanted."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, factors: FusedLinearStep) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.factors = factors
        out = product(values.reshape(-1, values.shape[-1]), weight, bias)
        # A view could not be changed in place by what follows.
        return out if values.ndim == 2 else torch.ops.aten._unsafe_view(out, [*values.shape[:-1], len(weight)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        for_values, for_weight, for_bias, _ = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), values.reshape(-1, values.shape[-1])
        of_weight = rows.t() @ inputs if for_weight and not ctx.factors.keep(weight, rows, inputs) else None
        of_values = product(rows, weight.t()).view_as(values) if for_values else None
        return of_values, of_weight, rows.sum(dim=0) if for_bias else None, None


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of (rows, in), (out, in) and (out,) or nothing; for large matrices of float32 by oneDNN's kernel."""
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # torch's compiler uses it; torch itself does not
    if (
        onednn is None
        or torch.is_grad_enabled()  # a second derivative may be wanted, for which it has no rule
        or weight.numel() < _LARGER
        or not rows.numel()
        or rows.dtype != torch.float32
        or rows.device.type != "cpu"
        or not torch.backends.mkldnn.enabled
    ):
        return F.linear(rows, weight, bias)
    out: Tensor = onednn(rows, weight, bias, "none", [], "")
    return out
