"""Helpers for operations that may run under vmap: whether they do, which axis counts users, widths that suit a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .precision import kernels_in_use

PADDED_ON = ("cuda",)  # devices whose products are much slower where a side is no multiple of 32 bytes
_GRAIN = 32  # bytes
_WIDE = 512  # numbers: a shorter side does not repay the padding


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


def product_width(width: int, like: Tensor) -> int:
    """To how many numbers a long side of a product is to be padded with zeros; the plain way is not to.

    Switch: `FastParts.kernels`.
    Held equal by: tests/engine/stacked/test_vmap_layers.py, tests/engine/gpu/kernels/test_lstm.py.
    Buys: so_nwp on an H200, 100 real users: 101 ms of kernels a round without, 87 with (docs/results/performance.md).
    """
    grain = _GRAIN // like.element_size()
    if width < _WIDE or like.device.type not in PADDED_ON or not kernels_in_use():
        return width
    return -(-width // grain) * grain
