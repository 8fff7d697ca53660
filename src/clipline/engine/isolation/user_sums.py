"""Sums over one user's numbers that are the same to the last bit whoever else is in the block.

A library's own sum chooses the order of its additions by the whole tensor, so by the number of users: a norm would move
by a unit in the last place when a user comes or goes. That is no matter for the sum of updates, whose noise covers
rounding, but a bit that says whether the norm is within the clip may flip, and for many users at once. Here numbers are
added by halves, columns i and i + half, by operations that never see two users' numbers together. Columns of zeros at
the end change nothing, and the error is one rounding for each halving.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LEAF = 1024  # columns that are first added up by themselves: any number of such groups can be done at a time
_CACHED = 1 << 18  # numbers in float64 at a time on a core, to fit its cache
_CHUNK = 1 << 22  # the same on a GPU, to bound memory


def sum_columns(values: Tensor) -> Tensor:
    """(users,): the sum of each row of values (users, any)."""
    return _added_up(values.clone())


def squares_by_leaf(values: Tensor) -> Tensor:
    """(users, parts) float64: squares of values (users, width), added up in part; `sum_columns` gives their sums.

    How many parts depends on the width alone. No overflow for float32, whose square is far inside float64.
    """
    users, width = values.shape
    whole, rest = divmod(width, _LEAF)
    parts = values.new_zeros(users, whole + (rest > 0), dtype=torch.float64)
    step = max(1, (_CACHED if values.device.type == "cpu" else _CHUNK) // (_LEAF * max(1, users)))
    squares = values.new_empty(users, min(step, whole), _LEAF, dtype=torch.float64)
    for first in range(0, whole, step):
        leaves = squares[:, : min(step, whole - first)]
        end = first + leaves.shape[1]
        leaves.copy_(values[:, first * _LEAF : end * _LEAF].view(leaves.shape))
        parts[:, first:end] = _added_up(leaves.square_())
    if rest:
        parts[:, -1] = _added_up(values[:, -rest:].to(torch.float64, copy=True).square_())
    return parts


def _added_up(values: Tensor) -> Tensor:
    """(...): sums of values (..., any) by halves, as if columns of zeros made their number a power of two.

    Writes into the values: give what is not used again.
    """
    width = values.shape[-1]
    while width > 1:
        half = 1 << (width - 1).bit_length() - 1
        values[..., : width - half] += values[..., half:width]
        width = half
    return values[..., 0] if width else values.sum(dim=-1)
