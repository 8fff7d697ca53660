"""Activations and the like that round each number alike wherever it stands in an array on processor cores.

torch's own have one routine for whole vector registers and another for what is left at the end of an array, and these
differ in the last bit: see `known.py`. The forms here are made of operations that have one routine.

Plain twin, switch and what it buys: see `replacements.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid(values: Tensor) -> Tensor:
    """`torch.sigmoid`; on cores the exponential of its logarithm, in float32 at least."""
    if values.device.type != "cpu":
        return values.sigmoid()
    return F.logsigmoid(_wide(values)).exp().to(values.dtype)


def softplus(input: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """`F.softplus`."""
    values = _wide(input)
    return torch.where(values * beta > threshold, values, -F.logsigmoid(-beta * values) / beta).to(input.dtype)


def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """`F.silu`."""
    return _given_out(input, inplace, lambda values: values * sigmoid(values))


def mish(input: Tensor, inplace: bool = False) -> Tensor:
    """`F.mish`."""
    return _given_out(input, inplace, lambda values: values * softplus(values).tanh())


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """`F.gelu`."""
    if approximate == "tanh":
        return _given_out(input, False, _gelu_by_tanh)
    return _given_out(input, False, lambda values: 0.5 * values * (1 + (values * math.sqrt(0.5)).erf()))


def _gelu_by_tanh(values: Tensor) -> Tensor:
    cubic = values + 0.044715 * (values * values * values)
    return 0.5 * values * (1 + (math.sqrt(2 / math.pi) * cubic).tanh())


def elu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """`F.elu`."""
    return _given_out(input, inplace, lambda values: _above_or(values, alpha * values.clamp(max=0).expm1()))


def celu(input: Tensor, alpha: float = 1.0, inplace: bool = False) -> Tensor:
    """`F.celu`."""
    return _given_out(input, inplace, lambda values: _above_or(values, alpha * (values.clamp(max=0) / alpha).expm1()))


def selu(input: Tensor, inplace: bool = False) -> Tensor:
    """`F.selu`."""
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return _given_out(input, inplace, lambda values: scale * _above_or(values, alpha * values.clamp(max=0).expm1()))


def glu(input: Tensor, dim: int = -1) -> Tensor:
    """`F.glu`."""
    first, second = input.chunk(2, dim)
    return first * sigmoid(second)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.softmax`, over the last axis: over others torch divides the work by how much there is."""
    return input.movedim(dim, -1).softmax(-1, dtype=dtype).movedim(-1, dim)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.log_softmax`, likewise."""
    return input.movedim(dim, -1).log_softmax(-1, dtype=dtype).movedim(-1, dim)


def nn_softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """`F.softmax`, whose arguments come in another order."""
    return softmax(input, dim, dtype)


def nn_log_softmax(input: Tensor, dim: int, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    """`F.log_softmax`, likewise."""
    return log_softmax(input, dim, dtype)


def huber_loss(
    input: Tensor, target: Tensor, reduction: str = "mean", delta: float = 1.0, weight: Tensor | None = None
) -> Tensor:
    """`F.huber_loss`."""
    error = input - target
    size = error.abs()
    losses = torch.where(size <= delta, 0.5 * error * error, delta * (size - 0.5 * delta))
    losses = losses if weight is None else weight * losses
    if reduction == "mean":
        return losses.mean() if weight is None else losses.sum() / weight.sum()
    return losses.sum() if reduction == "sum" else losses


def smooth_l1_loss(
    input: Tensor,
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    beta: float = 1.0,
) -> Tensor:
    """`F.smooth_l1_loss`: that of Huber over beta, or the distance where beta is 0."""
    if beta == 0:
        return F.l1_loss(input, target, reduction=reduction)
    return huber_loss(input, target, reduction, beta) / beta


def variance(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = 1,
) -> Tensor:
    """`torch.var`, by two passes."""
    if isinstance(dim, bool):  # torch.var(input, unbiased)
        dim, unbiased = None, dim
    axes = (dim,) if isinstance(dim, int) else tuple(dim or range(input.ndim))
    less = (1 if correction is None else correction) if unbiased is None else float(unbiased)
    squares = (input - input.mean(axes, keepdim=True)).square().sum(axes, keepdim=keepdim)
    return squares / max(math.prod(input.shape[axis] for axis in axes) - less, 0)


def deviation(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`torch.std`, whose gradient is 0 where all numbers are equal."""
    found = variance(input, *args, **kwargs)
    none = found == 0
    return torch.where(none, 0.0, torch.where(none, 1.0, found).sqrt())


def _above_or(values: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(values > 0, values, otherwise)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _given_out(input: Tensor, inplace: bool, form: Callable[[Tensor], Tensor]) -> Tensor:
    """What the form makes of the input, in its type; in its place if told so."""
    found = form(_wide(input.clone() if inplace else input)).to(input.dtype)
    return input.copy_(found) if inplace else found
