"""Triton kernels around the steps of a block: broadcast the parameters, then measure and sum the updates.

Each is one pass over memory. The update (parameters minus the starting point `before`) is not stored: the kernels
subtract on the fly, round to the parameters' type as a subtraction would, and accumulate in float64.

Plain twin: the torch operations of `engine/core/updates.py`, used off the GPU and where Triton is absent.
Switch: `FastParts.kernels`.
Held equal by: tests/engine/gpu/kernels/test_block_sums_triton.py (needs a GPU).
Buys: emnist_cr on an H200, 22 ms a round before and 18.6 after, together with starting the next round before the clip
is read (docs/results/performance.md).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


def spread(before: Tensor, values: Tensor) -> None:
    """Broadcast: write before (width,) into every row of values (users, width)."""
    users, width = values.shape
    grid = (triton.cdiv(width, 1024), triton.cdiv(users, 8))
    _spread[grid](before, values, users, width, values.stride(0), 1024, 8, num_warps=4)


@triton.jit(do_not_specialize=["users"])  # or it would be compiled again for multiples of 16
def _spread(before, values, users, width, stride, BLOCK: tl.constexpr, USERS: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(before + column, mask=column < width)
    first = tl.program_id(1) * USERS
    for user in range(first, tl.minimum(first + USERS, users)):
        tl.store(values + tl.cast(user, tl.int64) * stride + column, value, mask=column < width)


def add_scaled(values: Tensor, scale: Tensor, total: Tensor, before: Tensor | None = None) -> None:
    """Total (width,) += sum over users of scale (users,) times values (users, width); scale 0 leaves a user out.

    If `before` (1 or users, width) is given, it is subtracted from the values first.
    """
    users, width = values.shape
    block, users_at_once = (128, 16) if width > 1 << 16 else (32, 64)  # few columns: more users at once
    start_pointer, start_stride = _start_pointer(before, values)
    _add_scaled[triton.cdiv(width, block),](
        values, start_pointer, scale.contiguous(), total, users, width, values.stride(0), start_stride,
        before is not None, block, users_at_once, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["users"])
def _add_scaled(
    values, before, scale, total, users, width, stride, start_stride,
    SUBTRACT: tl.constexpr, BLOCK: tl.constexpr, USERS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    valid = column < width
    summed = tl.zeros((USERS, BLOCK), tl.float64)
    for first in range(0, users, USERS):
        user = (first + tl.arange(0, USERS)).to(tl.int64)[:, None]
        inside = valid & (user < users)
        factor = tl.load(scale + user, mask=user < users, other=0.0)
        value = tl.load(values + user * stride + column, mask=inside, other=0.0)
        if SUBTRACT:
            value -= tl.load(before + user * start_stride + column, mask=inside, other=0.0)
        summed += tl.where(factor > 0, value.to(tl.float64) * factor, 0.0)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    so_far = tl.load(total + place, mask=place < width, other=0.0)
    tl.store(total + place, so_far + tl.sum(summed, axis=0), mask=place < width)


def squares(values: Tensor, before: Tensor | None = None, used: Tensor | None = None) -> Tensor:
    """(users, parts) float64: squares of values (users, width), minus before (1 or users, width) if given, in parts.

    With `used` (users, rows) the columns are rows of equal width, and those that are not used count as 0. The number of
    parts depends on the width alone, and each is summed by a program of its own: nobody else is in it.
    """
    users, width = values.shape
    parts = max(1, min(64, triton.cdiv(width, 8192)))
    sums = torch.empty(users, parts, dtype=torch.float64, device=values.device)
    share = triton.cdiv(width, parts * 1024) * 1024
    start_pointer, start_stride = _start_pointer(before, values)
    row_width = width if used is None else width // used.shape[1]
    _squares[(parts, users)](
        values, start_pointer, values if used is None else used.contiguous(), sums, width, share, values.stride(0),
        start_stride, row_width, before is not None, used is not None, 1024, num_warps=4,
    )  # fmt: skip
    return sums


# The same machine code wherever a user's numbers lie: compiled for aligned ones, it would add in another order.
@triton.jit(do_not_specialize=["values", "before", "used", "stride", "start_stride"])
def _squares(
    values, before, used, sums, width, share, stride, start_stride, row_width,
    SUBTRACT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    part, user = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(part * share, tl.minimum(width, (part + 1) * share), BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values + user * stride + column, mask=column < width, other=0.0)
        if SUBTRACT:
            value -= tl.load(before + user * start_stride + column, mask=column < width, other=0.0)
        if MASKED:
            kept = tl.load(used + user * (width // row_width) + column // row_width, mask=column < width, other=0)
            value = tl.where(kept != 0, value, 0.0)
        value64 = value.to(tl.float64)
        total += value64 * value64
    tl.store(sums + user * tl.num_programs(0) + part, tl.sum(total, axis=0))


def _start_pointer(before: Tensor | None, values: Tensor) -> tuple[Tensor, int]:
    """The tensor that a kernel reads the starting point from, and its stride between users."""
    if before is None:
        return values, 0
    return before, 0 if len(before) == 1 else before.stride(0)


def add_rows(
    places: Tensor, used: Tensor | None, values: Tensor, scale: Tensor, total: Tensor, before: Tensor | None = None
) -> None:
    """Scatter-add values (users, touched, width): row places[u, t] of total (height, width) += scale[u] * values[u, t].

    If `before`, of the same shape, is given, it is subtracted from the values first. Entries that are not `used` are
    left out. Each row adds its users in a fixed order, so the sum is deterministic.
    """
    touched, width = values.shape[1:]
    height = len(total)
    wanted = places if used is None else places.masked_fill(~used, height)
    rows, order = wanted.flatten().int().sort(stable=True)  # of 32 bits: half the passes
    starts = torch.searchsorted(rows, torch.arange(height + 1, dtype=torch.int32, device=rows.device))
    grid = (height, triton.cdiv(width, 512))
    _add_rows[grid](
        order, starts, values.contiguous(), values if before is None else before.contiguous(), scale.contiguous(),
        total, touched, width, total.stride(0), before is not None, 512, num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_rows(
    order, starts, values, before, scale, total, touched, width, stride, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = column < width
    summed = tl.zeros((BLOCK,), tl.float64)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    for place in range(first, end):
        entry = tl.load(order + place)
        factor = tl.load(scale + entry // touched)
        value = tl.load(values + entry * width + column, mask=valid, other=0.0)
        if SUBTRACT:
            value -= tl.load(before + entry * width + column, mask=valid, other=0.0)
        summed += tl.where(factor > 0, value.to(tl.float64) * factor, 0.0)
    if end > first:
        target = total + row * stride + column
        tl.store(target, tl.load(target, mask=valid, other=0.0) + summed, mask=valid)
