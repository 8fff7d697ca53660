"""Layers that run fast for a single user and under `torch.func.vmap`, where each user has their own weights.

vmap over stacked weights turns a matrix product into one batched product, which is fast. It turns a library convolution
or recurrence into a grouped or looped one, which is slow or refused. So these layers are written as matrix products;
their arguments are those of `torch.nn`.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ModuleError, check_choice, check_whole
from ..core.vmap_axis import is_batched, product
from ..gpu.kernels import convolution
from ..gpu.kernels import lstm as lstm_ops
from .vmap_layers import GroupNorm, product_dtype

Padding = int | Literal["same", "valid"]


class PatchConv2d(nn.Module):
    """`nn.Conv2d` on (batch, channels, height, width), as channels-last patches times a matrix.

    `weight` is (out_channels, kernel_size^2 * in_channels), its columns ordered by kernel row, kernel column, channel.
    Padding is a number of zeros on every side, "valid" (none), or "same": ceil(side / stride) outputs; an odd number of
    zeros puts one more below and to the right, as in TensorFlow.

    For a single user torch's convolution computes the same from the same weights, faster on a CPU core.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: Padding = 0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.kernel_size = check_whole("kernel_size", kernel_size, at_least=1, way_out="3 is usual")
        self.stride = check_whole("stride", stride, at_least=1, way_out="1 is usual")
        if isinstance(padding, str):
            check_choice("padding", padding, ("same", "valid"))
        self.padding = padding
        self.in_channels = in_channels
        self.weight = nn.Parameter(torch.empty(out_channels, kernel_size * kernel_size * in_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        glorot_uniform_(self.weight, fan_out=kernel_size * kernel_size * out_channels)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, height, width) -> (batch, out_channels, height, width), channels last in memory."""
        size, stride = self.kernel_size, self.stride
        zeros = (0, 0, 0, 0) if self.padding == "valid" else self._zeros(images.shape[2])
        kernel = self.weight.view(len(self.weight), size, size, -1)
        if is_batched(images, self.weight):
            return convolution.convolved(images, kernel, self.bias, stride, zeros)
        before, after = zeros[:2]
        if before != after:  # torch's convolution pads symmetrically by itself
            images, before = F.pad(images, zeros, value=0.0), 0
        images = images.contiguous(memory_format=torch.channels_last)
        return F.conv2d(images, kernel.permute(0, 3, 1, 2), self.bias, stride, before)  # a channels-last view

    def _zeros(self, side: int) -> tuple[int, int, int, int]:
        """Zeros to the left, right, top and bottom of a square image."""
        if isinstance(self.padding, int):
            return (self.padding,) * 4
        total = max(0, (-(-side // self.stride) - 1) * self.stride + self.kernel_size - side)
        before, after = total // 2, total - total // 2
        return before, after, before, after


class GroupNormReLU(GroupNorm):
    """`nn.GroupNorm` and a ReLU."""

    def forward(self, values: Tensor) -> Tensor:
        """(batch, channels, ...) -> the same."""
        return F.relu(super().forward(values))


class MatrixLSTM(nn.Module):
    """A one-layer LSTM over (batch, time, input_size), in plain matrix products.

    The gates are input, forget, candidate, output, as in Keras and in `nn.LSTM`; there is one bias, as in Keras, and
    its forget part starts at 1; the recurrent weights start orthogonal. State starts at zero.

    For a single user on a CPU core torch's LSTM computes the same from the same weights, up to 2.7 times faster; so it
    does on a GPU where no gradients are asked, as in an evaluation.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.weight_ih = nn.Parameter(torch.empty(4 * hidden_size, input_size))
        self.weight_hh = nn.Parameter(torch.empty(4 * hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(4 * hidden_size))
        glorot_uniform_(self.weight_ih, fan_out=4 * hidden_size)
        nn.init.orthogonal_(self.weight_hh)
        with torch.no_grad():
            self.bias[hidden_size : 2 * hidden_size] = 1.0

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """(batch, time, input_size) -> (batch, time, hidden_size).

        Where `mask` (batch, time) is false the state is held and given out again, as Keras does with `mask_zero`.
        """
        single_user = not is_batched(inputs, self.weight_ih, self.weight_hh)
        by_library = inputs.device.type == "cpu" or not torch.is_grad_enabled()
        if single_user and by_library and (mask is None or bool((mask[:, 1:] <= mask[:, :-1]).all())):
            return self._torch_lstm(inputs, mask)
        return self._step_by_step(inputs, mask)

    def _torch_lstm(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """By `torch.lstm`, for masks that are true first and false after: masked steps repeat the last real output."""
        start = inputs.new_zeros(1, len(inputs), self.hidden_size)
        weights = [self.weight_ih, self.weight_hh, self.bias, torch.zeros_like(self.bias)]
        if inputs.device.type == "cuda":  # side by side in memory, as cuDNN wants them
            flat = torch.cat([weight.flatten() for weight in weights])
            parts = torch.split(flat, [weight.numel() for weight in weights])
            weights = [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
        outputs: Tensor = torch.lstm(inputs, [start, start], weights, True, 1, 0.0, False, False, True)[0]
        if mask is None or bool(mask.all()):
            return outputs
        real = mask.sum(dim=1, keepdim=True)
        last = torch.minimum(torch.arange(inputs.shape[1], device=inputs.device), (real - 1).clamp(min=0))
        held = outputs.gather(1, last.unsqueeze(2).expand_as(outputs))
        return held * (real > 0).unsqueeze(2)

    def _step_by_step(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        rows = inputs.transpose(0, 1).reshape(-1, inputs.shape[2])  # one product over all steps of a user
        dtype = product_dtype(self.weight_ih)
        if is_batched(self.weight_ih):
            gate_inputs = product(rows.to(dtype), self.weight_ih.to(dtype))
        else:
            gate_inputs = rows @ self.weight_ih.T
        gate_inputs = (gate_inputs + self.bias).to(dtype)  # under vmap adding the bias promotes to float32
        gate_inputs = gate_inputs.view(inputs.shape[1], len(inputs), -1)
        active = torch.ones_like(gate_inputs[..., 0], dtype=torch.bool) if mask is None else mask.transpose(0, 1)
        return lstm_ops.recurrence(gate_inputs, self.weight_hh.to(dtype), active).transpose(0, 1)


def bag(features: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    """Features (batch, width), weight (height, out), values (batch, width) -> (batch, out): sums of values times rows.

    As `F.embedding_bag` with `per_sample_weights`. An entry with value 0 is padding, whatever its feature; features
    beyond the last row are allowed only there.
    """
    if features.shape != values.shape or features.ndim != 2:
        raise ModuleError(
            f"features of shape {tuple(features.shape)} and values of shape {tuple(values.shape)} must both be (batch, "
            "width): give every feature its value"
        )
    columns = (values != 0).any(dim=0).nonzero()
    used = int(columns[-1]) + 1 if len(columns) else 1  # drop columns that are all padding: they cost as much as others
    index = features[:, :used].long().clamp(max=len(weight) - 1)
    return F.embedding_bag(index, weight, per_sample_weights=values[:, :used], mode="sum")


class BagLinear(nn.Module):
    """`nn.Linear` on sparse rows, each a few distinct features and their values; no dense row is ever formed.

    `weight` is (in_features, out_features), the transpose of `nn.Linear`'s: a feature's weights are contiguous.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = in_features
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.zeros(out_features))
        glorot_uniform_(self.weight, fan_out=out_features, fan_in=in_features)

    def forward(self, features: Tensor, values: Tensor) -> Tensor:
        """(batch, width) integer features and (batch, width) values -> (batch, out_features).

        An entry with value 0 is padding, whatever its feature; features beyond the last are allowed only there.
        """
        if not is_batched(features, values, self.weight):
            return bag(features, self.weight, values) + self.bias
        # vmap has no rule for embedding_bag and would loop over the users. If the weight has the user's own rows only,
        # and a dense batch over those rows is smaller than the rows themselves, the dense product is faster.
        index = features.long().clamp(max=len(self.weight) - 1)
        if len(self.weight) < self.in_features and len(values) <= self.weight.shape[1]:
            rows = values.new_zeros(len(values), len(self.weight)).scatter_add(1, index, values)
            return rows @ self.weight + self.bias
        return torch.bmm(values.unsqueeze(1), F.embedding(index, self.weight)).squeeze(1) + self.bias


def glorot_uniform_(weight: Tensor, *, fan_out: int, fan_in: int | None = None) -> Tensor:
    """Uniform within sqrt(6 / (fan_in + fan_out)); fan_in is the second axis unless given."""
    limit = math.sqrt(6 / ((weight.shape[1] if fan_in is None else fan_in) + fan_out))
    return nn.init.uniform_(weight, -limit, limit)
