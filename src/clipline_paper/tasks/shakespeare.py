"""Shakespeare: predict the next character of a role's lines, by two layers of long short-term memory."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from clipline import Population
from clipline.layers import MatrixLSTM, he_normal_, keras_embedding, keras_linear
from clipline.tasks import Batch, Counts, LoadedTask, TrainSettings, evaluator, hits_without, initialised, sequence_loss

from ..paper_task import Fields, paper_task
from ..preprocessing import CHARACTER_IDS, PAD, ROW
from ..stand_ins import shakespeare_users

FIELDS: Fields = {"tokens": ((ROW,), "whole")}
STATE = 256  # numbers that each layer carries from character to character


class CharacterLSTM(nn.Module):
    """820,522 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras_embedding(CHARACTER_IDS, 8)
        self.lstm1 = MatrixLSTM(8, STATE)
        self.lstm2 = MatrixLSTM(STATE, STATE)
        self.out = keras_linear(STATE, CHARACTER_IDS)
        for layer in (self.lstm1, self.lstm2):
            he_normal_(layer.weight_ih.data)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) numbers -> (batch, time, 90) logits of what comes next. On padding the state is held."""
        mask = tokens != PAD
        logits: Tensor = self.out(self.lstm2(self.lstm1(self.embedding(tokens), mask), mask))
        return logits


def loss(model: nn.Module, batch: Batch, padding_in_loss: bool = True) -> Tensor:
    """Mean cross-entropy over all 80 positions of all rows, padding included unless `padding_in_loss` is false."""
    tokens = batch["tokens"].long()
    targets = tokens[:, 1:]
    losses = F.cross_entropy(model(tokens[:, :-1]).transpose(1, 2), targets, reduction="none")
    return sequence_loss(losses, targets, padding_in_loss)


def count(model: nn.Module, batch: Batch) -> Counts:
    """Accuracy on everything but padding; unknown characters and ends count."""
    tokens = batch["tokens"].long()
    return {"accuracy": hits_without(model(tokens[:, :-1]), tokens[:, 1:], (PAD,))}


def build(settings: TrainSettings, population: Population, test: Population) -> LoadedTask:
    """The task on these users.

    An example is a row of 81 characters and rows are shuffled; the original shuffles snippets, so that the rows of a
    long one stay together. No state is carried from row to row in either.
    """
    make = partial(initialised, CharacterLSTM)
    chosen = partial(loss, padding_in_loss=bool(settings.padding_in_loss))
    return LoadedTask(population, make, chosen, evaluator(count, test, str(settings.evaluate_on), batch_size=100))


TASK = paper_task(
    "shakespeare",
    title="Shakespeare by role: {users} roles with random text",
    stand_in=shakespeare_users,
    fields=FIELDS,
    build=build,
    test_users=60,
    padding_in_loss=True,  # as in the original, whose loss saw no mask; see `sequence_loss`
)
