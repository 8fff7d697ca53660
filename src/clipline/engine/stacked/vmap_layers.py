"""Layers that replace torch's in the engine's copy of a model, so that they run under vmap; and safe vmap rules.

The caller's model keeps its own layers. `StackSafe` corrects the operations whose vmap rules would mix users up.

Plain twin: torch's own layers and operations, which also run here for a single user.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/stacked/test_vmap_layers.py and test_vmap_rules.py.
Buys: what `gpu/recorded_step.py` says, which could not run without; dense layers by themselves: see `products.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.products import product
from ..core.user_random import UserRandom
from ..core.vmap_axis import is_batched
from ..gpu.kernels import convolution
from ..gpu.kernels.group_norm import normalised
from .attention import explicit_attention, use_stackable_attention
from .sequence_layers import replace_sequence_layer

LIBRARY_IS_FAST = ("cpu",)  # devices where torch's grouped convolution of a stack is faster than patches


def make_stackable(module: nn.Module) -> str:
    """Give a working copy layers and attention that run under vmap; in words, which attention, or "" if as it was."""
    attention = use_stackable_attention(module)
    replace_layers(module)
    return attention


def replace_layers(module: nn.Module) -> nn.Module:
    """The module itself, changed in place: `nn.Dropout`, `GroupNorm`, `Linear` and `Conv2d` become those below.

    `nn.LSTM`, `GRU` and `MultiheadAttention` become those of `sequence_layers`.
    """
    for layer in module.modules():
        if type(layer) is nn.Dropout:
            layer.__class__ = Dropout
            layer.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)
        elif type(layer) is nn.GroupNorm:
            layer.__class__ = GroupNorm
        elif type(layer) is nn.Linear:
            layer.__class__ = Linear
        elif type(layer) is nn.Conv2d:
            layer.__class__ = Conv2d
        else:
            replace_sequence_layer(layer)
    return module


class StackSafe(TorchFunctionMode):
    """Active while the loss of a stack is computed: replaces operations whose vmap rules would mix users up.

    vmap of an embedding concatenates the users' weights: an index beyond a user's last row reads the next user's row,
    and `padding_idx` applies to the first user only. A label out of range is an error for the whole block, and on a GPU
    for the whole process. Here both are recorded, and `spoiled` makes the loss of such a user NaN.
    """

    replacing = False  # whether a replacement runs

    def __init__(self) -> None:
        super().__init__()
        self._invalid: list[Tensor] = []  # () bool each under vmap: one a user

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`, or its replacement."""
        if func not in _CHECKED and func not in _SAFE:
            return func(*args, **(kwargs or {}))
        before, StackSafe.replacing = StackSafe.replacing, True
        try:
            if func in _CHECKED:
                return _CHECKED[func](self._invalid, *args, **(kwargs or {}))
            return _SAFE[func](*args, **(kwargs or {}))
        finally:
            StackSafe.replacing = before

    @property
    def any_invalid(self) -> bool:
        """Whether an index or label was out of range; outside of vmap."""
        return any(bool(invalid) for invalid in self._invalid)

    def spoiled(self, loss: Tensor) -> Tensor:
        """The loss, or NaN if an index or label was out of range."""
        for invalid in self._invalid:
            loss = loss + torch.where(invalid, math.nan, 0.0).to(loss.dtype)
        return loss


def _embedding(
    invalid: list[Tensor],
    numbers: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`. The row at `padding_idx` gets no gradient; an index out of range is recorded in `invalid`."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("embedding with max_norm, scale_grad_by_freq or sparse has no version for a stack")
    height = len(weight)
    rows = F.embedding(numbers.clamp(0, height - 1), weight)
    if padding_idx is not None:
        rows = torch.where((numbers == padding_idx % height).unsqueeze(-1), rows.detach(), rows)
    invalid.append(((numbers < 0) | (numbers >= height)).any())
    return rows


def _with_labels(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.cross_entropy` or `F.nll_loss`; a label out of range is recorded in `invalid`."""

    def safe(invalid: list[Tensor], scores: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # On the CPU a bad label is an error, after which the block trains again, user by user. Floating-point labels
        # are class probabilities; positional `args` are torch's deprecated signature.
        if labels.device.type == "cpu" or labels.is_floating_point() or args:
            return loss(scores, labels, *args, **kwargs)
        classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
        known = ((labels >= 0) & (labels < classes)) | (labels == kwargs.get("ignore_index", -100))
        invalid.append(~known.all())
        return loss(scores, torch.where(known, labels, 0), **kwargs)

    return safe


def _aten_embedding(
    invalid: list[Tensor], weight: Tensor, numbers: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> Tensor:
    """`torch.embedding`: weight first, and padding_idx -1 for none."""
    return _embedding(invalid, numbers, weight, None if padding_idx < 0 else padding_idx, None, 2.0, *args, **kwargs)


def _prod(values: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.prod`. torch's backward pass takes another path, with other overflows, as soon as any user has a zero."""
    values = values if dtype is None else values.to(dtype)
    if not values.is_floating_point() or values.numel() == 0:
        return values.prod() if dim is None else values.prod(dim, keepdim)
    along = values.reshape(-1) if dim is None or values.ndim == 0 else values
    product = along.cumprod(dim or 0).narrow(dim or 0, -1, 1)
    return product.squeeze(dim or 0) if not keepdim or values.ndim == 0 else product


def _select_scatter(values: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """`torch.select_scatter`, whose gradient of `source` is too large under vmap."""
    place = range(values.shape[dim])[index]
    return values.slice_scatter(source.unsqueeze(dim), dim, place, place + 1)


def _index_fill(values: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill`, if all users share the index. Otherwise vmap would read -1 as the last entry of the user before."""
    if is_batched(index):
        raise NotImplementedError("index_fill has no version for a stack: use torch.where")
    return torch.index_fill(values, dim, index, value)


def _view(values: Tensor, *shape: Any, **options: Any) -> Tensor:
    """`Tensor.view`, or a copy where users' values lie in memory otherwise than one user's would."""
    try:
        return values.view(*shape, **options)
    except RuntimeError:
        if options or any(isinstance(one, torch.dtype) for one in shape):
            raise
        return values.reshape(*shape)


_CHECKED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.cross_entropy: _with_labels(F.cross_entropy),
    F.nll_loss: _with_labels(F.nll_loss),
    torch.embedding: _aten_embedding,
}
_SAFE: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: explicit_attention,
    Tensor.view: _view,
    torch.prod: _prod,
    Tensor.prod: _prod,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
}
_ATEN = torch.ops.aten
_UNSAFE_OPS = {
    _ATEN.embedding,
    _ATEN.prod,
    _ATEN.index_fill_,
}  # unsafe under vmap; index_fill decomposes to index_fill_


class Bypass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For the trial of a stack: refuses unsafe operations that bypass `StackSafe`, as in a scripted function.

    So do those in a `torch.autograd.Function`, and `torch.ops.aten` called by name. Some torch operations take another
    path while this mode is active, so the trial must also pass without it.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`."""
        if func.overloadpacket in _UNSAFE_OPS and not StackSafe.replacing:
            raise NotImplementedError(
                f"{func.overloadpacket} has no version for a stack in a scripted function, in an autograd.Function or "
                "called by this name"
            )
        return func(*args, **(kwargs or {}))


class Dropout(UserRandom, nn.Dropout):
    """`nn.Dropout` from the user's own random numbers."""

    def forward(self, values: Tensor) -> Tensor:
        """In training each value is dropped with probability p and the others are scaled by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return values
        if self.p == 1:
            return values * 0
        return values * self.kept(values, self.p)


class Linear(nn.Linear):
    """`nn.Linear`; under vmap, `product`."""

    def forward(self, values: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        device_type = values.device.type
        # A frozen weight has a product for each user on cores, where one over all rows is rounded by how many they are.
        apart = device_type == "cpu" and isinstance(self.weight, nn.Parameter) and is_batched(values)
        if not is_batched(self.weight) and not apart:  # frozen, or shared: one product over the rows of all users
            return F.linear(values, self.weight, self.bias)
        dtype = _product_dtype(self.weight)
        out: Tensor = product(values.reshape(-1, self.in_features).to(dtype), self.weight.to(dtype))
        out = out if self.bias is None else out + self.bias.to(dtype)
        return out.reshape(*values.shape[:-1], self.out_features)


def _product_dtype(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`; stacked on a GPU, patches times a matrix. Rarer kinds are torch's, slow under vmap; all on cores."""

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, height, width)."""
        usual = self.groups == 1 and self.padding_mode == "zeros" and set(self.dilation) == {1}
        square = len({*self.kernel_size}) == 1 and len({*self.stride}) == 1
        fast = images.device.type in LIBRARY_IS_FAST
        if fast or images.ndim != 4 or not (usual and square and is_batched(images, self.weight)):
            return super().forward(images)
        zeros = self._reversed_padding_repeated_twice
        return convolution.convolved(images, self.weight.permute(0, 2, 3, 1), self.bias, self.stride[0], tuple(zeros))


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`; torch's own has no vmap rule."""

    def forward(self, values: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same, each group of channels of each example with mean 0 and variance 1."""
        if not is_batched(values):
            return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps)
        return normalised(values, self.num_groups, self.weight, self.bias, self.eps)
