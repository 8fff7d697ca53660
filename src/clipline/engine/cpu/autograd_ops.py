"""Operations of one user on a processor core, whose gradients torch computes in a slower way than it could."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stacked.stacks import stacked


def fits(*tensors: Tensor) -> bool:
    """Whether these belong to one user, on a processor core, with nothing asked but gradients and no other type."""
    return (
        all(tensor.device.type == "cpu" for tensor in tensors)
        and not stacked(*tensors)
        and not torch.is_autocast_enabled("cpu")
        and torch.autograd.forward_ad._current_level < 0  # these have no rule for forward derivatives
    )


def conv(images: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int, padding: int) -> Tensor:
    """`F.conv2d` by weights (filters, size * size * channels) of channels-last images, padded on all sides."""
    if fits(images, weight):
        out: Tensor = _Conv.apply(images, weight, bias, size, stride, padding)  # type: ignore[no-untyped-call]
        return out
    return F.conv2d(images, _kernel(weight, size), bias, stride, padding)


def relu(values: Tensor) -> Tensor:
    """`F.relu`, in place where nobody can tell: the values must be used for nothing else."""
    return F.relu_(values) if fits(values) and values.requires_grad and not values.is_leaf else F.relu(values)


def sum_of_squares(values: Tensor) -> Tensor:
    """`values.square().sum()`; its gradient is read and written once."""
    if fits(values):
        total: Tensor = _SumOfSquares.apply(values)  # type: ignore[no-untyped-call]
        return total
    return values.square().sum()


def _kernel(weight: Tensor, size: int) -> Tensor:
    """(filters, channels, size, size), channels last in memory as the weights are."""
    return weight.view(len(weight), size, size, -1).permute(0, 3, 1, 2)


class _Conv(torch.autograd.Function):
    """The library's convolution; but its gradient of a bias takes ten times as long as a sum does."""

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
        for_images, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous(memory_format=torch.channels_last)
        shape = ([ctx.stride] * 2, [ctx.padding] * 2, [1, 1], False, [0, 0], 1)  # the rest: no dilation, one group
        wanted = [for_images, for_weight, False]
        of_images, of_kernel, _ = torch.ops.aten.convolution_backward(
            grad, images, _kernel(weight, ctx.size), None, *shape, wanted
        )
        of_weight = of_kernel.permute(0, 2, 3, 1).reshape(weight.shape) if for_weight else None
        return of_images, of_weight, grad.sum(dim=(0, 2, 3)) if for_bias else None, None, None, None


class _SumOfSquares(torch.autograd.Function):
    """Torch's own gradient of a square writes three tensors of the size of the first."""

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
