"""The embedded task: recognise characters by generated writers. No download; a stand-in for federated EMNIST."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data.population import Population
from ...federated.local_sgd import Batch
from ..initialisers import initialised
from ..metrics import held_out
from ..settings import TrainSettings
from ..task import LoadedTask, Task
from .writers import draw_writers

TEST_WRITERS = 1000
_TEST_FIRST = 1 << 36  # test writers are numbered far above any training writer, so that nobody is both
_POPULATION_SEED = 2021  # the population is the same whatever the seed of the training


class HandwritingNet(nn.Module):
    """Two strided convolutions and a linear layer, small enough for a phone and for noise in every weight."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 5, stride=2)
        self.conv2 = nn.Conv2d(8, 16, 5, stride=2)
        self.out = nn.Linear(16 * 4 * 4, classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """(batch, 28, 28) uint8, paper 255 -> (batch, classes) logits. Ink becomes 1 and paper 0."""
        ink = 1 - pixels.to(self.out.weight.dtype).unsqueeze(1) / 255
        hidden = F.relu(self.conv2(F.relu(self.conv1(ink))))
        logits: Tensor = self.out(hidden.flatten(1))
        return logits


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,): cross-entropy, of which the mean is taken."""
    return F.cross_entropy(model(batch["pixels"]), batch["labels"].long(), reduction="none")


def load(settings: TrainSettings) -> LoadedTask:
    """Draw the training writers, and test writers whom no training ever sees."""
    classes = settings.classes or 10  # the digits
    population = writers_population(0, settings.drawn_users(), classes)
    test = writers_population(_TEST_FIRST, TEST_WRITERS, classes)
    make = partial(initialised, partial(HandwritingNet, classes))
    rows = held_out(test, str(settings.evaluate_on))
    pixels = torch.from_numpy(test.fields["pixels"][rows])
    labels = torch.from_numpy(test.fields["labels"][rows])

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        device = next(model.parameters()).device
        guesses = torch.cat([model(block.to(device)).argmax(dim=1) for block in torch.split(pixels, 1000)])
        return {"accuracy": float((guesses.cpu() == labels).double().mean())}

    return LoadedTask(population, make, loss, evaluate, baseline=float(labels.bincount().max()) / len(labels))


def writers_population(first: int, users: int, classes: int, mean_examples: float = 12.0) -> Population:
    """`users` writers from number `first` on, with fields `pixels` (28, 28) uint8, paper 255, and `labels` uint8.

    Classes are numbered as in EMNIST: 10 digits, 26 capitals, 26 small letters.
    """
    offsets, pixels, labels = draw_writers(
        first, users, classes=classes, seed=_POPULATION_SEED, mean_examples=mean_examples
    )
    return Population(offsets, {"pixels": pixels, "labels": labels})


TASK = Task(
    name="handwriting",
    title="handwriting of {users} drawn writers",
    metric_name="accuracy",
    settings=TrainSettings(
        task="handwriting",
        rounds=150,
        cohort_size=300,
        client_lr=0.5,
        batch_size=20,
        server_lr=1.0,
        fixed_clip=0.7,
        population_size=40_000,
        classes=10,
        epsilon=4.0,
        clip_start=0.0035,  # a hundred times below the median update norm of the first round
        evaluate_on="original",  # all test writers: nothing is chosen by them here
    ),
    load=load,
)
