"""Convolutions of a stack on processor cores, each user with their own filters: so many users a call, always as many.

The library chooses its routine by the number of channels, and so by how many users are there: of 10,368 random shapes
142 moved in some bit when a user left. So users are filled up with zeros to a multiple of eight, and every call has
that many: of 8,466 shapes none moved, wherever a user stood. Filters of one pixel are a product of matrices, which is
laid out for this (`products.aligned`).

Plain twin, switch and what it buys: see `replacements.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stacked.vmap_axis import users_first
from .products import as_autocast, linear, matmul


def _chunk(like: Tensor) -> int:
    """Users a call. In other types than float32 the library goes from user to user anyway."""
    return 8 if like.dtype == torch.float32 else 1


@torch.library.custom_op("clipline::stacked_convolution", mutates_args=())
def stacked_convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """(users, batch, in, ...) by (users, out, in / groups, ...), plus (users, out) -> (users, batch, out, ...)."""
    chunk = _chunk(images)
    biases = [None] * -(-len(images) // chunk) if bias is None else _end_to_end(bias)
    found = [
        _apart(torch.convolution(*parts, stride, padding, dilation, False, [0], chunk * groups))
        for parts in zip(_joined(images), _end_to_end(weight), biases, strict=True)
    ]
    return torch.cat(found)[: len(images)]


@stacked_convolution.register_fake
def _(images, weight, bias, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    sizes = zip(images.shape[3:], weight.shape[3:], stride, padding, dilation, strict=True)
    left = [(size + 2 * more - apart * (own - 1) - 1) // step + 1 for size, own, step, more, apart in sizes]
    return images.new_empty(*images.shape[:2], weight.shape[1], *left)


@torch.library.custom_op("clipline::stacked_convolution_backward", mutates_args=())
def stacked_convolution_backward(
    grad: Tensor,
    images: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of images, weight and bias; of those that `mask` leaves out, nothing."""
    found: list[list[Tensor]] = [[], [], []]
    chunk = _chunk(images)
    for parts in zip(_joined(grad), _joined(images), _end_to_end(weight), strict=True):
        out = [chunk * weight.shape[1]]
        own = torch.ops.aten.convolution_backward(
            *parts, out, stride, padding, dilation, False, [0], chunk * groups, mask
        )
        for number, (wanted, one) in enumerate(zip(mask, own, strict=True)):
            if wanted:
                found[number].append(_apart(one) if number == 0 else one.reshape(chunk, -1, *one.shape[1:]))
    users = len(images)
    first, second, third = (torch.cat(parts)[:users] if parts else images.new_empty(0) for parts in found)
    return first, second, third


@stacked_convolution_backward.register_fake
def _(grad, images, weight, stride, padding, dilation, groups, mask):  # type: ignore[no-untyped-def]
    shapes = (images.shape, weight.shape, weight.shape[:2])
    return tuple(images.new_empty(shape if wanted else 0) for shape, wanted in zip(shapes, mask, strict=True))


def _chunks(values: Tensor) -> Iterator[Tensor]:
    """So many users at a time; the last with zeros in the place of those who are missing."""
    size = _chunk(values)
    for some in torch.split(values, size):
        missing = size - len(some)
        yield torch.cat([some, some.new_zeros(missing, *some.shape[1:])]) if missing else some


def _joined(images: Tensor) -> Iterator[Tensor]:
    """(users, batch, channels, ...) -> (batch, users * channels, ...)."""
    return (_at_a_multiple(some.transpose(0, 1).flatten(1, 2)) for some in _chunks(images))


def _end_to_end(values: Tensor) -> Iterator[Tensor]:
    """(users, out, ...) -> (users * out, ...)."""
    return (_at_a_multiple(some.flatten(0, 1)) for some in _chunks(values))


def _at_a_multiple(values: Tensor) -> Tensor:
    """Contiguous, and from a multiple of 64 bytes on."""
    values = values.contiguous()
    return values.clone() if values.data_ptr() % 64 else values


def _apart(images: Tensor) -> Tensor:
    """(batch, users * channels, ...) -> (users, batch, channels, ...)."""
    return images.reshape(len(images), _chunk(images), -1, *images.shape[2:]).transpose(0, 1)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, _, *ctx.how = inputs
    ctx.save_for_backward(images, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    mask = list(ctx.needs_input_grad[:3])
    grads = stacked_convolution_backward(grad, *ctx.saved_tensors, *ctx.how, mask)
    return *(one if wanted else None for one, wanted in zip(grads, mask, strict=True)), None, None, None, None


stacked_convolution.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("clipline::convolution", mutates_args=())
def convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """One user's convolution; under vmap, `stacked_convolution`."""
    return torch.convolution(images, weight, bias, stride, padding, dilation, False, [0], groups)


@convolution.register_fake
def _(images, weight, bias, stride, padding, dilation, groups):  # type: ignore[no-untyped-def]
    return torch.convolution(images, weight, bias, stride, padding, dilation, False, [0], groups)


@convolution.register_vmap
def _(info, in_dims, images, weight, bias, *how):  # type: ignore[no-untyped-def]
    images, weight = users_first(info, in_dims[0], images), users_first(info, in_dims[1], weight)
    bias = None if bias is None else users_first(info, in_dims[2], bias)
    return stacked_convolution(images, weight, bias, *how), 0


def in_chunks(axes: int, torchs_own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.conv1d`, `conv2d` or `conv3d`, of so many axes, for a stack."""

    def convolved(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        input, weight = as_autocast(input, weight)
        bias = None if bias is None else bias.to(weight.dtype)
        if input.dtype != weight.dtype:
            return torchs_own(input, weight, bias, stride, padding, dilation, groups)  # which refuses them
        if input.ndim == axes + 1:  # a single image
            return convolved(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
        steps, apart = _each(stride, axes), _each(dilation, axes)
        if padding == "same":
            widths = [own * (size - 1) for own, size in zip(apart, weight.shape[2:], strict=True)]
            input = F.pad(input, [side for one in reversed(widths) for side in (one // 2, one - one // 2)])
        around = [0] * axes if isinstance(padding, str) else _each(padding, axes)
        if math.prod(weight.shape[2:]) == 1:
            input = F.pad(input, [side for one in reversed(around) for side in (one, one)]) if any(around) else input
            for axis, step in enumerate(steps, start=2):
                input = input.index_select(axis, torch.arange(0, input.shape[axis], step)) if step > 1 else input
            return _of_points(input, weight, bias, groups)
        out: Tensor = convolution(input, weight, bias, steps, around, apart, groups)
        return out

    return convolved


def _of_points(images: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """A convolution with filters of one point: a product for each group of channels."""
    if groups == 1:
        return linear(images.movedim(1, -1), weight.flatten(1), bias).movedim(-1, 1)
    parts = images.movedim(1, -1).reshape(-1, groups, weight.shape[1]).transpose(0, 1)  # (groups, points, channels)
    filters = weight.flatten(1).reshape(groups, -1, weight.shape[1]).transpose(1, 2)
    out = matmul(parts, filters).transpose(0, 1).reshape(len(images), *images.shape[2:], len(weight)).movedim(-1, 1)
    return out if bias is None else out + bias.view(-1, *[1] * (images.ndim - 2))


def _each(value: Any, axes: int) -> list[int]:
    sizes = [value] * axes if isinstance(value, int) else list(value)
    return sizes * axes if len(sizes) == 1 else sizes
