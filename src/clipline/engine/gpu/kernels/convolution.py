"""Convolution for a stack of users as a single operation, each user with their own weights.

Its passes are custom ops ("clipline::...") so that `torch.func.vmap` and `torch.compile` treat each as one operation.
The kernel never writes its patches to memory.

Plain twin: `patches` times a matrix (the body of `conv`, and `convolved` off the GPU).
Switch: `FastParts.kernels`.
Held equal by: tests/engine/gpu/kernels/test_convolution.py (needs a GPU).
Buys: emnist_cr on an H200: 35.0 ms a round without, 17.1 with (8 of these ms by a kernel for pooling, now taken out);
cifar100: 260 ms of kernels before, 100.5 with (benchmarks/results/details/what-each-fast-part-buys-on-cuda.md).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.precision import kernels_in_use
from ...core.vmap_axis import users_first

try:
    from . import convolution_triton as convolution_kernels
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    convolution_kernels = None  # type: ignore[assignment]


def fused(tensor: Tensor) -> bool:
    """Whether there is a kernel for this device and type, and it is not switched off."""
    return (
        kernels_in_use()
        and tensor.device.type == "cuda"
        and tensor.dtype != torch.float64
        and convolution_kernels is not None
    )


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """The type that autocast asks for, if there is a kernel."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") and fused(tensor) else None


def out_side(side: int, size: int, stride: int, padding: int = 0) -> int:
    """Output height or width of a convolution."""
    return (side + 2 * padding - size) // stride + 1


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


def convolved(
    images: Tensor, weight: Tensor, bias: Tensor | None, stride: int, zeros: tuple[int, ...] = (0, 0, 0, 0)
) -> Tensor:
    """(batch, channels, height, width) by (filters, size, size, channels), for stacked users.

    `zeros` to the left, to the right, above and below the images.
    """
    size, dtype = weight.shape[1], autocast_dtype(images)
    if dtype is None:  # in float32 patches times cuBLAS are faster
        pixels = (F.pad(images, zeros) if any(zeros) else images).permute(0, 2, 3, 1)
        return F.linear(patches(pixels, size, stride), weight.flatten(1), bias).permute(0, 3, 1, 2)
    in_kernel = len(set(zeros)) == 1 and images.shape[1] % 16 == 0
    images = images if in_kernel or not any(zeros) else F.pad(images, zeros)
    # Laid out here and not in the operation: the compiler fuses this copy into the kernel that makes the pixels.
    pixels = images.permute(0, 2, 3, 1).to(dtype).contiguous()
    # Rounded here and not in the operation: once a step, for both passes.
    rounded = weight.detach().to(dtype).flatten(1)
    out: Tensor = conv(pixels, weight, rounded, bias, stride, zeros[0] if in_kernel else 0)
    return out.permute(0, 3, 1, 2)


@torch.library.custom_op("clipline::stacked_conv", mutates_args=())
def stacked_conv(
    pixels: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None, stride: int, padding: int
) -> Tensor:
    """(users, batch, height, width, channels) by the matrices `rounded`, (users, filters, size * size * channels).

    `weight` (users, filters, size, size, channels) is not read: it says the size and gets the gradient. That is in
    float32, whereas autograd would round a gradient of `rounded` to its type.
    """
    bias = None if bias is None else bias.contiguous()
    given = pixels.contiguous(), rounded.to(pixels.dtype).contiguous(), bias
    return convolution_kernels.conv_forward(*given, weight.shape[2], stride, padding)


@stacked_conv.register_fake
def _(pixels: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    sides = [out_side(side, weight.shape[2], stride, padding) for side in pixels.shape[2:4]]
    return pixels.new_empty(*pixels.shape[:2], *sides, weight.shape[1])


@torch.library.custom_op("clipline::stacked_conv_pixels", mutates_args=())
def stacked_conv_pixels(
    grad: Tensor, rounded: Tensor, height: int, width: int, size: int, stride: int, padding: int
) -> Tensor:
    """Gradient with respect to the pixels."""
    given = grad.contiguous(), rounded.to(grad.dtype).contiguous()
    return convolution_kernels.conv_pixels(*given, height, width, size, stride, padding)


@stacked_conv_pixels.register_fake
def _(grad: Tensor, rounded: Tensor, height: int, width: int, size: int, stride: int, padding: int) -> Tensor:
    return grad.new_empty(*grad.shape[:2], height, width, rounded.shape[2] // (size * size))


@torch.library.custom_op("clipline::stacked_conv_weight", mutates_args=())
def stacked_conv_weight(grad: Tensor, pixels: Tensor, size: int, stride: int, padding: int, biased: bool) -> Tensor:
    """Gradients with respect to the weights, followed by the bias: (users, filters * (depth + 1)) float32."""
    return convolution_kernels.conv_weight(grad.contiguous(), pixels.contiguous(), size, stride, biased, padding)


@stacked_conv_weight.register_fake
def _(grad: Tensor, pixels: Tensor, size: int, stride: int, padding: int, biased: bool) -> Tensor:
    shape = (grad.shape[0], grad.shape[4] * (size * size * pixels.shape[4] + biased))
    return torch.empty(shape, dtype=torch.float32, device=grad.device)


def _conv_setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    pixels, weight, rounded, _, ctx.stride, ctx.padding = inputs
    ctx.shape = weight.shape[1:]
    ctx.save_for_backward(pixels, rounded)


def _conv_backward(ctx, grad):  # type: ignore[no-untyped-def]
    pixels, rounded = ctx.saved_tensors
    grad = grad.contiguous()  # here, as in `convolved`
    grad_pixels = grad_weight = grad_bias = None
    size, count = ctx.shape[1], ctx.shape.numel()
    if ctx.needs_input_grad[0]:
        height, width = pixels.shape[2:4]
        grad_pixels = stacked_conv_pixels(grad, rounded, height, width, size, ctx.stride, ctx.padding)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[3]:
        both = stacked_conv_weight(grad, pixels, size, ctx.stride, ctx.padding, ctx.needs_input_grad[3])
        grad_weight = both[:, :count].unflatten(1, ctx.shape)
        grad_bias = both[:, count:] if ctx.needs_input_grad[3] else None
    return grad_pixels, grad_weight, None, grad_bias, None, None


stacked_conv.register_autograd(_conv_backward, setup_context=_conv_setup)


@torch.library.custom_op("clipline::conv", mutates_args=())
def conv(pixels: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    """One user's convolution of (batch, height, width, channels); under vmap, `stacked_conv`."""
    bias = None if bias is None else bias.to(pixels.dtype)
    padded = F.pad(pixels, (0, 0, *[padding] * 4))
    return F.linear(patches(padded, weight.shape[1], stride), rounded.to(pixels.dtype), bias)


@conv.register_fake
def _(pixels: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    sides = [out_side(side, weight.shape[1], stride, padding) for side in pixels.shape[1:3]]
    return pixels.new_empty(len(pixels), *sides, weight.shape[0])


@conv.register_vmap
def _(info, in_dims, pixels, weight, rounded, bias, stride, padding):  # type: ignore[no-untyped-def]
    pixels, weight, rounded = (
        users_first(info, dim, given) for dim, given in zip(in_dims[:3], (pixels, weight, rounded), strict=True)
    )
    bias = None if bias is None else users_first(info, in_dims[3], bias)
    return stacked_conv(pixels, weight, rounded, bias, stride, padding), 0
