"""The kernels of `kernels.py` for NVIDIA GPUs. Users are an axis of the launch grid, each with own weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


def _power(count: int, least: int, most: int) -> int:
    return max(least, min(most, triton.next_power_of_2(count)))


def conv_forward(pixels: Tensor, weight: Tensor, size: int, stride: int, exact: bool) -> Tensor:
    """(users, batch, height, width, channels) -> (users, batch, out, out, filters), as one product a user."""
    users, batch, height, width, channels = pixels.shape
    filters, depth = weight.shape[1:]
    high, wide = (height - size) // stride + 1, (width - size) // stride + 1
    out = pixels.new_empty(users, batch, high, wide, filters)
    block_f, block_k = _power(filters, 16, 128), _power(channels if channels >= 16 else depth, 16, 32)
    grid = (triton.cdiv(batch * high * wide, 128), users, triton.cdiv(filters, block_f))
    _forward[grid](
        pixels, weight, out, batch * high * wide, pixels.stride(0), weight.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride,
        128, block_f, block_k, _kind(pixels, exact), num_warps=4 if block_f <= 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def conv_pixels(grad: Tensor, weight: Tensor, height: int, width: int, size: int, stride: int, exact: bool) -> Tensor:
    """(users, batch, out, out, filters) -> the gradient of the pixels."""
    users, batch, high, wide, filters = grad.shape
    depth = weight.shape[2]
    channels = depth // (size * size)
    out = grad.new_empty(users, batch, height, width, channels)
    block_c, block_k = _power(channels, 16, 128), _power(filters, 16, 32)
    grid = (triton.cdiv(batch * height * width, 128), users, triton.cdiv(channels, block_c))
    _pixels[grid](
        grad, weight, out, batch * height * width, grad.stride(0), weight.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride,
        128, block_c, block_k, _kind(grad, exact), num_warps=4 if block_c <= 64 else 8, num_stages=3,
    )  # fmt: skip
    return out


def conv_weight(grad: Tensor, pixels: Tensor, size: int, stride: int, exact: bool) -> Tensor:
    """The gradient of the weights, (users, filters, size * size * channels) float32."""
    users, batch, high, wide, filters = grad.shape
    height, width, channels = pixels.shape[2:]
    depth = size * size * channels
    out = torch.empty(users, filters, depth, dtype=torch.float32, device=grad.device)
    block_f, block_k = _power(filters, 16, 64), _power(depth, 16, 64)
    grid = (triton.cdiv(depth, block_k), users, triton.cdiv(filters, block_f))
    _weight[grid](
        grad, pixels, out, batch * high * wide, grad.stride(0), pixels.stride(0), out.stride(0),
        height, width, channels, high, wide, filters, depth, size, stride,
        64, block_f, block_k, _kind(grad, exact), num_warps=4, num_stages=4,
    )  # fmt: skip
    return out


def _kind(tensor: Tensor, exact: bool) -> str:
    """How a product of float32 is computed; other types have only one way."""
    return "ieee" if exact and tensor.dtype == torch.float32 else "tf32"


@triton.jit
def _forward(
    pixels, weight, out, places, pixels_user, weight_user, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
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
        inside = (m < places)[:, None] & (k < DEPTH)[None, :]
        a = tl.load(start + corner[:, None] * CHANNELS + shift[None, :], mask=inside, other=0.0)
        known = (f < FILTERS)[None, :] & (k < DEPTH)[:, None]
        b = tl.load(weights + f[None, :] * DEPTH + k[:, None], mask=known, other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision=KIND)
    where = out + user * out_user + m[:, None] * FILTERS + f[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < places)[:, None] & (f < FILTERS)[None, :])


@triton.jit
def _pixels(
    grad, weight, out, places, grad_user, weight_user, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
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
        fits = (m < places) & (up >= 0) & (left >= 0) & (up % STRIDE == 0) & (left % STRIDE == 0)
        up, left = up // STRIDE, left // STRIDE
        fits = fits & (up < HIGH) & (left < WIDE)
        base = ((image * HIGH + up) * WIDE + left) * FILTERS
        for f0 in range(0, FILTERS, BLOCK_K):
            f = f0 + tl.arange(0, BLOCK_K)
            a = tl.load(grads + base[:, None] + f[None, :], mask=fits[:, None] & (f < FILTERS)[None, :], other=0.0)
            column_mask = (f < FILTERS)[:, None] & (c < CHANNELS)[None, :]
            b = tl.load(weights + f[:, None] * DEPTH + tap * CHANNELS + c[None, :], mask=column_mask, other=0.0)
            total = tl.dot(a, b.to(a.dtype), total, input_precision=KIND)
    where = out + user * out_user + m[:, None] * CHANNELS + c[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < places)[:, None] & (c < CHANNELS)[None, :])


@triton.jit
def _weight(
    grad, pixels, out, places, grad_user, pixels_user, out_user,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr,
    FILTERS: tl.constexpr, DEPTH: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    f = tl.program_id(2) * BLOCK_F + tl.arange(0, BLOCK_F)
    tap, channel = k // CHANNELS, k % CHANNELS
    shift = ((tap // SIZE) * WIDTH + tap % SIZE) * CHANNELS + channel
    grads = grad + user * grad_user
    start = pixels + user * pixels_user
    total = tl.zeros((BLOCK_F, BLOCK_K), tl.float32)
    for m0 in range(0, places, BLOCK_M):
        m = m0 + tl.arange(0, BLOCK_M)
        image, place = m // (HIGH * WIDE), m % (HIGH * WIDE)
        corner = (image * HEIGHT + (place // WIDE) * STRIDE) * WIDTH + (place % WIDE) * STRIDE
        known = m < places
        a = tl.load(grads + m[None, :] * FILTERS + f[:, None], mask=known[None, :] & (f < FILTERS)[:, None], other=0.0)
        inside = known[:, None] & (k < DEPTH)[None, :]
        b = tl.load(start + corner[:, None] * CHANNELS + shift[None, :], mask=inside, other=0.0)
        total = tl.dot(a, b.to(a.dtype), total, input_precision=KIND)
    where = out + user * out_user + f[:, None] * DEPTH + k[None, :]
    tl.store(where, total, mask=(f < FILTERS)[:, None] & (k < DEPTH)[None, :])


def lstm_step(
    sums: Tensor, cell: Tensor, state: Tensor, awake: Tensor, gates: Tensor, next_cell: Tensor, next_state: Tensor
) -> None:
    """One time step for all users: see `kernels.lstm_step`."""
    users, batch, hidden = state.shape
    count = batch * hidden
    _lstm_step[(triton.cdiv(count, 256), users)](
        sums, cell, state, awake, gates, next_cell, next_state, count,
        sums.stride(0), cell.stride(0), state.stride(0), awake.stride(0), gates.stride(0), next_cell.stride(0),
        next_state.stride(0), hidden, 256,
    )  # fmt: skip


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _lstm_step(
    sums, cell, state, awake, gates, next_cell, next_state, count,
    sums_user, cell_user, state_user, awake_user, gates_user, next_cell_user, next_state_user,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    row = i // HIDDEN
    first = row * 4 * HIDDEN + i % HIDDEN
    enter = tl.sigmoid(tl.load(sums + user * sums_user + first, mask=real).to(tl.float32))
    keep = tl.sigmoid(tl.load(sums + user * sums_user + first + HIDDEN, mask=real).to(tl.float32))
    candidate = _tanh(tl.load(sums + user * sums_user + first + 2 * HIDDEN, mask=real).to(tl.float32))
    leave = tl.sigmoid(tl.load(sums + user * sums_user + first + 3 * HIDDEN, mask=real).to(tl.float32))
    kind = gates.dtype.element_ty
    tl.store(gates + user * gates_user + first, enter.to(kind), mask=real)
    tl.store(gates + user * gates_user + first + HIDDEN, keep.to(kind), mask=real)
    tl.store(gates + user * gates_user + first + 2 * HIDDEN, candidate.to(kind), mask=real)
    tl.store(gates + user * gates_user + first + 3 * HIDDEN, leave.to(kind), mask=real)
    old_cell = tl.load(cell + user * cell_user + i, mask=real)
    old_state = tl.load(state + user * state_user + i, mask=real).to(tl.float32)
    on = tl.load(awake + user * awake_user + row, mask=real) != 0
    new_cell = keep * old_cell + enter * candidate
    new_state = leave * _tanh(new_cell)
    tl.store(next_cell + user * next_cell_user + i, tl.where(on, new_cell, old_cell), mask=real)
    tl.store(next_state + user * next_state_user + i, tl.where(on, new_state, old_state).to(kind), mask=real)


def lstm_step_backward(
    grad: Tensor, of_state: Tensor, of_cell: Tensor, gates: Tensor, cell: Tensor, before: Tensor, awake: Tensor,
    of_sums: Tensor, carried: Tensor,
) -> None:  # fmt: skip
    """Back through one time step for all users: see `kernels.lstm_step_backward`."""
    users, batch, hidden = carried.shape
    count = batch * hidden
    _lstm_step_backward[(triton.cdiv(count, 256), users)](
        grad, of_state, of_cell, gates, cell, before, awake, of_sums, carried, count,
        grad.stride(0), of_state.stride(0), of_cell.stride(0), gates.stride(0), cell.stride(0), before.stride(0),
        awake.stride(0), of_sums.stride(0), carried.stride(0), hidden, 256,
    )  # fmt: skip


@triton.jit
def _lstm_step_backward(
    grad, of_state, of_cell, gates, cell, before, awake, of_sums, carried, count,
    grad_user, of_state_user, of_cell_user, gates_user, cell_user, before_user, awake_user, of_sums_user, carried_user,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    row = i // HIDDEN
    first = row * 4 * HIDDEN + i % HIDDEN
    enter = tl.load(gates + user * gates_user + first, mask=real).to(tl.float32)
    keep = tl.load(gates + user * gates_user + first + HIDDEN, mask=real).to(tl.float32)
    candidate = tl.load(gates + user * gates_user + first + 2 * HIDDEN, mask=real).to(tl.float32)
    leave = tl.load(gates + user * gates_user + first + 3 * HIDDEN, mask=real).to(tl.float32)
    on = tl.load(awake + user * awake_user + row, mask=real) != 0
    of_out = tl.load(grad + user * grad_user + i, mask=real).to(tl.float32)
    of_out += tl.load(of_state + user * of_state_user + i, mask=real).to(tl.float32)
    curve = _tanh(tl.load(cell + user * cell_user + i, mask=real))
    of_c = tl.load(of_cell + user * of_cell_user + i, mask=real)
    total = of_c + of_out * leave * (1 - curve * curve)
    kind = of_sums.dtype.element_ty
    old = tl.load(before + user * before_user + i, mask=real)
    base = of_sums + user * of_sums_user + first
    tl.store(base, tl.where(on, total * candidate * enter * (1 - enter), 0.0).to(kind), mask=real)
    tl.store(base + HIDDEN, tl.where(on, total * old * keep * (1 - keep), 0.0).to(kind), mask=real)
    tl.store(base + 2 * HIDDEN, tl.where(on, total * enter * (1 - candidate * candidate), 0.0).to(kind), mask=real)
    tl.store(base + 3 * HIDDEN, tl.where(on, of_out * curve * leave * (1 - leave), 0.0).to(kind), mask=real)
    tl.store(of_cell + user * of_cell_user + i, tl.where(on, total * keep, of_c), mask=real)
    where = carried + user * carried_user + i
    tl.store(where, tl.where(on, 0.0, of_out).to(carried.dtype.element_ty), mask=real)
