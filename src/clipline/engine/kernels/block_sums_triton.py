"""What stands before and after the steps of a block on an NVIDIA GPU: one pass over its parameters each.

Updates are not formed: parameters less what they were before are rounded to their own type, as a subtraction would, and
then measured or added up in float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


def spread(before: Tensor, values: Tensor) -> None:
    """Write before (width,) into every row of values (users, width)."""
    users, width = values.shape
    grid = (triton.cdiv(width, 1024), triton.cdiv(users, 8))
    _spread[grid](before, values, users, width, values.stride(0), 1024, 8, num_warps=4)


@triton.jit
def _spread(before, values, users, width, stride, BLOCK: tl.constexpr, USERS: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(before + column, mask=column < width)
    first = tl.program_id(1) * USERS
    for user in range(first, tl.minimum(first + USERS, users)):
        tl.store(values + tl.cast(user, tl.int64) * stride + column, value, mask=column < width)


def add_scaled(values: Tensor, scale: Tensor, total: Tensor, before: Tensor | None = None) -> None:
    """Total (width,) += sum over users of scale (users,) times values (users, width); scale 0 leaves a user out.

    The values are taken less before (1 or users, width), if given.
    """
    users, width = values.shape
    block, together = (128, 16) if width > 1 << 16 else (32, 64)  # few columns: more users at a time
    pointer, apart = _beside(before, values)
    _add_scaled[triton.cdiv(width, block),](
        values, pointer, scale.contiguous(), total, users, width, values.stride(0), apart, before is not None,
        block, together, num_warps=4,
    )  # fmt: skip


@triton.jit
def _add_scaled(
    values, before, scale, total, users, width, stride, apart,
    LESS: tl.constexpr, BLOCK: tl.constexpr, USERS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = column < width
    summed = tl.zeros((USERS, BLOCK), tl.float64)
    for first in range(0, users, USERS):
        user = (first + tl.arange(0, USERS)).to(tl.int64)[:, None]
        here = real & (user < users)
        factor = tl.load(scale + user, mask=user < users, other=0.0)
        value = tl.load(values + user * stride + column, mask=here, other=0.0)
        if LESS:
            value -= tl.load(before + user * apart + column, mask=here, other=0.0)
        summed += tl.where(factor > 0, value.to(tl.float64) * factor, 0.0)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    so_far = tl.load(total + place, mask=place < width, other=0.0)
    tl.store(total + place, so_far + tl.sum(summed, axis=0), mask=place < width)


def squares(values: Tensor, before: Tensor | None = None) -> Tensor:
    """(users,) float64: sums of squares of values (users, width), less before (1 or users, width) if given."""
    users, width = values.shape
    parts = max(1, min(64, triton.cdiv(width, 8192)))
    sums = torch.empty(users, parts, dtype=torch.float64, device=values.device)
    share = triton.cdiv(width, parts * 1024) * 1024
    pointer, apart = _beside(before, values)
    _squares[(parts, users)](
        values, pointer, sums, width, share, values.stride(0), apart, before is not None, 1024, num_warps=4
    )
    return sums.sum(dim=1) if parts > 1 else sums[:, 0]


@triton.jit
def _squares(values, before, sums, width, share, stride, apart, LESS: tl.constexpr, BLOCK: tl.constexpr):
    part, user = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(part * share, tl.minimum(width, (part + 1) * share), BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values + user * stride + column, mask=column < width, other=0.0)
        if LESS:
            value -= tl.load(before + user * apart + column, mask=column < width, other=0.0)
        wide = value.to(tl.float64)
        total += wide * wide
    tl.store(sums + user * tl.num_programs(0) + part, tl.sum(total, axis=0))


def _beside(before: Tensor | None, values: Tensor) -> tuple[Tensor, int]:
    """Where a kernel reads what was before, and how far apart users are there."""
    if before is None:
        return values, 0
    return before, 0 if len(before) == 1 else before.stride(0)


def add_rows(places: Tensor, used: Tensor | None, values: Tensor, scale: Tensor, total: Tensor) -> None:
    """Total (height, width) += scale (users,) times values (users, touched, width), row by row where `places` says.

    What is not `used` is left out. Every row adds up its users in order: the sum is the same every time.
    """
    touched, width = values.shape[1:]
    height = len(total)
    wanted = places if used is None else places.masked_fill(~used, height)
    rows, order = wanted.flatten().sort(stable=True)
    starts = torch.searchsorted(rows, torch.arange(height + 1, device=rows.device))
    grid = (height, triton.cdiv(width, 512))
    _add_rows[grid](
        order, starts, values.contiguous(), scale.contiguous(), total, touched, width, total.stride(0), 512, num_warps=4
    )


@triton.jit
def _add_rows(order, starts, values, scale, total, touched, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    summed = tl.zeros((BLOCK,), tl.float64)
    first, end = tl.load(starts + row), tl.load(starts + row + 1)
    for place in range(first, end):
        entry = tl.load(order + place)
        factor = tl.load(scale + entry // touched)
        value = tl.load(values + entry * width + column, mask=real, other=0.0).to(tl.float64)
        summed += tl.where(factor > 0, value * factor, 0.0)
    if end > first:
        target = total + row * stride + column
        tl.store(target, tl.load(target, mask=real, other=0.0) + summed, mask=real)
