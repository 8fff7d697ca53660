"""SO-NWP: predict the next word of a Stack Overflow user's sentences, by long short-term memory."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from clipline import Population
from clipline.layers import MatrixLSTM, keras_embedding, keras_linear
from clipline.tasks import Batch, Counts, LoadedTask, TrainSettings, evaluator, hits_without, initialised, sequence_loss

from ..paper_task import Fields, paper_task
from ..preprocessing import PAD, SENTENCE, WORD_EOS, WORD_IDS, WORD_OOV
from ..stand_ins import so_nwp_users

STATE = 670  # numbers that the memory carries from word to word
FIELDS: Fields = {"tokens": ((SENTENCE,), "whole")}
VALIDATION_SENTENCES = 10_000  # the original validates on the first so many sentences of the test users


class WordLSTM(nn.Module):
    """4,050,748 parameters; input embedding and output layer share none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras_embedding(WORD_IDS, 96)
        self.lstm = MatrixLSTM(96, STATE)
        self.projection = keras_linear(STATE, 96)
        self.out = keras_linear(96, WORD_IDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) numbers -> (batch, time, 10004) logits of what comes next. On padding the state is held."""
        hidden = self.lstm(self.embedding(tokens), tokens != PAD)
        logits: Tensor = self.out(self.projection(hidden))
        return logits


def loss(model: nn.Module, batch: Batch, padding_in_loss: bool = True) -> Tensor:
    """Mean cross-entropy over all 20 positions of all sentences, padding included unless `padding_in_loss` is false."""
    tokens = batch["tokens"].long()
    targets = tokens[:, 1:]
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return sequence_loss(losses.view_as(targets), targets, padding_in_loss)


def count(model: nn.Module, batch: Batch) -> Counts:
    """Accuracy without padding; also without unknown words; also without ends, which is the paper's metric."""
    tokens = batch["tokens"].long()
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    with_oov = hits_without(logits, targets, (PAD,))
    return {
        "accuracy_no_oov_or_eos": hits_without(logits, targets, (PAD, WORD_OOV, WORD_EOS)),
        "accuracy_no_oov": hits_without(logits, targets, (PAD, WORD_OOV)),
        "accuracy_with_oov": with_oov,
        "num_tokens": (with_oov[1], None),
    }


def build(settings: TrainSettings, population: Population, test: Population) -> LoadedTask:
    """The task on these users. Of a user's sentences the first 1000 are taken, then shuffled."""
    make = partial(initialised, WordLSTM)
    chosen = partial(loss, padding_in_loss=bool(settings.padding_in_loss))
    part = str(settings.evaluate_on)
    evaluate = evaluator(count, test, part, batch_size=100, max_examples=VALIDATION_SENTENCES)
    return LoadedTask(population, make, chosen, evaluate)


TASK = paper_task(
    "so_nwp",
    title="Stack Overflow by user: {users} users with topics of their own",
    stand_in=so_nwp_users,
    fields=FIELDS,
    build=build,
    test_users=40,
    padding_in_loss=True,  # as in the original, whose loss saw no mask; see `sequence_loss`
)
