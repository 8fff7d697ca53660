"""Operations that may run under vmap: whether they do, which axis counts users, and products of matrices.

The product is one operation, with a vmap rule of our own.

Plain twin: torch's own, which runs for a single user.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/stacked/test_vmap_layers.py.
Buys: weight gradients laid out as the weights are (`stacked_product_weight`), emnist_cr on an H200: 39 ms a round
before, 30 after (benchmarks/results/README.md). Without products of our own at all: 23.1 ms, with them 17.1, later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_batched(*tensors: Tensor) -> bool:
    """Whether any of these is batched over users, inside `torch.func.vmap` or another transform.

    Under `torch.compile` always true: the compiler cannot ask, and the engine compiles stacks only.
    """
    return torch.compiler.is_compiling() or any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors
    )


def in_vmap() -> bool:
    """Whether this runs inside `torch.func.vmap` or another transform, or is being compiled; see `is_batched`."""
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None


def users_first(info: Any, dim: int | None, tensor: Tensor) -> Tensor:
    """The tensor with the users' axis first; expanded if all users share it."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(info.batch_size, *tensor.shape)


def product_of_rows(left: Tensor, right: Tensor) -> Tensor:
    """(users, rows, m) and (users, rows, n) -> (users, m, n), summed over rows."""
    return torch.bmm(left.transpose(1, 2), right)


@torch.library.custom_op("clipline::stacked_product", mutates_args=())
def stacked_product(rows: Tensor, weight: Tensor) -> Tensor:
    """(users, rows, in) by (users, out, in) -> (users, rows, out)."""
    return torch.bmm(rows, weight.transpose(1, 2))


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


def _product_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    rows, weight = ctx.saved_tensors
    grad_rows = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
    return grad_rows, stacked_product_weight(grad, rows) if ctx.needs_input_grad[1] else None


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
    return stacked_product(users_first(info, in_dims[0], rows), users_first(info, in_dims[1], weight)), 0
