"""Layers that the engine puts in the place of torch's, so that a stack of users can run them.

The caller's model keeps its own layers: the engine works on a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as _modes
from torch.utils._python_dispatch import TorchDispatchMode

from ..cpu.fused_linear import FusedLinearStep
from ..kernels import convolution
from ..user_random import UserRandom
from .stacks import stacked, users_first

LIBRARY_IS_FAST = ("cpu",)  # devices whose convolution of a stack, one group a user, is faster than patches


def stackable(module: nn.Module) -> nn.Module:
    """The module itself, changed in place: `nn.Dropout`, `GroupNorm`, `Linear` and `Conv2d` become these here."""
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
    return module


class StackSafe(TorchFunctionMode):
    """Active while the loss of a stack is computed: does otherwise what torch's version for many users would mix up.

    torch lays the embeddings of all users end to end: a number beyond a user's last row reads the next user's, and a
    `padding_idx` holds for the first user alone. A label out of range is an error for a whole block, and on a GPU for
    the whole process. Here both are noted, and `spoiled` makes the loss of such a user NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wrong: list[Tensor] = []  # () bool each, one a user

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`, or what takes its place."""
        if func in _CHECKED:
            return _CHECKED[func](self._wrong, *args, **(kwargs or {}))
        safe = _SAFE.get(func, func)
        return safe(*args, **(kwargs or {}))

    def spoiled(self, loss: Tensor) -> Tensor:
        """The loss, or NaN where a number or label was out of range."""
        for wrong in self._wrong:
            loss = loss + torch.where(wrong, math.nan, 0.0).to(loss.dtype)
        return loss


def _embedding(
    wrong: list[Tensor],
    numbers: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`F.embedding`. The row at `padding_idx` gets no gradient; a number that is no row's is `wrong`."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise NotImplementedError("embedding with max_norm, scale_grad_by_freq or sparse has no version for a stack")
    height = len(weight)
    rows = F.embedding(numbers.clamp(0, height - 1), weight)
    if padding_idx is not None:
        rows = torch.where((numbers == padding_idx % height).unsqueeze(-1), rows.detach(), rows)
    wrong.append(((numbers < 0) | (numbers >= height)).any())
    return rows


def _with_labels(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`F.cross_entropy` or `F.nll_loss`; a label that is no class is `wrong`."""

    def safe(wrong: list[Tensor], scores: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # On a processor core it is an error, after which the block trains again, user by user. Labels may be shares
        # of every class, and arguments may stand as in torch's early days.
        if labels.device.type == "cpu" or labels.is_floating_point() or args:
            return loss(scores, labels, *args, **kwargs)
        classes = scores.shape[1] if scores.ndim > 1 else scores.shape[0]
        known = ((labels >= 0) & (labels < classes)) | (labels == kwargs.get("ignore_index", -100))
        wrong.append(~known.all())
        return loss(scores, torch.where(known, labels, 0), **kwargs)

    return safe


def _rows_of(
    wrong: list[Tensor], weight: Tensor, numbers: Tensor, padding_idx: int = -1, *args: Any, **kwargs: Any
) -> Tensor:
    """`torch.embedding`, whose arguments come the other way round and which takes -1 for no padding."""
    return _embedding(wrong, numbers, weight, None if padding_idx < 0 else padding_idx, None, 2.0, *args, **kwargs)


def _prod(values: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """`torch.prod`, whose gradient takes another way, with other overflows, as soon as any user has a zero."""
    values = values if dtype is None else values.to(dtype)
    if not values.is_floating_point() or values.numel() == 0:
        return values.prod() if dim is None else values.prod(dim, keepdim)
    along = values.reshape(-1) if dim is None or values.ndim == 0 else values
    product = along.cumprod(dim or 0).narrow(dim or 0, -1, 1)
    return product.squeeze(dim or 0) if not keepdim or values.ndim == 0 else product


def _select_scatter(values: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """`torch.select_scatter`, whose gradient of `source` is too large in a stack."""
    place = range(values.shape[dim])[index]
    return values.slice_scatter(source.unsqueeze(dim), dim, place, place + 1)


def _index_fill(values: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """`index_fill`, where all users fill the same places: otherwise -1 is the last place of the user before."""
    if stacked(index):
        raise NotImplementedError("index_fill has no version for a stack: use torch.where")
    return torch.index_fill(values, dim, index, value)


_CHECKED: dict[Any, Callable[..., Any]] = {
    F.embedding: _embedding,
    F.cross_entropy: _with_labels(F.cross_entropy),
    F.nll_loss: _with_labels(F.nll_loss),
    torch.embedding: _rows_of,
}
_SAFE: dict[Any, Callable[..., Any]] = {
    torch.prod: _prod,
    Tensor.prod: _prod,
    torch.select_scatter: _select_scatter,
    Tensor.select_scatter: _select_scatter,
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
}
_ATEN = torch.ops.aten
_MIXING = {_ATEN.embedding, _ATEN.prod, _ATEN.index_fill_}  # what torch mixes up; the last is what index_fill becomes


class Bypass(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For the trial of a stack: refuses what goes past `StackSafe`, as the inside of a scripted function does.

    Some operations of torch take another way while it is active, so the trial must pass without it as well.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """`func`. torch takes `StackSafe` off its list of modes while that handles a call: here, it saw none."""
        if func.overloadpacket in _MIXING and any(type(mode) is StackSafe for mode in _modes()):  # type: ignore[no-untyped-call]
            raise NotImplementedError(f"{func.overloadpacket} has no version for a stack in a scripted function")
        return func(*args, **(kwargs or {}))


class Dropout(UserRandom, nn.Dropout):
    """`nn.Dropout` from the user's own numbers."""

    def forward(self, values: Tensor) -> Tensor:
        """In training each number is dropped with probability p and the others grow by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return values
        if self.p == 1:
            return values * 0
        return values * self.kept(values, self.p)


class Linear(nn.Linear):
    """`nn.Linear`; in a stack, `product`; alone, its weights may move without their gradient being formed."""

    factors: FusedLinearStep | None = None  # of the working copy that the layer belongs to

    def forward(self, values: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        if not stacked(values, self.weight):
            if self.factors is not None and self.factors.applies(values, self.weight):
                return self.factors.linear(values, self.weight, self.bias)
            return F.linear(values, self.weight, self.bias)
        kind = values.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.weight.dtype
        out: Tensor = product(values.reshape(-1, self.in_features).to(dtype), self.weight.to(dtype))
        out = out if self.bias is None else out + self.bias.to(dtype)
        return out.reshape(*values.shape[:-1], self.out_features)


class Conv2d(nn.Conv2d):
    """`nn.Conv2d`; in a stack on a GPU, patches times a matrix. Rarer kinds stay the library's, slow in a stack."""

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, height, width)."""
        usual = self.groups == 1 and self.padding_mode == "zeros" and set(self.dilation) == {1}
        square = len({*self.kernel_size}) == 1 and len({*self.stride}) == 1
        fast = images.device.type in LIBRARY_IS_FAST
        if images.ndim != 4 or fast or not (usual and square and stacked(images, self.weight)):
            return super().forward(images)
        zeros = self._reversed_padding_repeated_twice
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        return convolution.convolved(F.pad(images, zeros), weight, self.bias, self.kernel_size[0], self.stride[0])


class GroupNorm(nn.GroupNorm):
    """`nn.GroupNorm`; torch's own has no version for a stack of users."""

    def forward(self, values: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same, each group of channels of each example with mean 0 and variance 1."""
        if not stacked(values):
            return F.group_norm(values, self.num_groups, self.weight, self.bias, self.eps)
        wide = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        grouped = wide.reshape(len(values), self.num_groups, -1, *values.shape[2:])
        axes = tuple(range(2, grouped.ndim))
        centred = grouped - grouped.mean(dim=axes, keepdim=True)
        normal = centred * (centred.square().mean(dim=axes, keepdim=True) + self.eps).rsqrt()
        normal = normal.reshape(values.shape)
        if self.affine:
            along = (-1, *[1] * (values.ndim - 2))
            normal = normal * self.weight.view(along) + self.bias.view(along)
        return normal


@torch.library.custom_op("clipline::stacked_product", mutates_args=())
def stacked_product(rows: Tensor, weight: Tensor) -> Tensor:
    """(users, rows, in) by (users, out, in) -> (users, rows, out)."""
    return torch.bmm(rows, weight.transpose(1, 2))


@stacked_product.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(*rows.shape[:2], weight.shape[1])


@torch.library.custom_op("clipline::stacked_product_weight", mutates_args=())
def stacked_product_weight(grad: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the weights, laid out in memory as they are: torch's own is turned, and slow to subtract."""
    return torch.bmm(grad.transpose(1, 2), rows)


@stacked_product_weight.register_fake
def _(grad: Tensor, rows: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], grad.shape[2], rows.shape[2])


def _product_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _product_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    rows, weight = ctx.saved_tensors
    of_rows = torch.bmm(grad, weight) if ctx.needs_input_grad[0] else None
    of_weight = stacked_product_weight(grad, rows) if ctx.needs_input_grad[1] else None
    return of_rows, of_weight


stacked_product.register_autograd(_product_backward, setup_context=_product_setup)


@torch.library.custom_op("clipline::product", mutates_args=())
def product(rows: Tensor, weight: Tensor) -> Tensor:
    """One user's rows (rows, in) by (out, in); in a stack, `stacked_product`."""
    return torch.mm(rows, weight.t())


@product.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


@product.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], rows: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    return stacked_product(users_first(info, in_dims[0], rows), users_first(info, in_dims[1], weight)), 0
