"""Sums over one user's numbers that are the same to the last bit whoever else is in the block.

A library's own sum chooses the order of its additions by the whole tensor, so by the number of users: a norm would move
by a unit in the last place when a user comes or goes. That is no matter for the sum of updates, whose noise covers
rounding, but a bit that says whether the norm is within the clip may flip, and for many users at once. Here numbers are
added by halves, columns i and i + half, by operations that never see two users' numbers together. Columns of zeros at
the end change nothing, and the error is one rounding for each halving.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAF = 1024  # columns that are first added up by themselves: any number of such groups can be done at a time
_CACHED = 1 << 18  # numbers in float64 at a time on a core, to fit its cache
_CHUNK = 1 << 22  # the same on a GPU, to bound memory


def sum_columns(values: Tensor) -> Tensor:
    """(users,): the sum of each row of values (users, any)."""
    return _halved(_padded(values, _power_of_two(values.shape[1])).clone())


def squares_by_leaf(values: Tensor) -> Tensor:
    """(users, parts) float64: squares of values (users, width), added up in part; `sum_columns` gives their sums.

    How many parts depends on the width alone. No overflow for float32, whose square is far inside float64.
    """
    users, width = values.shape
    whole, rest = divmod(width, _LEAF)
    sums = [values.new_zeros(users, 0, dtype=torch.float64)]
    step = max(1, (_CACHED if values.device.type == "cpu" else _CHUNK) // (_LEAF * max(1, users)))
    for first in range(0, whole, step):
        last = min(first + step, whole)
        squares = _squared(values[:, first * _LEAF : last * _LEAF])
        sums.append(_halved(squares.view(users, last - first, _LEAF)))
    if rest:
        sums.append(_halved(_padded(_squared(values[:, -rest:]), _power_of_two(rest))).unsqueeze(1))
    return torch.cat(sums, dim=1)


def _squared(values: Tensor) -> Tensor:
    return values.to(torch.float64, copy=True).square_()


def _halved(values: Tensor) -> Tensor:
    """(...): sums of values (..., a power of two). Writes into them."""
    width = values.shape[-1]
    while width > 1:
        width //= 2
        values[..., :width] += values[..., width : 2 * width]
    return values[..., 0]


def _padded(values: Tensor, width: int) -> Tensor:
    """With columns of zeros at the end, as many as are missing."""
    return values if values.shape[1] == width else F.pad(values, (0, width - values.shape[1]))


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
