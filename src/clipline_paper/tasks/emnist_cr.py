"""EMNIST-CR: recognise 62 handwritten characters, by a convolutional network with dropout."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from clipline import Population
from clipline.layers import PatchConv2d, keras_linear
from clipline.tasks import Batch, Counts, LoadedTask, TrainSettings, evaluator, initialised

from ..paper_task import Fields, paper_task
from ..stand_ins import emnist_users

CLASSES = 62
HIDDEN = 128  # numbers of the last layer but one
FIELDS: Fields = {"pixels": ((28, 28), "whole"), "labels": ((), "whole")}


class CharacterNet(nn.Module):
    """The network that the original programs call `cnn` (2021) and `cnn_dropout` (since); 1,206,590 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = PatchConv2d(1, 32, 3, padding="valid")
        self.conv2 = PatchConv2d(32, 64, 3, padding="valid")
        self.pool = nn.MaxPool2d(2)
        self.dropout1 = nn.Dropout(0.25)
        self.hidden = keras_linear(12 * 12 * 64, HIDDEN)
        self.dropout2 = nn.Dropout(0.5)
        self.out = keras_linear(HIDDEN, CLASSES)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 28, 28) bytes -> (batch, 62) logits. Paper is 1 and ink 0: no inversion, as in the original."""
        images = pixels.to(self.out.weight.dtype).unsqueeze(1) / 255
        maps = self.pool(self.conv2(F.relu(self.conv1(images))))  # before ReLU, which then has less to do
        flat = self.dropout1(F.relu(maps).permute(0, 2, 3, 1)).flatten(1)  # channels last, as they lie in memory
        logits: Tensor = self.out(self.dropout2(F.relu(self.hidden(flat))))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,): cross-entropy, of which the mean is taken."""
    return F.cross_entropy(model(batch["pixels"]), batch["labels"].long(), reduction="none")


def count(model: nn.Module, batch: Batch) -> Counts:
    """Right answers and answers."""
    right = (model(batch["pixels"]).argmax(dim=1) == batch["labels"].long()).sum()
    return {"accuracy": (right, len(batch["labels"]))}


def build(settings: TrainSettings, population: Population, test: Population) -> LoadedTask:
    """The task on these users."""
    make = partial(initialised, CharacterNet)
    evaluate = evaluator(count, test, str(settings.evaluate_on), batch_size=500, gpu_batch_size=4000)
    return LoadedTask(population, make, loss, evaluate)


TASK = paper_task(
    "emnist_cr",
    title="EMNIST-62 by writer: {users} drawn writers",
    stand_in=emnist_users,
    fields=FIELDS,
    build=build,
    test_users=100,
)
