"""Triton kernels of `convolution.py`: implicit-GEMM convolution. Users are a grid axis.

Tiles and the split of a sum are chosen by shape alone: a user's numbers are the same whoever else is in the stack.
Padding is never in memory: the kernels mask what they would read there. Where channels fill whole tiles, a tile lies in
one tap of the filter, so that its tap is a scalar and its channels are contiguous.

Plain twin, switch, test and what it buys: see `convolution.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


class Tiles(NamedTuple):
    """Sides of a program's output tile, how much of the sum it reads at a time, warps, and reads under way."""

    rows: int
    columns: int
    deep: int
    warps: int
    stages: int


def _power(count: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(count)))


def _divisor(count: int, most: int) -> int:
    """The largest power of 2 that divides `count`, up to `most`."""
    return min(count & -count, most)


def _fits(tiles: Tiles, like: Tensor) -> bool:
    """Whether the GPU's shared memory holds the reads under way. Triton's interpreter has no limit."""
    if like.device.type != "cuda":
        return True
    room = torch.cuda.get_device_properties(like.device).shared_memory_per_block_optin
    return tiles.stages * (tiles.rows + tiles.columns) * tiles.deep * like.element_size() <= room - 1024


def _largest(choices: Sequence[Tiles], like: Tensor) -> Tiles:
    """The first that fits."""
    return next(tiles for tiles in choices if tiles is choices[-1] or _fits(tiles, like))


def forward_tiles(channels: int, filters: int, depth: int, like: Tensor) -> Tiles:
    """Of `_forward`: positions by filters, along the depth. The best of a dozen on an H200."""
    columns = _power(filters, 16, 128)
    warps = 4 if columns <= 64 else 8
    deep = _divisor(channels, 32) if channels % 16 == 0 else _power(depth, 16, 32)
    choices = [Tiles(128, columns, deep, warps, 3)]
    if channels % 64 == 0:
        choices.insert(0, Tiles(128, columns, 64, warps, 3))
        if filters % 256 == 0:
            choices.insert(0, Tiles(128, 256, 64, 8, 4))
    return _largest(choices, like)


def pixels_tiles(channels: int, filters: int, like: Tensor) -> Tiles:
    """Of `_pixels`: positions by channels, along the filters. The best of a dozen on an H200."""
    columns = _power(channels, 16, 128)
    warps = 4 if columns <= 64 else 8
    choices = [Tiles(128, columns, _power(filters, 16, 32), warps, 3)]
    if filters % 64 == 0:
        choices.insert(0, Tiles(128, columns, 64, warps, 3))
        if channels % 256 == 0:
            choices.insert(0, Tiles(128, 256, 64, 8, 4))
    return _largest(choices, like)


def weight_tiles(channels: int, filters: int, depth: int, padding: int, like: Tensor) -> Tiles:
    """Of `_weight`: filters by depth, along the positions. The best of a dozen on an H200."""
    columns = _power(depth, 16, 64)
    if padding and channels % columns:
        columns = _divisor(channels, 64)
    choices = [Tiles(_power(filters, 16, 64), columns, 64, 4, 3)]
    if filters % 128 == 0 and channels % 128 == 0:  # large tiles read less
        choices.insert(0, Tiles(256 if filters % 256 == 0 else 128, 128, 64, 8, 3))
    return _largest(choices, like)


def conv_forward(
    pixels: Tensor, weight: Tensor, bias: Tensor | None, size: int, stride: int, padding: int = 0
) -> Tensor:
    """(users, batch, height, width, channels) -> (users, batch, out, out, filters), one matrix product a user.

    The weights have the type of the pixels. Padding needs a multiple of 16 channels.
    """
    users, batch, height, width, channels = pixels.shape
    filters, depth = weight.shape[1:]
    high, wide = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
    out = pixels.new_empty(users, batch, high, wide, filters)
    tiles = forward_tiles(channels, filters, depth, pixels)
    assert not padding or channels % tiles.deep == 0
    grid = (triton.cdiv(batch * high * wide, tiles.rows), users, triton.cdiv(filters, tiles.columns))
    _forward[grid](
        pixels, weight, weight if bias is None else bias, out, batch * high * wide,
        pixels.stride(0), weight.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride, padding,
        bias is not None, tiles.rows, tiles.columns, tiles.deep, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def conv_pixels(
    grad: Tensor, weight: Tensor, height: int, width: int, size: int, stride: int, padding: int = 0
) -> Tensor:
    """(users, batch, out, out, filters) -> the gradient with respect to the pixels. The weights have its type."""
    users, batch, high, wide, filters = grad.shape
    depth = weight.shape[2]
    channels = depth // (size * size)
    out = grad.new_empty(users, batch, height, width, channels)
    tiles = pixels_tiles(channels, filters, grad)
    grid = (triton.cdiv(batch * height * width, tiles.rows), users, triton.cdiv(channels, tiles.columns))
    _pixels[grid](
        grad, weight, out, batch * height * width, grad.stride(0), weight.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride, padding,
        tiles.rows, tiles.columns, tiles.deep, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def conv_weight(grad: Tensor, pixels: Tensor, size: int, stride: int, biased: bool, padding: int = 0) -> Tensor:
    """Gradients of the weights, followed by the bias: (users, filters * (size * size * channels + 1)) float32."""
    users, batch, high, wide, filters = grad.shape
    height, width, channels = pixels.shape[2:]
    depth = size * size * channels
    tiles = weight_tiles(channels, filters, depth, padding, grad)
    assert not padding or channels % tiles.columns == 0
    across, down = triton.cdiv(depth, tiles.columns), triton.cdiv(filters, tiles.rows)
    positions = batch * high * wide
    shares = split(positions, across * down)
    share = triton.cdiv(positions, shares * tiles.deep) * tiles.deep
    out = torch.empty(shares, users, filters * (depth + biased), dtype=torch.float32, device=grad.device)
    _weight[((across + biased) * down * shares, users)](
        grad, pixels, out, positions, share, grad.stride(0), pixels.stride(0), out.stride(0), out.stride(1),
        height, width, channels, high, wide, filters, depth, size, stride, padding, across, down, biased,
        tiles.deep, tiles.rows, tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if shares == 1:
        return out[0]
    total = torch.empty_like(out[0])
    _add[(triton.cdiv(total.numel(), 1024),)](out, total, total.numel(), shares, 1024)
    return total


def split(positions: int, tiles: int) -> int:
    """Into how many shares the sum over the positions is split where a user has few tiles, so that the GPU is filled.

    It does not depend on the number of users, whose rounding would then depend on who else is in the stack.
    """
    return max(1, min(8, positions // 1024, triton.cdiv(16, tiles)))


@triton.jit
def _place(m, HIGH: tl.constexpr, WIDE: tl.constexpr):
    """Image, row and column of a position. Unsigned, which takes a third fewer instructions in a loop."""
    line = m.to(tl.uint32) // WIDE
    image = line // HIGH
    return image.to(tl.int32), (line - image * HIGH).to(tl.int32), (m.to(tl.uint32) - line * WIDE).to(tl.int32)


@triton.jit
def _forward(
    pixels, weight, bias, out, positions, pixels_user, weight_user, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    BIASED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    image, row, column = _place(m, HIGH, WIDE)
    top, left = row * STRIDE - PADDING, column * STRIDE - PADDING
    corner = ((image * HEIGHT + top) * WIDTH + left) * CHANNELS
    start = pixels + user * pixels_user
    weights = weight + user * weight_user
    total = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
    CHUNKS: tl.constexpr = CHANNELS // BLOCK_K
    for step in range((DEPTH + BLOCK_K - 1) // BLOCK_K):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        if CHANNELS % BLOCK_K == 0:
            tap, chunk = step // CHUNKS, step % CHUNKS
            i, j = tap // SIZE, tap % SIZE
            inside = m < positions
            if PADDING > 0:
                inside &= (top + i >= 0) & (top + i < HEIGHT) & (left + j >= 0) & (left + j < WIDTH)
            here = corner + (i * WIDTH + j) * CHANNELS
            here = start + here[:, None] + (chunk * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
            a = tl.load(here, mask=inside[:, None], other=0.0)
            b = tl.load(weights + f[None, :] * DEPTH + k[:, None], mask=(f < FILTERS)[None, :], other=0.0)
        else:
            tap, channel = k // CHANNELS, k % CHANNELS
            shift = ((tap // SIZE) * WIDTH + tap % SIZE) * CHANNELS + channel
            inside = (m < positions)[:, None] & (k < DEPTH)[None, :]
            a = tl.load(start + corner[:, None] + shift[None, :], mask=inside, other=0.0)
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
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    image, row, column = _place(m, HEIGHT, WIDTH)
    row, column = row + PADDING, column + PADDING
    corner = ((image * HIGH + row) * WIDE + column) * FILTERS
    grads = grad + user * grad_user
    weights = weight + user * weight_user
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    CHUNKS: tl.constexpr = (FILTERS + BLOCK_K - 1) // BLOCK_K
    for step in range(SIZE * SIZE * CHUNKS):  # one loop and not two: reads go on across taps
        tap, chunk = step // CHUNKS, step % CHUNKS
        i, j = tap // SIZE, tap % SIZE
        up, left = row - i, column - j
        fits = (m < positions) & (up >= 0) & (left >= 0)
        here = corner - (i * WIDE + j) * FILTERS
        if STRIDE > 1:
            fits &= (up % STRIDE == 0) & (left % STRIDE == 0)
            up, left = up // STRIDE, left // STRIDE
            here = ((image * HIGH + up) * WIDE + left) * FILTERS
        fits &= (up < HIGH) & (left < WIDE)
        f = chunk * BLOCK_K + tl.arange(0, BLOCK_K)
        inside, known = fits[:, None], (c < CHANNELS)[None, :]
        if FILTERS % BLOCK_K != 0:
            inside, known = inside & (f < FILTERS)[None, :], known & (f < FILTERS)[:, None]
        a = tl.load(grads + here[:, None] + f[None, :], mask=inside, other=0.0)
        b = tl.load(weights + f[:, None] * DEPTH + tap * CHANNELS + c[None, :], mask=known, other=0.0)
        total = tl.dot(a, b, total)
    where = out + user * out_user + m[:, None] * CHANNELS + c[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < positions)[:, None] & (c < CHANNELS)[None, :])


@triton.jit
def _weight(
    grad, pixels, out, positions, share, grad_user, pixels_user, out_share, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr,
    ACROSS: tl.constexpr, DOWN: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    TILES: tl.constexpr = (ACROSS + BIASED) * DOWN
    tile, part = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    f = (tile // (ACROSS + BIASED)) * BLOCK_F + tl.arange(0, BLOCK_F)
    first, last = part * share, tl.minimum(positions, (part + 1) * share)
    grads = grad + user * grad_user
    own = out + part.to(tl.int64) * out_share + user * out_user
    across = tile % (ACROSS + BIASED)
    if BIASED and across == ACROSS:
        _bias(grads, own + FILTERS * DEPTH, f, first, last, FILTERS, BLOCK_M, BLOCK_F)
    else:
        k = across * BLOCK_K + tl.arange(0, BLOCK_K)
        CHUNKS: tl.constexpr = CHANNELS // BLOCK_K
        start = pixels + user * pixels_user
        total = tl.zeros((BLOCK_F, BLOCK_K), tl.float32)
        for m0 in range(first, last, BLOCK_M):
            m = m0 + tl.arange(0, BLOCK_M)
            known = m < positions
            a = tl.load(
                grads + m[None, :] * FILTERS + f[:, None], mask=known[None, :] & (f < FILTERS)[:, None], other=0.0
            )
            image, row, column = _place(m, HIGH, WIDE)
            row, column = row * STRIDE - PADDING, column * STRIDE - PADDING
            if CHANNELS % BLOCK_K == 0:
                tap = across // CHUNKS
                row, column = row + tap // SIZE, column + tap % SIZE
                if PADDING > 0:
                    known &= (row >= 0) & (row < HEIGHT) & (column >= 0) & (column < WIDTH)
                if STRIDE == 1 and HIGH == HEIGHT and WIDE == WIDTH:  # then a tap is as far from every position
                    here = (m + (tap // SIZE - PADDING) * WIDTH + tap % SIZE - PADDING) * CHANNELS
                else:
                    here = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
                channel = (across % CHUNKS) * BLOCK_K + tl.arange(0, BLOCK_K)
                here = start + here[:, None] + channel[None, :]
                b = tl.load(here, mask=known[:, None], other=0.0)
            else:
                tap, channel = k // CHANNELS, k % CHANNELS
                shift = ((tap // SIZE) * WIDTH + tap % SIZE) * CHANNELS + channel
                here = ((image * HEIGHT + row) * WIDTH + column) * CHANNELS
                inside = known[:, None] & (k < DEPTH)[None, :]
                b = tl.load(start + here[:, None] + shift[None, :], mask=inside, other=0.0)
            total = tl.dot(a, b, total)
        where = own + f[:, None] * DEPTH + k[None, :]  # nothing but contiguous: each sector is written once
        tl.store(where, total, mask=(f < FILTERS)[:, None] & (k < DEPTH)[None, :])


@triton.jit
def _bias(grads, out, f, first, last, FILTERS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr):
    total = tl.zeros((BLOCK_F,), tl.float32)
    for m0 in range(first, last, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        known = (m < last)[:, None] & (f < FILTERS)[None, :]
        total += tl.sum(tl.load(grads + m[:, None] * FILTERS + f[None, :], mask=known, other=0.0).to(tl.float32), 0)
    tl.store(out + f, total, mask=f < FILTERS)


@triton.jit
def _add(parts, out, count, SHARES: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(SHARES):
        total += tl.load(parts + i + part * count.to(tl.int64), mask=i < count)
    tl.store(out + i, total, mask=i < count)
