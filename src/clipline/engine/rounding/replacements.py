"""What runs in the place of torch's operations in a stack on processor cores, so that users are rounded alike.

Plain twin: torch's own operations, which run where users train one by one, and on a GPU.
Switch: `engine="one-by-one"`.
Held equal by: tests/engine/rounding/test_activations.py, test_products.py and test_convolution.py.
Buys: that such models may stack on cores, where bits of the others moved when a user left. A round of 50 users on one
core: nn.LSTM 82 ms one by one, 16 stacked; nn.GRU 103 and 14; an encoder layer 159 and 34 (docs/engine.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import activations as act
from .convolution import in_chunks
from .products import addmm, einsum, linear, matmul, mm

REPLACED: dict[Any, Callable[..., Any]] = {
    torch.sigmoid: act.sigmoid, Tensor.sigmoid: act.sigmoid, torch.special.expit: act.sigmoid,
    F.silu: act.silu, F.mish: act.mish, F.gelu: act.gelu, F.softplus: act.softplus, F.glu: act.glu, F.elu: act.elu,
    F.selu: act.selu, torch.selu: act.selu, F.celu: act.celu, torch.celu: act.celu,
    torch.matmul: matmul, Tensor.matmul: matmul, Tensor.__matmul__: matmul,
    Tensor.__rmatmul__: lambda right, left: matmul(left, right),
    torch.mm: mm, Tensor.mm: mm, torch.bmm: mm, Tensor.bmm: mm, F.linear: linear,
    torch.einsum: einsum, torch.addmm: addmm, Tensor.addmm: addmm,
    torch.conv1d: in_chunks(1, torch.conv1d), torch.conv2d: in_chunks(2, torch.conv2d),
    torch.conv3d: in_chunks(3, torch.conv3d),
    torch.softmax: act.softmax, Tensor.softmax: act.softmax, F.softmax: act.nn_softmax,
    torch.log_softmax: act.log_softmax, Tensor.log_softmax: act.log_softmax, F.log_softmax: act.nn_log_softmax,
    F.huber_loss: act.huber_loss, F.smooth_l1_loss: act.smooth_l1_loss,
    **dict.fromkeys((torch.var, Tensor.var), act.variance), **dict.fromkeys((torch.std, Tensor.std), act.deviation),
}  # fmt: skip
LAYERS = (F.linear, torch.conv1d, torch.conv2d, torch.conv3d)  # whose second argument is a weight
