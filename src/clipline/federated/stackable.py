"""Layers that the engine puts in the place of torch's, so that a stack of users can run them.

The caller's model keeps its own layers: the engine works on a copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import check_number
from .chance import BITS, Chance


def stacked(*tensors: Tensor) -> bool:
    """Whether any of these carries a hidden axis of users, inside `torch.func.vmap` or another transform.

    The compiler cannot ask, and compiles stacks: under `torch.compile` the answer is always yes.
    """
    return torch.compiler.is_compiling() or any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors
    )


def stackable(module: nn.Module) -> nn.Module:
    """The module itself, changed in place: every `nn.Dropout` and `nn.GroupNorm` in it becomes one of these."""
    if type(module) is nn.Dropout:
        return Dropout(module.p).train(module.training)
    if type(module) is nn.GroupNorm:
        return GroupNorm(module)
    for name, child in module.named_children():
        setattr(module, name, stackable(child))
    return module


class Dropout(Chance):
    """`nn.Dropout` from the user's own numbers. The engine puts it in the place of every `nn.Dropout` of a model."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_number("p", p, at_least=0, at_most=1, way_out="0.5 drops every other number")

    def forward(self, values: Tensor) -> Tensor:
        """In training each number is dropped with probability p and the others grow by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return values
        if self.p == 1:
            return values * 0
        kept = self.bits(*values.shape) >= round(self.p * 2**BITS)
        scaled: Tensor = values * (kept.to(values.dtype) * (1 / (1 - self.p)))
        return scaled


class GroupNorm(nn.Module):
    """`nn.GroupNorm` with the same parameters; torch's own has no version for a stack of users."""

    def __init__(self, like: nn.GroupNorm) -> None:
        super().__init__()
        self.num_groups, self.eps = like.num_groups, like.eps
        self.weight, self.bias = like.weight, like.bias

    def forward(self, values: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same, each group of channels of each example with mean 0 and variance 1."""
        if not stacked(values):
            return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps)
        grouped = values.reshape(len(values), self.num_groups, -1, *values.shape[2:])
        axes = tuple(range(2, grouped.ndim))
        centred = grouped - grouped.mean(dim=axes, keepdim=True)
        normal = centred * (centred.square().mean(dim=axes, keepdim=True) + self.eps).rsqrt()
        normal = normal.reshape(values.shape)
        if self.weight is None:
            return normal
        along = (-1, *[1] * (values.ndim - 2))
        return normal * self.weight.view(along) + self.bias.view(along)
