"""Dense layers of one user on a CPU core: the SGD step is fused with the weight gradient, which is never stored.

The gradient of a dense layer's weights is a matrix product, (out, rows) by (rows, in). To write a large gradient,
read it again and subtract it takes a core longer than the product. So the backward pass keeps the two factors,
and the step adds their product to the weights with one `addmm_`. Large products use oneDNN's kernel (`product`), which
is 1.2 to 1.7 times as fast as torch's BLAS.

Plain twin: `F.linear` with torch's gradient, used wherever `serve` or `record` says no.
Switch: `FastParts.fused_linear`.
Held equal by: tests/engine/cpu/test_fused_linear.py.
Buys: TO BE MEASURED (benchmarks/fast_parts.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGE = 1 << 14  # weights: the gradient of a smaller matrix stays in the cache
_MIN_ONEDNN = 1 << 18  # weights: from here on oneDNN is faster than torch's BLAS


class FusedLinearStep:
    """The two factors of the weight gradients of some matrices among `params`: PRIVATE, dropped when the step is done.

    They are recorded only inside `collecting`, that is by the backward pass of a step. Other gradients of the same
    matrix, from a penalty for instance, come from autograd as usual, and the step uses both.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._param_ids = {id(param) for param in params}
        self._kept: list[tuple[Tensor, Tensor, Tensor]] | None = None
        self._graph_task = -1  # torch's id of the backward pass whose factors are recorded

    def serve(self, values: Tensor, weight: Tensor) -> bool:
        """Whether to use `linear`: `weight` (out, in) is large and one of our parameters, not a substitute for it."""
        return (
            weight.numel() >= _LARGE
            and id(weight) in self._param_ids
            and not torch.is_autocast_enabled(values.device.type)
            and torch.autograd.forward_ad._current_level < 0  # `linear` has no forward-mode rule
        )

    def linear(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`F.linear`, with the fused weight gradient."""
        out: Tensor = _Linear.apply(values, weight, bias, self)  # type: ignore[no-untyped-call]
        return out

    @contextmanager
    def collecting(self, loss: Tensor) -> Iterator[None]:
        """Within, the backward pass of `loss` records factors instead of weight gradients; on leaving they are dropped.

        A nested backward pass (a layer that solves an equation, say) gets ordinary gradients.
        """

        def note_graph_task(_: Tensor) -> None:
            self._graph_task = torch._C._current_graph_task_id()

        self._kept, self._graph_task = [], -1
        hook = loss.register_hook(note_graph_task)  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            hook.remove()
            self._kept = None

    def record(self, weight: Tensor, grad: Tensor, values: Tensor) -> bool:
        """Record grad (rows, out) and values (rows, in) and say so; False where the gradient has to be formed.

        Recorded only within `collecting`, for our own parameters, if the factors are smaller than the gradient and no
        hook on the weights waits for it. A factor that shares memory with the parameters is not recorded either.
        """
        if (
            self._kept is None
            or self._graph_task != torch._C._current_graph_task_id()
            or id(weight) not in self._param_ids
        ):
            return False
        if weight._backward_hooks or grad.numel() + values.numel() > weight.numel():
            return False
        vector = (
            weight.untyped_storage().data_ptr()
        )  # of all parameters: they move before the factors are used, so a view would have changed by then
        if vector in (values.untyped_storage().data_ptr(), grad.untyped_storage().data_ptr()):
            return False
        self._kept.append((weight, grad, values))
        return True

    def subtract(self, lr: float) -> None:
        """The SGD step: add -lr times its gradient to every recorded matrix."""
        for weight, grad, values in self._kept or ():
            weight.addmm_(grad.t(), values, alpha=-lr)


class _Linear(torch.autograd.Function):
    """`F.linear`, whose backward pass hands the factors of the weight gradient to a `FusedLinearStep`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, bias: Tensor | None, factors: FusedLinearStep) -> Tensor:
        ctx.save_for_backward(values, weight)
        ctx.factors = factors
        out = product(values.reshape(-1, values.shape[-1]), weight, bias)
        # Not `view`: autograd forbids in-place changes of a view that a custom function returns.
        return out if values.ndim == 2 else torch.ops.aten._unsafe_view(out, [*values.shape[:-1], len(weight)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        needs_values, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), values.reshape(-1, values.shape[-1])
        grad_weight = rows.t() @ inputs if needs_weight and not ctx.factors.record(weight, rows, inputs) else None
        grad_values = product(rows, weight.t()).view_as(values) if needs_values else None
        return grad_values, grad_weight, rows.sum(dim=0) if needs_bias else None, None


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of rows (rows, in), weight (out, in) and bias (out,) or None; by oneDNN for large float32 ones."""
    onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # used by torch's compiler, not by eager torch
    if (
        onednn is None
        or torch.is_grad_enabled()  # it has no rule for second derivatives
        or weight.numel() < _MIN_ONEDNN
        or not rows.numel()
        or rows.dtype != torch.float32
        or rows.device.type != "cpu"
        or not torch.backends.mkldnn.enabled
    ):
        return F.linear(rows, weight, bias)
    out: Tensor = onednn(rows, weight, bias, "none", [], "")
    return out
