"""The norms and the sum of a block's updates on an NVIDIA GPU, in float64 without a float64 copy of them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: ignore-errors


def add_scaled(values: Tensor, scale: Tensor, total: Tensor) -> None:
    """Total (width,) += sum over users of scale (users,) times values (users, width); scale 0 leaves a user out."""
    users, width = values.shape
    _add_scaled[(triton.cdiv(width, 512),)](
        values, scale.contiguous(), total, users, width, values.stride(0), 512, num_warps=4
    )


@triton.jit
def _add_scaled(values, scale, total, users, width, stride, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    summed = tl.zeros((BLOCK,), tl.float64)
    for user in range(users):
        factor = tl.load(scale + user)
        value = tl.load(values + user.to(tl.int64) * stride + column, mask=real, other=0.0).to(tl.float64)
        summed += tl.where(factor > 0, value * factor, 0.0)
    tl.store(total + column, tl.load(total + column, mask=real) + summed, mask=real)


def squares(values: Tensor) -> Tensor:
    """(users,) float64: sums of squares of values (users, width)."""
    users, width = values.shape
    parts = max(1, min(64, triton.cdiv(width, 8192)))
    sums = torch.empty(users, parts, dtype=torch.float64, device=values.device)
    share = triton.cdiv(width, parts * 1024) * 1024
    _squares[(parts, users)](values, sums, width, share, values.stride(0), 1024, num_warps=4)
    return sums.sum(dim=1)


@triton.jit
def _squares(values, sums, width, share, stride, BLOCK: tl.constexpr):
    part, user = tl.program_id(0), tl.program_id(1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(part * share, tl.minimum(width, (part + 1) * share), BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(values + user * stride + column, mask=column < width, other=0.0).to(tl.float64)
        total += value * value
    tl.store(sums + user * tl.num_programs(0) + part, tl.sum(total, axis=0))
