"""Layers that the engine puts in the place of torch's, so that a stack of users can run them.

The caller's model keeps its own layers: the engine works on a copy.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chance import BITS, Chance


def stacked(*tensors: Tensor) -> bool:
    """Whether any of these carries a hidden axis of users, inside `torch.func.vmap` or another transform.

    The compiler cannot ask, and compiles stacks: under `torch.compile` the answer is always yes.
    """
    return torch.compiler.is_compiling() or any(
        torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors
    )


def stackable(module: nn.Module) -> nn.Module:
    """The module itself, changed in place: every `nn.Dropout`, `nn.GroupNorm` and `nn.Linear` becomes one of these."""
    for layer in module.modules():
        if type(layer) is nn.Dropout:
            layer.__class__ = Dropout
            layer.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)
        elif type(layer) is nn.GroupNorm:
            layer.__class__ = GroupNorm
        elif type(layer) is nn.Linear:
            layer.__class__ = Linear
    return module


class Dropout(Chance, nn.Dropout):
    """`nn.Dropout` from the user's own numbers."""

    def forward(self, values: Tensor) -> Tensor:
        """In training each number is dropped with probability p and the others grow by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return values
        if self.p == 1:
            return values * 0
        kept = self.bits(*values.shape) >= round(self.p * 2**BITS)
        scaled: Tensor = values * (kept.to(values.dtype) * (1 / (1 - self.p)))
        return scaled


class Linear(nn.Linear):
    """`nn.Linear`, multiplied from the other side in a stack.

    So the gradient of the weights lies in memory as the weights do, and the step of SGD reads both in order.
    """

    def forward(self, values: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if not stacked(values, self.weight):
            return F.linear(values, self.weight, self.bias)
        rows = values.reshape(-1, self.in_features)
        out = torch.matmul(self.weight, rows.transpose(0, 1)).transpose(0, 1)
        out = out if self.bias is None else out + self.bias.to(out.dtype)
        return out.reshape(*values.shape[:-1], self.out_features)


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`; torch's own has no version for a stack of users."""

    def forward(self, values: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same, each group of channels of each example with mean 0 and variance 1."""
        if not stacked(values):
            return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps)
        grouped = values.reshape(len(values), self.num_groups, -1, *values.shape[2:])
        axes = tuple(range(2, grouped.ndim))
        centred = grouped - grouped.mean(dim=axes, keepdim=True)
        normal = centred * (centred.square().mean(dim=axes, keepdim=True) + self.eps).rsqrt()
        normal = normal.reshape(values.shape)
        if not self.affine:
            return normal
        along = (-1, *[1] * (values.ndim - 2))
        return normal * self.weight.view(along) + self.bias.view(along)
