"""Group normalisation for a stack of users as a single operation, with the ReLU after it.

It reads channels-last pixels as the convolution writes them and writes what the next convolution reads. The compiler
makes a dozen passes of the same, half of them to change between channels first and channels last.

Plain twin: `plain`, the same in torch's operations, which is also what runs off the GPU and without autocast.
Switch: `FastParts.kernels`.
Held equal by: tests/engine/gpu/kernels/test_group_norm.py (needs a GPU).
Buys: cifar100, 100 users on an H200: 124.0 ms a round without, 101.6 with (docs/results/performance.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.vmap_axis import users_first
from .convolution import autocast_dtype

try:
    from . import group_norm_triton as group_norm_kernels
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    group_norm_kernels = None  # type: ignore[assignment]


def normalised(
    values: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, relu: bool = False
) -> Tensor:
    """(batch, channels, ...) -> each group of channels of each example with mean 0 and variance 1, for stacked users.

    In float32; under autocast what passed the ReLU is rounded, as a convolution comes next.
    """
    dtype = autocast_dtype(values)
    if dtype is None or weight is None or bias is None or not _served(values, groups):
        out = plain(values, groups, weight, bias, eps)
        return F.relu(out) if relu else out
    pixels = values.permute(0, 2, 3, 1).contiguous()
    normal: Tensor = group_norm(pixels, weight, bias, groups, eps, relu, dtype if relu else torch.float32)
    return normal.permute(0, 3, 1, 2)


def _served(values: Tensor, groups: int) -> bool:
    channels, places = values.shape[1], values.shape[2:].numel()
    return values.ndim == 4 and group_norm_kernels.serves(channels, groups, places)


def plain(values: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`F.group_norm`, which has no vmap rule, in float32 at least."""
    wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    grouped = wide.reshape(len(values), groups, -1, *values.shape[2:])
    axes = tuple(range(2, grouped.ndim))
    centred = grouped - grouped.mean(dim=axes, keepdim=True)
    normal = centred * (centred.square().mean(dim=axes, keepdim=True) + eps).rsqrt()
    normal = normal.reshape(values.shape)
    if weight is not None and bias is not None:
        along = (-1, *[1] * (values.ndim - 2))
        normal = normal * weight.view(along) + bias.view(along)
    return normal


@torch.library.custom_op("clipline::stacked_group_norm", mutates_args=())
def stacked_group_norm(
    pixels: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(users, batch, height, width, channels) -> the same in `dtype`, and mean and 1 / deviation of every group."""
    pixels, weight, bias = (tensor.contiguous() for tensor in (pixels, weight, bias))
    return group_norm_kernels.norm_forward(pixels, weight, bias, groups, eps, relu, dtype)


@stacked_group_norm.register_fake
def _(
    pixels: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
    means = pixels.new_empty(*pixels.shape[:2], groups, dtype=torch.float32)
    return out, means, torch.empty_like(means)


@torch.library.custom_op("clipline::stacked_group_norm_backward", mutates_args=())
def stacked_group_norm_backward(
    grad: Tensor, pixels: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the pixels, and to weight and bias: (users, 2, channels) float32."""
    grad, pixels, weight, bias = (tensor.contiguous() for tensor in (grad, pixels, weight, bias))
    return group_norm_kernels.norm_backward(grad, pixels, weight, bias, means, scales, relu)


@stacked_group_norm_backward.register_fake
def _(
    grad: Tensor, pixels: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    both = pixels.new_empty(pixels.shape[0], 2, pixels.shape[4], dtype=torch.float32)
    return torch.empty(pixels.shape, dtype=pixels.dtype, device=pixels.device), both


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    pixels, weight, bias, _, _, ctx.relu, _ = inputs
    _, means, scales = output
    ctx.mark_non_differentiable(means, scales)
    ctx.save_for_backward(pixels, weight, bias, means, scales)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _means, _scales):  # type: ignore[no-untyped-def]
    grad_pixels, both = stacked_group_norm_backward(grad.contiguous(), *ctx.saved_tensors, ctx.relu)
    return grad_pixels, both[:, 0], both[:, 1], None, None, None, None


stacked_group_norm.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("clipline::group_norm", mutates_args=())
def group_norm(
    pixels: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, dtype: torch.dtype
) -> Tensor:
    """One user's (batch, height, width, channels); under vmap, `stacked_group_norm`."""
    out = F.group_norm(pixels.permute(0, 3, 1, 2).float(), groups, weight, bias, eps).permute(0, 2, 3, 1)
    return (F.relu(out) if relu else out).to(dtype).contiguous()


@group_norm.register_fake
def _(pixels: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(pixels.shape, dtype=dtype, device=pixels.device)


@group_norm.register_vmap
def _(info, in_dims, pixels, weight, bias, *settings):  # type: ignore[no-untyped-def]
    given = zip(in_dims[:3], (pixels, weight, bias), strict=True)
    return stacked_group_norm(*(users_first(info, dim, tensor) for dim, tensor in given), *settings)[0], 0
