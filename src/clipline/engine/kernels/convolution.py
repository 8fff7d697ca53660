"""Convolution and pooling for a stack of users as single operations, each user with their own weights.

They are custom ops ("clipline::...") so that `torch.func.vmap` and `torch.compile` treat each as one operation. The
convolution kernel never writes its patches to memory.

Plain twin: `patches` times a matrix (the body of `conv`, and `convolved` off the GPU), and `F.max_pool2d` for pooling.
Held equal by: tests/engine/kernels/test_convolution.py (needs a GPU).
Buys: pooling as one operation, emnist_cr on an H200: 30 ms a round before, 22 after (docs/results/performance.md).
Both together: 35.0 ms without, 17.1 with, on the code of today.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stacked.vmap_axis import users_first

try:
    from . import convolution_triton as convolution_kernels
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    convolution_kernels = None  # type: ignore[assignment]


def fused(tensor: Tensor) -> bool:
    """Whether there is a kernel for this device and type."""
    return tensor.device.type == "cuda" and tensor.dtype != torch.float64 and convolution_kernels is not None


def out_side(side: int, size: int, stride: int) -> int:
    """Output height or width of a convolution without padding."""
    return (side - size) // stride + 1


def patches(pixels: Tensor, size: int, stride: int) -> Tensor:
    """(..., height, width, channels) -> (..., out height, out width, size * size * channels)."""
    height, width = (out_side(side, size, stride) for side in pixels.shape[-3:-1])
    # Slices, not `unfold`: the backward pass of a slice is an addition, that of unfold a slow scatter.
    return torch.cat(
        [
            pixels[..., i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride, :]
            for i in range(size)
            for j in range(size)
        ],
        dim=-1,
    )


def convolved(images: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int) -> Tensor:
    """(batch, channels, height, width) by (filters, size * size * channels), without padding, for stacked users."""
    pixels = images.permute(0, 2, 3, 1)
    if not (torch.is_autocast_enabled("cuda") and fused(images)):  # in float32 patches times cuBLAS are faster
        return F.linear(patches(pixels, size, stride), weight, bias).permute(0, 3, 1, 2)
    # Laid out here and not in the operation: the compiler lets the pass write it so that makes the pixels.
    pixels = pixels.to(torch.get_autocast_dtype("cuda")).contiguous()
    out: Tensor = conv(pixels, weight, bias, size, stride)
    return out.permute(0, 3, 1, 2)


@torch.library.custom_op("clipline::stacked_conv", mutates_args=())
def stacked_conv(pixels: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int) -> Tensor:
    """(users, batch, height, width, channels) by (users, filters, size * size * channels) float32 weights.

    Computed in the type of `pixels`.
    """
    bias = None if bias is None else bias.contiguous()
    return convolution_kernels.conv_forward(pixels.contiguous(), weight.contiguous(), bias, size, stride)


@stacked_conv.register_fake
def _(pixels: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int) -> Tensor:
    users, batch, height, width, _ = pixels.shape
    return pixels.new_empty(
        users, batch, out_side(height, size, stride), out_side(width, size, stride), weight.shape[1]
    )


@torch.library.custom_op("clipline::stacked_conv_pixels", mutates_args=())
def stacked_conv_pixels(grad: Tensor, weight: Tensor, height: int, width: int, size: int, stride: int) -> Tensor:
    """Gradient with respect to the pixels."""
    return convolution_kernels.conv_pixels(grad.contiguous(), weight.contiguous(), height, width, size, stride)


@stacked_conv_pixels.register_fake
def _(grad: Tensor, weight: Tensor, height: int, width: int, size: int, stride: int) -> Tensor:
    return grad.new_empty(*grad.shape[:2], height, width, weight.shape[2] // (size * size))


@torch.library.custom_op("clipline::stacked_conv_weight", mutates_args=())
def stacked_conv_weight(grad: Tensor, pixels: Tensor, size: int, stride: int, biased: bool) -> Tensor:
    """Gradients with respect to the weights, followed by the bias: (users, filters * (depth + 1)) float32."""
    return convolution_kernels.conv_weight(grad.contiguous(), pixels.contiguous(), size, stride, biased)


@stacked_conv_weight.register_fake
def _(grad: Tensor, pixels: Tensor, size: int, stride: int, biased: bool) -> Tensor:
    shape = (grad.shape[0], grad.shape[4] * (size * size * pixels.shape[4] + biased))
    return torch.empty(shape, dtype=torch.float32, device=grad.device)


def _conv_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    pixels, weight, _, ctx.size, ctx.stride = inputs
    ctx.save_for_backward(pixels, weight)


def _conv_backward(ctx, grad):  # type: ignore[no-untyped-def]
    pixels, weight = ctx.saved_tensors
    grad = grad.contiguous()  # here, as in `convolved`
    grad_pixels = grad_weight = grad_bias = None
    if ctx.needs_input_grad[0]:
        height, width = pixels.shape[2:4]
        grad_pixels = stacked_conv_pixels(grad, weight, height, width, ctx.size, ctx.stride)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        filters, depth = weight.shape[1:]
        both = stacked_conv_weight(grad, pixels, ctx.size, ctx.stride, ctx.needs_input_grad[2])
        grad_weight = both[:, : filters * depth].unflatten(1, (filters, depth))
        grad_bias = both[:, filters * depth :] if ctx.needs_input_grad[2] else None
    return grad_pixels, grad_weight, grad_bias, None, None


stacked_conv.register_autograd(_conv_backward, setup_context=_conv_setup)


@torch.library.custom_op("clipline::conv", mutates_args=())
def conv(pixels: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int) -> Tensor:
    """One user's convolution of (batch, height, width, channels); under vmap, `stacked_conv`."""
    bias = None if bias is None else bias.to(pixels.dtype)
    return F.linear(patches(pixels, size, stride), weight.to(pixels.dtype), bias)


@conv.register_fake
def _(pixels: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int) -> Tensor:
    batch, height, width, _ = pixels.shape
    return pixels.new_empty(batch, out_side(height, size, stride), out_side(width, size, stride), weight.shape[0])


@conv.register_vmap
def _(info, in_dims, pixels, weight, bias, size, stride):  # type: ignore[no-untyped-def]
    pixels = users_first(info, in_dims[0], pixels)
    weight = users_first(info, in_dims[1], weight)
    bias = None if bias is None else users_first(info, in_dims[2], bias)
    return stacked_conv(pixels, weight, bias, size, stride), 0


@torch.library.custom_op("clipline::pool", mutates_args=())
def pool(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """2 x 2 max pooling of (..., height, width, channels): the maxima, and the index of each within its window, 0 to 3.

    Of equal values the first counts, row by row.
    """
    return convolution_kernels.pool_forward(pixels.contiguous())


@pool.register_fake
def _(pixels: Tensor) -> tuple[Tensor, Tensor]:
    *batch, height, width, channels = pixels.shape
    out = pixels.new_empty(*batch, height // 2, width // 2, channels)
    return out, torch.empty_like(out, dtype=torch.uint8)


@torch.library.custom_op("clipline::pool_backward", mutates_args=())
def pool_backward(grad: Tensor, which: Tensor) -> Tensor:
    """Gradient with respect to the pixels."""
    return convolution_kernels.pool_backward(grad.contiguous(), which)


@pool_backward.register_fake
def _(grad: Tensor, which: Tensor) -> Tensor:
    *batch, height, width, channels = grad.shape
    return grad.new_empty(*batch, 2 * height, 2 * width, channels)


def _pool_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)


def _pool_backward(ctx, grad, _which):  # type: ignore[no-untyped-def]
    return pool_backward(grad, ctx.saved_tensors[0])


pool.register_autograd(_pool_backward, setup_context=_pool_setup)


@pool.register_vmap
def _(info, in_dims, pixels):  # type: ignore[no-untyped-def]
    return pool(users_first(info, in_dims[0], pixels)), (0, 0)
