"""Operations of one user on a CPU core with faster backward passes than torch's own.

Plain twin: torch's operation itself (`F.conv2d`, `F.relu`, `values.square().sum()`), used wherever `fits` is false.
Held equal by: tests/engine/cpu/test_autograd_ops.py.
Buys: 719 ms a round instead of 740 (emnist_cr, 6 users), within noise (benchmarks/fast_parts.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stacked.vmap_axis import is_batched


def fits(*tensors: Tensor) -> bool:
    """Whether the fast versions apply: one user on a CPU core, no autocast, no forward-mode derivatives."""
    return (
        all(tensor.device.type == "cpu" for tensor in tensors)
        and not is_batched(*tensors)
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0  # these have no forward-mode rule
    )


def conv(images: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int, padding: int) -> Tensor:
    """`F.conv2d` of channels-last images with weights (filters, size * size * channels), padded on all sides."""
    if fits(images, weight):
        out: Tensor = _Conv.apply(images, weight, bias, size, stride, padding)  # type: ignore[no-untyped-call]
        return out
    return F.conv2d(images, _kernel(weight, size), bias, stride, padding)


def relu(values: Tensor) -> Tensor:
    """`F.relu`, in place where autograd allows it. The caller must not use the values for anything else."""
    return F.relu_(values) if fits(values) and values.requires_grad and not values.is_leaf else F.relu(values)


def sum_of_squares(values: Tensor) -> Tensor:
    """`values.square().sum()`, whose backward pass reads and writes the values once."""
    if fits(values):
        total: Tensor = _SumOfSquares.apply(values)  # type: ignore[no-untyped-call]
        return total
    return values.square().sum()


def _kernel(weight: Tensor, size: int) -> Tensor:
    """(filters, channels, size, size), a channels-last view of the weights."""
    return weight.view(len(weight), size, size, -1).permute(0, 3, 1, 2)


class _Conv(torch.autograd.Function):
    """torch's convolution, except for the bias gradient: torch's takes ten times as long as a plain sum."""

    @staticmethod
    def forward(
        ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int, padding: int
    ) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.size, ctx.stride, ctx.padding = size, stride, padding
        return F.conv2d(images, _kernel(weight, size), bias, stride, padding)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        needs_images, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous(memory_format=torch.channels_last)
        shape = (
            [ctx.stride] * 2,
            [ctx.padding] * 2,
            [1, 1],
            False,
            [0, 0],
            1,
        )  # then dilation, transposed, output padding, groups
        wanted = [needs_images, needs_weight, False]
        grad_images, grad_kernel, _ = torch.ops.aten.convolution_backward(
            grad, images, _kernel(weight, ctx.size), None, *shape, wanted
        )
        grad_weight = grad_kernel.permute(0, 2, 3, 1).reshape(weight.shape) if needs_weight else None
        return grad_images, grad_weight, grad.sum(dim=(0, 2, 3)) if needs_bias else None, None, None, None


class _SumOfSquares(torch.autograd.Function):
    """Sum of squares as one dot product. torch's own backward pass writes three tensors of the size of the input."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        row = values.reshape(-1)
        return row.dot(row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (values,) = ctx.saved_tensors
        gradient: Tensor = values * (2 * grad)
        return gradient
