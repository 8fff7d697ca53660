"""EMNIST-AE: reconstruct handwritten characters from a code of 30 numbers, by a deep autoencoder."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor, nn

from clipline import Population
from clipline.layers import keras_linear
from clipline.tasks import Batch, Counts, LoadedTask, TrainSettings, evaluator, initialised

from ..paper_task import paper_task
from ..stand_ins import emnist_users
from .emnist_cr import FIELDS

WIDTHS = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
CODE = 3  # the layer whose 30 outputs are linear; all others end in a sigmoid


class Autoencoder(nn.Module):
    """Eight dense layers; 2,837,314 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(keras_linear(width, after) for width, after in itertools.pairwise(WIDTHS))

    def forward(self, ink: Tensor) -> Tensor:
        """(batch, 784) in [0, 1] -> its reconstruction, of the same shape."""
        for number, layer in enumerate(self.layers):
            ink = layer(ink) if number == CODE else torch.sigmoid(layer(ink))
        return ink


def ink_of(pixels: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, 28, 28) bytes, paper 255 -> (batch, 784), paper 0 and full ink 1: input and target alike."""
    return 1 - pixels.flatten(1).to(dtype) / 255


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,): of each example, the mean squared error over its 784 pixels.

    Of these the SUM is taken: the learning rate of Table 1 belongs to it and would be 20 times too small for a mean.
    """
    ink = ink_of(batch["pixels"], next(model.parameters()).dtype)
    errors: Tensor = (model(ink) - ink).square().mean(dim=1)
    return errors


def count(model: nn.Module, batch: Batch) -> Counts:
    """Mean squared error: lower is better."""
    return {"mean_squared_error": (loss(model, batch).double().sum(), len(batch["pixels"]))}


def build(settings: TrainSettings, population: Population, test: Population) -> LoadedTask:
    """The task on these users."""
    make = partial(initialised, Autoencoder)
    evaluate = evaluator(count, test, str(settings.evaluate_on), batch_size=500, gpu_batch_size=10_000)
    return LoadedTask(population, make, loss, evaluate, reduction="sum")


TASK = paper_task(
    "emnist_ae",
    title="EMNIST-62 by writer: {users} drawn writers",
    stand_in=emnist_users,
    fields=FIELDS,
    build=build,
    test_users=100,
)
