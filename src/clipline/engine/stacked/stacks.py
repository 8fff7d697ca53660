"""What an operation for a stack of users must know: whether it is in one, and which axis the users are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stacked(*tensors: Tensor) -> bool:
    """Whether any of these carries a hidden axis of users, inside `torch.func.vmap` or another transform.

    The compiler cannot ask, and compiles stacks: under `torch.compile` the answer is always yes.
    """
    return torch.compiler.is_compiling() or any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors
    )


def users_first(info: Any, dim: int | None, tensor: Tensor) -> Tensor:
    """With the axis of users in front, for those too that all users share."""
    return tensor.movedim(dim, 0) if dim is not None else tensor.expand(info.batch_size, *tensor.shape)
