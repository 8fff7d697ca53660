"""Triton kernels of `group_norm.py`. Users are a grid axis; a program holds all pixels of some groups of an example.

The backward kernel goes through a user's examples one after the other, so that the gradients of weight and bias are
summed in the same order whoever else is in the stack.

Plain twin, switch, test and what it buys: see `group_norm.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors

_MOST = 16384  # values of an example that a program holds


def serves(channels: int, groups: int, places: int) -> bool:
    """Whether there is a kernel: groups of 2^n channels, which fit on chip."""
    each = channels // groups
    if channels % groups or each & (each - 1):
        return False
    return triton.next_power_of_2(places) * max(each, _least(channels)) <= _MOST


def _least(channels: int) -> int:
    """A row of 16 channels is a sector of memory."""
    return min(16, channels & -channels)


def _block(channels: int, groups: int, wanted: int) -> int:
    """Channels of a program: whole groups, and a power of 2 that divides all of them."""
    wanted = 1 << max(wanted, 1).bit_length() - 1
    return max(channels // groups, _least(channels), min(channels & -channels, wanted))


def norm_forward(
    pixels: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, relu: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(users, batch, height, width, channels) -> outputs, and (users, batch, groups) means and 1 / deviations."""
    users, batch, height, width, channels = pixels.shape
    out = torch.empty(pixels.shape, dtype=dtype, device=pixels.device)
    means = torch.empty(users, batch, groups, dtype=torch.float32, device=pixels.device)
    scales = torch.empty_like(means)
    tall = triton.next_power_of_2(height * width)
    block = _block(channels, groups, max(16, 4096 // tall))
    _forward[(batch * (channels // block), users)](
        pixels, weight, bias, out, means, scales, eps, batch, height * width, channels, groups, relu, tall, block,
        num_warps=8 if tall * block > 8192 else 4,
    )  # fmt: skip
    return out, means, scales


def norm_backward(
    grad: Tensor, pixels: Tensor, weight: Tensor, bias: Tensor, means: Tensor, scales: Tensor, relu: bool
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to the pixels, in their type, and (users, 2, channels) to weight and bias."""
    users, batch, height, width, channels = pixels.shape
    groups = means.shape[2]
    out = torch.empty_like(pixels)
    both = torch.empty(users, 2, channels, dtype=torch.float32, device=pixels.device)
    tall = triton.next_power_of_2(height * width)
    block = _block(channels, groups, max(16, min(channels // 4, 4096 // tall)))
    _backward[(channels // block, users)](
        grad, pixels, weight, bias, means, scales, out, both,
        batch, height * width, channels, groups, relu, tall, block,
        num_warps=8 if tall * block > 4096 else 4,
    )  # fmt: skip
    return out, both


@triton.jit
def _group_means(sums, COUNT: tl.constexpr, NUMBER: tl.constexpr, EACH: tl.constexpr):
    return tl.sum(tl.reshape(sums, (NUMBER, EACH)), 1) / COUNT


@triton.jit
def _of_channels(of_groups, NUMBER: tl.constexpr, EACH: tl.constexpr):
    return tl.reshape(tl.broadcast_to(of_groups[:, None], (NUMBER, EACH)), (NUMBER * EACH,))


@triton.jit
def _forward(
    pixels, weight, bias, out, means, scales, eps,
    BATCH: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = CHANNELS // GROUPS
    NUMBER: tl.constexpr = BLOCK_C // EACH
    BLOCKS: tl.constexpr = CHANNELS // BLOCK_C
    user = tl.program_id(1).to(tl.int64)
    image, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    c = block * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    known = (p < PLACES)[:, None]
    start = (user * BATCH + image) * (PLACES * CHANNELS)
    here = p[:, None] * CHANNELS + c[None, :]
    x = tl.load(pixels + start + here, mask=known, other=0.0).to(tl.float32)
    mean = _group_means(tl.sum(x, 0), PLACES * EACH, NUMBER, EACH)
    centred = tl.where(known, x - _of_channels(mean, NUMBER, EACH)[None, :], 0.0)
    scale = tl.rsqrt(_group_means(tl.sum(centred * centred, 0), PLACES * EACH, NUMBER, EACH) + eps)
    normal = centred * _of_channels(scale, NUMBER, EACH)[None, :]
    y = normal * tl.load(weight + user * CHANNELS + c)[None, :] + tl.load(bias + user * CHANNELS + c)[None, :]
    if RELU:
        y = tl.where(y <= 0.0, 0.0, y)  # NaN stays
    tl.store(out + start + here, y.to(out.dtype.element_ty), mask=known)
    group = (user * BATCH + image) * GROUPS + block * NUMBER + tl.arange(0, NUMBER)
    tl.store(means + group, mean)
    tl.store(scales + group, scale)


@triton.jit
def _backward(
    grad, pixels, weight, bias, means, scales, out, both,
    BATCH: tl.constexpr, PLACES: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, RELU: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = CHANNELS // GROUPS
    NUMBER: tl.constexpr = BLOCK_C // EACH
    user = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    p = tl.arange(0, BLOCK_P)
    known = (p < PLACES)[:, None]
    here = p[:, None] * CHANNELS + c[None, :]
    gamma = tl.load(weight + user * CHANNELS + c)
    beta = tl.load(bias + user * CHANNELS + c)
    of_gamma = tl.zeros((BLOCK_C,), tl.float32)
    of_beta = tl.zeros((BLOCK_C,), tl.float32)
    for image in range(BATCH):
        start = (user * BATCH + image) * (PLACES * CHANNELS)
        x = tl.load(pixels + start + here, mask=known, other=0.0).to(tl.float32)
        dy = tl.load(grad + start + here, mask=known, other=0.0).to(tl.float32)
        group = (user * BATCH + image) * GROUPS + tl.program_id(0) * NUMBER + tl.arange(0, NUMBER)
        mean = _of_channels(tl.load(means + group), NUMBER, EACH)[None, :]
        scale = _of_channels(tl.load(scales + group), NUMBER, EACH)[None, :]
        normal = tl.where(known, (x - mean) * scale, 0.0)
        if RELU:
            dy = tl.where(normal * gamma[None, :] + beta[None, :] <= 0.0, 0.0, dy)
        sum_dy, sum_normal = tl.sum(dy, 0), tl.sum(dy * normal, 0)
        of_beta += sum_dy
        of_gamma += sum_normal
        first = _of_channels(_group_means(gamma * sum_dy, PLACES * EACH, NUMBER, EACH), NUMBER, EACH)
        second = _of_channels(_group_means(gamma * sum_normal, PLACES * EACH, NUMBER, EACH), NUMBER, EACH)
        dx = (dy * gamma[None, :] - first[None, :] - normal * second[None, :]) * scale
        tl.store(out + start + here, dx.to(out.dtype.element_ty), mask=known)
    own = both + user * (2 * CHANNELS) + c
    tl.store(own, of_gamma)
    tl.store(own + CHANNELS, of_beta)
