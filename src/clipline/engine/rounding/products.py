"""Products of users' matrices for a stack, each user with their own: one operation, with a vmap rule of our own.

On processor cores matrices are laid out so that each user's are rounded alike, whoever else is in the stack (`aligned`,
see `known.py`). `matmul`, `linear` and `einsum` stand in the place of torch's in a stack on cores.

Plain twin: torch's own, which run for a single user.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/rounding/test_products.py and tests/engine/stacked/test_vmap_layers.py.
Buys: weight gradients laid out as the weights are (`stacked_product_weight`), emnist_cr on an H200: 39 ms a round
before, 30 after (docs/results/performance.md). Without products of our own at all: 23.1 ms, with them 17.1, later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..stacked.vmap_axis import is_batched, product_width, users_first


def aligned(matrices: Tensor, twice: bool = False) -> Tensor:
    """On cores, every matrix and its rows at multiples of 64 bytes, by columns of zeros (and rows, if `twice`).

    See `single_step/aligned.py`: else the library rounds by the user's place in the stack. When a user left, others
    moved in 179 of 2,958 networks of two layers without, in 0 of 2,500 with; of networks that read a slice of their
    input in 20 of 154 while slices were left as they lie, in 0 of 135 since.
    """
    if matrices.device.type != "cpu":
        return matrices
    grain = 64 // matrices.element_size()
    columns, rows = -matrices.shape[2] % grain, -matrices.shape[1] % grain if twice else 0
    own = matrices[:1] if len(matrices) > 1 and matrices.stride(0) == 0 else matrices  # one for all users, if frozen
    if columns or rows:
        own = F.pad(own, (0, columns, 0, rows))
    elif not own.is_contiguous() or own.data_ptr() % 64:
        own = own.clone(memory_format=torch.contiguous_format)
    return own if len(own) == len(matrices) else own.expand(len(matrices), -1, -1)


def _bmm(left: Tensor, right: Tensor) -> Tensor:
    """`torch.bmm`; in float64 on cores, with several threads, one product after the other.

    A library divides few products among many threads by how many they are: 4 to 8 users moved each other by 8 threads.
    """
    if left.device.type != "cpu" or left.dtype != torch.float64 or torch.get_num_threads() == 1 or not len(left):
        return torch.bmm(left, right)
    return torch.stack([torch.mm(one, other) for one, other in zip(left, right, strict=True)])


def add_product(added: Tensor, rows: Tensor, matrix: Tensor) -> Tensor:
    """(users, m, n) + (users, m, k) by (users, k, n); `matrix` is `aligned` in both directions."""
    if rows.device.type != "cpu":
        return torch.baddbmm(added, rows, matrix)
    return added + _bmm(aligned(rows), matrix)[..., : added.shape[-1]]


def product_of_rows(left: Tensor, right: Tensor) -> Tensor:
    """(users, rows, m) and (users, rows, n) -> (users, m, n), summed over rows."""
    out = _bmm(aligned(left).transpose(1, 2), aligned(right))
    return out if left.device.type != "cpu" else out[:, : left.shape[2], : right.shape[2]].contiguous()


@torch.library.custom_op("clipline::stacked_product", mutates_args=())
def stacked_product(rows: Tensor, weight: Tensor) -> Tensor:
    """(users, rows, in) by (users, out, in) -> (users, rows, out)."""
    out = _bmm(aligned(rows), aligned(weight, twice=True).transpose(1, 2))
    return out[..., : weight.shape[1]].contiguous()


@stacked_product.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:2], weight.shape[1])


@torch.library.custom_op("clipline::stacked_product_weight", mutates_args=())
def stacked_product_weight(grad: Tensor, rows: Tensor) -> Tensor:
    """The weight gradient, laid out as the weights are: autograd's own is transposed, and slow to subtract."""
    return product_of_rows(grad, rows).contiguous()


@stacked_product_weight.register_fake
def _(grad: Tensor, rows: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], grad.shape[2], rows.shape[2])


@torch.library.custom_op("clipline::stacked_product_rows", mutates_args=())
def stacked_product_rows(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the rows."""
    return _bmm(aligned(grad), aligned(weight, twice=True))[..., : weight.shape[2]].contiguous()


@stacked_product_rows.register_fake
def _(grad: Tensor, weight: Tensor) -> Tensor:
    return grad.new_empty(*grad.shape[:2], weight.shape[2])


def _product_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    rows, weight = ctx.saved_tensors
    grad_rows = None
    if ctx.needs_input_grad[0]:
        grad_rows = stacked_product_rows(grad, weight) if grad.device.type == "cpu" else torch.bmm(grad, weight)
    grad_weight = stacked_product_weight(grad, rows) if ctx.needs_input_grad[1] else None
    return grad_rows, grad_weight


stacked_product.register_autograd(_product_backward, setup_context=_product_setup)


@torch.library.custom_op("clipline::product", mutates_args=())
def product(rows: Tensor, weight: Tensor) -> Tensor:
    """One user's rows (rows, in) by (out, in); under vmap, `stacked_product`."""
    return torch.mm(rows, weight.t())


@product.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@product.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    rows, weight = users_first(info, in_dims[0], rows), users_first(info, in_dims[1], weight)
    out = weight.shape[1]
    wide = product_width(out, weight)
    if wide == out:
        return stacked_product(rows, weight), 0
    return stacked_product(rows, F.pad(weight, (0, 0, 0, wide - out)))[..., :out], 0


@torch.library.custom_op("clipline::stacked_matrices", mutates_args=())
def stacked_matrices(left: Tensor, right: Tensor) -> Tensor:
    """(matrices, m, k) by (matrices, k, n) -> (matrices, m, n)."""
    return _bmm(aligned(left), aligned(right, twice=True))[..., : right.shape[2]].contiguous()


@stacked_matrices.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(*left.shape[:2], right.shape[2])


def _matrices_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    left, right = ctx.saved_tensors
    grad_left = stacked_matrices(grad, right.transpose(1, 2)) if ctx.needs_input_grad[0] else None
    return grad_left, stacked_matrices(left.transpose(1, 2), grad) if ctx.needs_input_grad[1] else None


stacked_matrices.register_autograd(_matrices_backward, setup_context=_product_setup)


@torch.library.custom_op("clipline::matrices", mutates_args=())
def matrices(left: Tensor, right: Tensor) -> Tensor:
    """One user's matrices (n, m, k) by (n, k, l); under vmap, `stacked_matrices` of all users'."""
    return torch.bmm(left, right)


@matrices.register_fake
def _(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(*left.shape[:2], right.shape[2])


@matrices.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], left: Tensor, right: Tensor) -> tuple[Tensor, int]:
    left, right = users_first(info, in_dims[0], left), users_first(info, in_dims[1], right)
    out: Tensor = stacked_matrices(left.flatten(0, 1), right.flatten(0, 1))
    return out.reshape(*left.shape[:2], *out.shape[1:]), 0


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """`torch.matmul`; of a stack on cores, `matrices`."""
    left, right = input, other
    if left.device.type != "cpu" or min(left.ndim, right.ndim) == 0 or not is_batched(left, right):
        return torch.matmul(left, right)
    left, right = as_autocast(left, right)
    if left.dtype != right.dtype:
        return torch.matmul(left, right)  # which refuses them
    if left.ndim == 1:
        return matmul(left.unsqueeze(0), right).squeeze(0 if right.ndim == 1 else -2)
    if right.ndim == 1:
        return matmul(left, right.unsqueeze(-1)).squeeze(-1)
    if right.ndim == 2:  # one product over all rows
        rows: Tensor = matrices(left.reshape(1, math.prod(left.shape[:-1]), left.shape[-1]), right.unsqueeze(0))
        return rows.reshape(*left.shape[:-1], right.shape[-1])
    leading = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    count = math.prod(leading)
    sides = (side.expand(*leading, *side.shape[-2:]).reshape(count, *side.shape[-2:]) for side in (left, right))
    out: Tensor = matrices(*sides)
    return out.reshape(*leading, *out.shape[-2:])


def mm(input: Tensor, mat2: Tensor) -> Tensor:
    """`torch.mm` and `torch.bmm`, which take as many axes as each other."""
    return matmul(input, mat2) if input.ndim == mat2.ndim in (2, 3) else torch.mm(input, mat2)  # which refuses them


def addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`torch.addmm`."""
    product = mm(mat1, mat2)
    if beta == 0:
        return alpha * product
    return (input if beta == 1 else beta * input).to(product.dtype) + (product if alpha == 1 else alpha * product)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`."""
    out = matmul(input, weight.transpose(-1, -2) if weight.ndim > 1 else weight)
    return out if bias is None else out + bias.to(out.dtype)


def as_autocast(*values: Tensor) -> tuple[Tensor, ...]:
    """The values in the type to which autocast takes the inputs of a product; as they are where it is off."""
    kind = values[0].device.type
    if not torch.is_autocast_enabled(kind):
        return values
    dtype = torch.get_autocast_dtype(kind)
    return tuple(
        one.to(dtype) if one.dtype in (torch.float32, torch.float16, torch.bfloat16) else one for one in values
    )


def einsum(equation: Any, *operands: Any) -> Tensor:
    """`torch.einsum`; of two operands, `matmul`. Rarer kinds are torch's."""
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    parted = _labels(equation, operands)
    if parted is None:
        return torch.einsum(equation, *operands)
    (left, right), out = parted
    first, second = as_autocast(*operands)
    sizes = dict(zip(left + right, first.shape + second.shape, strict=True))
    for place in reversed([place for place, one in enumerate(left) if one not in right and one not in out]):
        first, left = first.sum(place), left[:place] + left[place + 1 :]
    for place in reversed([place for place, one in enumerate(right) if one not in left and one not in out]):
        second, right = second.sum(place), right[:place] + right[place + 1 :]
    both = [one for one in left if one in right]
    batch, summed = [one for one in both if one in out], [one for one in both if one not in out]
    rows, columns = [one for one in left if one not in right], [one for one in right if one not in left]

    def as_matrices(values: Tensor, labels: str, *groups: Sequence[str]) -> Tensor:
        ordered = values.permute([labels.index(one) for group in groups for one in group])
        return ordered.reshape([math.prod(sizes[one] for one in group) for group in groups])

    product: Tensor = matrices(
        as_matrices(first, left, batch, rows, summed), as_matrices(second, right, batch, summed, columns)
    )
    found = batch + rows + columns
    return product.reshape([sizes[one] for one in found]).permute([found.index(one) for one in out])


def _labels(equation: Any, operands: Sequence[Any]) -> tuple[tuple[str, str], str] | None:
    """The labels of two operands on cores and of the result; None for what is not a product of two such tensors."""
    if not isinstance(equation, str) or len(operands) != 2 or not all(isinstance(one, Tensor) for one in operands):
        return None
    first, second = operands
    inputs, arrow, out = equation.replace(" ", "").partition("->")
    left, comma, right = inputs.partition(",")
    if not comma or "." in equation or len({*left}) < len(left) or len({*right}) < len(right):
        return None
    if first.device.type != "cpu" or first.dtype != second.dtype or not is_batched(first, second):
        return None
    if (len(left), len(right)) != (first.ndim, second.ndim):
        return None
    sizes = dict(zip(left, first.shape, strict=True))
    if any(sizes.get(one, size) != size for one, size in zip(right, second.shape, strict=True)):
        return None  # an axis of length 1 is repeated
    return (left, right), out if arrow else "".join(sorted({*left} ^ {*right}))
