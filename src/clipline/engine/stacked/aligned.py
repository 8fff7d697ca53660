"""Matrix products in which a row is rounded alike, wherever it stands.

Libraries take other instructions for a matrix, or a row, that does not begin at a multiple of 64 bytes, and these add
up in another order. A user's result would then differ in its last bits with the place among the users. So widths are
padded with zeros to a multiple of 64 bytes: of 300 shapes 68 differed without (MKL, AMD EPYC), none with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_WIDTH = 16  # numbers: 64 bytes of float32


def aligned_product(rows: Tensor, weight: Tensor) -> Tensor:
    """`F.linear`: (..., in) by (out, in) -> (..., out)."""
    return F.linear(_padded(rows), _padded_twice(weight))[..., : len(weight)]


def aligned_product_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `aligned_product`'s rows: (..., out) by (out, in) -> (..., in)."""
    return (_padded(gradient) @ _padded_twice(weight))[..., : weight.shape[1]]


def outer_products(outputs: Tensor, inputs: Tensor) -> Tensor:
    """(users, positions, out) and (users, positions, in) -> (users, out * in): summed over positions."""
    formed = torch.bmm(_padded(outputs).transpose(1, 2), _padded(inputs))
    return formed[:, : outputs.shape[2], : inputs.shape[2]].flatten(1)


def inner_products(rows: Tensor) -> Tensor:
    """(users, positions, width) -> (users, positions, positions): of every two positions of a user.

    At least two users at a time: for one alone libraries share the work among threads otherwise. Of 900 shapes in
    float64, 258 differed with the place without padding on one thread and 231 on two with padding alone; none as here.
    """
    wide = _padded(rows if len(rows) > 1 else rows.repeat(2, 1, 1))
    return torch.bmm(wide, wide.transpose(1, 2))[: len(rows)]


def _padded(rows: Tensor) -> Tensor:
    missing = -rows.shape[-1] % _WIDTH
    return F.pad(rows, (0, missing)) if missing else _at_a_multiple(rows)


def _padded_twice(weight: Tensor) -> Tensor:
    missing = -weight.shape[0] % _WIDTH, -weight.shape[1] % _WIDTH
    return F.pad(weight, (0, missing[1], 0, missing[0])) if any(missing) else _at_a_multiple(weight)


def _at_a_multiple(rows: Tensor) -> Tensor:
    """A slice of something wider may begin anywhere: then a copy, which begins at a multiple of 64 bytes."""
    return (
        rows
        if rows.is_contiguous() and rows.data_ptr() % 64 == 0
        else rows.clone(memory_format=torch.contiguous_format)
    )
