"""Triton kernels of `convolution.py`: implicit-GEMM convolution and 2 x 2 max pooling. Users are a grid axis.

Plain twin, test and what it buys: see `convolution.py`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors

_PROGRAMS = 1056  # eight for each multiprocessor of an H200


def _power(count: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(count)))


def conv_forward(pixels: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int) -> Tensor:
    """(users, batch, height, width, channels) -> (users, batch, out, out, filters), one matrix product a user."""
    users, batch, height, width, channels = pixels.shape
    filters, depth = weight.shape[1:]
    high, wide = (height - size) // stride + 1, (width - size) // stride + 1
    out = pixels.new_empty(users, batch, high, wide, filters)
    weight = weight.to(pixels.dtype)
    block_f, block_k = _power(filters, 16, 128), _power(channels if channels >= 16 else depth, 16, 32)
    grid = (triton.cdiv(batch * high * wide, 128), users, triton.cdiv(filters, block_f))
    _forward[grid](
        pixels, weight, weight if bias is None else bias, out, batch * high * wide,
        pixels.stride(0), weight.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride,
        bias is not None, 128, block_f, block_k, num_warps=4 if block_f <= 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def conv_pixels(grad: Tensor, weight: Tensor, height: int, width: int, size: int, stride: int) -> Tensor:
    """(users, batch, out, out, filters) -> the gradient with respect to the pixels."""
    users, batch, high, wide, filters = grad.shape
    depth = weight.shape[2]
    channels = depth // (size * size)
    out = grad.new_empty(users, batch, height, width, channels)
    weight = weight.to(grad.dtype)
    block_c, block_k = _power(channels, 16, 128), _power(filters, 16, 64)
    grid = (triton.cdiv(batch * height * width, 128), users, triton.cdiv(channels, block_c))
    _pixels[grid](
        grad, weight, out, batch * height * width, grad.stride(0), weight.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride,
        128, block_c, block_k, num_warps=4 if block_c <= 64 else 8, num_stages=2,
    )  # fmt: skip
    return out


def conv_weight(grad: Tensor, pixels: Tensor, size: int, stride: int, biased: bool) -> Tensor:
    """Gradients of the weights, followed by the bias: (users, filters * (size * size * channels + 1)).

    The bias is treated as the weight of a constant 1: one more column of the patches.
    """
    users, batch, high, wide, filters = grad.shape
    height, width, channels = pixels.shape[2:]
    depth = size * size * channels
    side = 128 if filters >= 128 and depth >= 512 else 64  # large tiles read less, if there are enough of them
    block_f, block_k = _power(filters, 16, side), _power(depth + biased, 16, side)
    tiles = triton.cdiv(depth + biased, block_k) * triton.cdiv(filters, block_f)
    positions = batch * high * wide
    shares = max(
        1, min(8, _PROGRAMS // (tiles * users), positions // 512)
    )  # split the sum, so that there are enough programs to fill the GPU
    out = torch.empty(shares, users, filters * (depth + biased), dtype=torch.float32, device=grad.device)
    _weight[(tiles * shares, users)](
        grad, pixels, out, positions, triton.cdiv(positions, shares * 64) * 64, grad.stride(0), pixels.stride(0),
        out.stride(0), out.stride(1), height, width, channels, high, wide, filters, depth, size, stride,
        triton.cdiv(depth + biased, block_k), tiles, biased, 64, block_f, block_k, num_warps=side // 16, num_stages=3,
    )  # fmt: skip
    return out.sum(dim=0) if shares > 1 else out[0]


@triton.jit
def _forward(
    pixels, weight, bias, out, positions, pixels_user, weight_user, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    image, place = m // (HIGH * WIDE), m % (HIGH * WIDE)
    corner = (image * HEIGHT + (place // WIDE) * STRIDE) * WIDTH + (place % WIDE) * STRIDE
    start = pixels + user * pixels_user
    weights = weight + user * weight_user
    total = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    for k0 in range(0, DEPTH, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        tap, channel = k // CHANNELS, k % CHANNELS
        shift = ((tap // SIZE) * WIDTH + tap % SIZE) * CHANNELS + channel
        inside = (m < positions)[:, None] & (k < DEPTH)[None, :]
        a = tl.load(start + corner[:, None] * CHANNELS + shift[None, :], mask=inside, other=0.0)
        known = (f < FILTERS)[None, :] & (k < DEPTH)[:, None]
        b = tl.load(weights + f[None, :] * DEPTH + k[:, None], mask=known, other=0.0)
        total = tl.dot(a, b, total)
    if BIASED:
        total += tl.load(bias + user * FILTERS + f, mask=f < FILTERS, other=0.0).to(tl.float32)[None, :]
    where = out + user * out_user + m[:, None] * FILTERS + f[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < positions)[:, None] & (f < FILTERS)[None, :])


@triton.jit
def _pixels(
    grad, weight, out, positions, grad_user, weight_user, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    image, place = m // (HEIGHT * WIDTH), m % (HEIGHT * WIDTH)
    row, column = place // WIDTH, place % WIDTH
    grads = grad + user * grad_user
    weights = weight + user * weight_user
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for tap in range(SIZE * SIZE):
        up, left = row - tap // SIZE, column - tap % SIZE
        fits = (m < positions) & (up >= 0) & (left >= 0) & (up % STRIDE == 0) & (left % STRIDE == 0)
        up, left = up // STRIDE, left // STRIDE
        fits = fits & (up < HIGH) & (left < WIDE)
        base = ((image * HIGH + up) * WIDE + left) * FILTERS
        for f0 in range(0, FILTERS, BLOCK_K):
            f = f0 + tl.arange(0, BLOCK_K)
            a = tl.load(grads + base[:, None] + f[None, :], mask=fits[:, None] & (f < FILTERS)[None, :], other=0.0)
            column_mask = (f < FILTERS)[:, None] & (c < CHANNELS)[None, :]
            b = tl.load(weights + f[:, None] * DEPTH + tap * CHANNELS + c[None, :], mask=column_mask, other=0.0)
            total = tl.dot(a, b, total)
    where = out + user * out_user + m[:, None] * CHANNELS + c[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < positions)[:, None] & (c < CHANNELS)[None, :])


@triton.jit
def _weight(
    grad, pixels, out, positions, share, grad_user, pixels_user, out_share, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, ACROSS: tl.constexpr,
    TILES: tl.constexpr, BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    k = (tile % ACROSS) * BLOCK_K + tl.arange(0, BLOCK_K)
    f = (tile // ACROSS) * BLOCK_F + tl.arange(0, BLOCK_F)
    tap, channel = k // CHANNELS, k % CHANNELS
    shift = ((tap // SIZE) * WIDTH + tap % SIZE) * CHANNELS + channel
    grads = grad + user * grad_user
    start = pixels + user * pixels_user
    total = tl.zeros((BLOCK_F, BLOCK_K), tl.float32)
    for m0 in range(part * share, tl.minimum(positions, (part + 1) * share), BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        image, place = m // (HIGH * WIDE), m % (HIGH * WIDE)
        corner = (image * HEIGHT + (place // WIDE) * STRIDE) * WIDTH + (place % WIDE) * STRIDE
        known = m < positions
        a = tl.load(grads + m[None, :] * FILTERS + f[:, None], mask=known[None, :] & (f < FILTERS)[:, None], other=0.0)
        inside = known[:, None] & (k < DEPTH)[None, :]
        b = tl.load(start + corner[:, None] * CHANNELS + shift[None, :], mask=inside, other=0.0)
        if BIASED:
            b = tl.where((k == DEPTH)[None, :], 1.0, b).to(b.dtype)
        total = tl.dot(a, b, total)
    own = out + part * out_share + user * out_user
    where = own + tl.where((k == DEPTH)[None, :], FILTERS * DEPTH + f[:, None], f[:, None] * DEPTH + k[None, :])
    tl.store(where, total, mask=(f < FILTERS)[:, None] & (k < DEPTH + BIASED)[None, :])


def pool_forward(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of every 2 x 2 window, and its index in the window."""
    *batch, height, width, channels = pixels.shape
    out = pixels.new_empty(*batch, height // 2, width // 2, channels)
    which = torch.empty_like(out, dtype=torch.uint8)
    _pool[(triton.cdiv(out.numel(), 1024),)](pixels, out, which, out.numel(), height, width, channels, 1024)
    return out, which


@triton.jit
def _corner(i, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr):
    channel, place = i % CHANNELS, i // CHANNELS
    column, place = place % (WIDTH // 2), place // (WIDTH // 2)
    row, image = place % (HEIGHT // 2), place // (HEIGHT // 2)
    return ((image * HEIGHT + 2 * row) * WIDTH + 2 * column) * CHANNELS + channel


@triton.jit
def _pool(
    pixels, out, which, count, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    first = pixels + _corner(i, HEIGHT, WIDTH, CHANNELS)
    best = tl.load(first, mask=valid)
    place = tl.zeros((BLOCK,), tl.uint8)
    for k in tl.static_range(1, 4):
        other = tl.load(first + ((k // 2) * WIDTH + k % 2) * CHANNELS, mask=valid)
        place = tl.where(other > best, k, place).to(tl.uint8)
        best = tl.where(other > best, other, best)
    tl.store(out + i, best, mask=valid)
    tl.store(which + i, place, mask=valid)


def pool_backward(grad: Tensor, which: Tensor) -> Tensor:
    """Send each gradient to the maximum of its window, 0 to the other three."""
    *batch, height, width, channels = grad.shape
    out = grad.new_empty(*batch, 2 * height, 2 * width, channels)
    _unpool[(triton.cdiv(grad.numel(), 1024),)](grad, which, out, grad.numel(), 2 * height, 2 * width, channels, 1024)
    return out


@triton.jit
def _unpool(
    grad, which, out, count, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    valid = i < count
    first = out + _corner(i, HEIGHT, WIDTH, CHANNELS)
    value = tl.load(grad + i, mask=valid)
    place = tl.load(which + i, mask=valid)
    for k in tl.static_range(0, 4):
        tl.store(first + ((k // 2) * WIDTH + k % 2) * CHANNELS, tl.where(place == k, value, 0.0), mask=valid)
