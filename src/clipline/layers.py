"""Layers and initial weights for models that train fast: the same numbers as torch's, in forms that stack well."""

from .engine.core.user_random import UserRandom
from .engine.stacked.layers import BagLinear, GroupNormReLU, MatrixLSTM, MaxPool2d, PatchConv2d, bag
from .tasks.initialisers import he_normal_, keras_embedding, keras_linear

__all__ = [
    "BagLinear", "GroupNormReLU", "MatrixLSTM", "MaxPool2d", "PatchConv2d", "UserRandom", "bag", "he_normal_",
    "keras_embedding", "keras_linear",
]  # fmt: skip
