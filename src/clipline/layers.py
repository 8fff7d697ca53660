"""Layers and initial weights for models that train fast: the same numbers as torch's, in forms that stack well."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .engine.core.user_random import UserRandom
from .engine.stacked.layers import BagLinear, GroupNormReLU, MatrixLSTM, PatchConv2d, bag, glorot_uniform_

__all__ = [
    "BagLinear", "GroupNormReLU", "MatrixLSTM", "PatchConv2d", "UserRandom", "bag", "he_normal_",
    "keras_embedding", "keras_linear",
]  # fmt: skip

_SPREAD_OF_CUT_NORMAL = 0.87962566103423978  # standard deviation of a normal number cut at two standard deviations


def he_normal_(weight: Tensor) -> Tensor:
    """Normal, cut at two standard deviations, with variance 2 / fan_in after the cut; fan_in is the second axis.

    Not `nn.init.trunc_normal_`, which draws other numbers in other versions of torch and took 1.3 s for a ResNet-18.
    """
    spread = math.sqrt(2 / weight.shape[1]) / _SPREAD_OF_CUT_NORMAL
    with torch.no_grad():  # by the inverse of the distribution function of what is left between the cuts
        within = math.erf(math.sqrt(2))
        weight.uniform_(-within, within).erfinv_().mul_(math.sqrt(2) * spread)
        return weight.clamp_(-2 * spread, 2 * spread)


def keras_linear(in_features: int, out_features: int) -> nn.Linear:
    """`nn.Linear` that starts as Keras' `Dense` does: Glorot-uniform weights and no bias."""
    layer = nn.Linear(in_features, out_features)
    glorot_uniform_(layer.weight.data, fan_out=out_features)
    nn.init.zeros_(layer.bias)
    return layer


def keras_embedding(rows: int, columns: int) -> nn.Embedding:
    """`nn.Embedding` that starts as Keras' does: uniform within 0.05, also the row of the padding."""
    layer = nn.Embedding(rows, columns)
    with torch.no_grad():
        layer.weight.uniform_(-0.05, 0.05)
    return layer
