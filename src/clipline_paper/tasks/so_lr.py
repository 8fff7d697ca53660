"""SO-LR: predict the tags of Stack Overflow posts from their words, by logistic regression for each of 500 tags."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from clipline import Population
from clipline.layers import BagLinear
from clipline.tasks import Batch, Counts, LoadedTask, TrainSettings, evaluator, initialised

from ..paper_task import Fields, paper_task
from ..preprocessing import BAG, TAGS, WORDS
from ..stand_ins import so_lr_users

FIELDS: Fields = {"words": ((BAG,), "whole"), "weights": ((BAG,), "fraction"), "tags": ((None,), "whole")}
VALIDATION_POSTS = 10_000  # the original validates on the first so many posts of the test users
GUESSES = 5


class TagRegression(nn.Module):
    """10,000 words to 500 tags, 5,000,500 parameters; see `BagLinear` for the rows that are never dense."""

    def __init__(self) -> None:
        super().__init__()
        self.tags = BagLinear(WORDS, TAGS)

    def forward(self, words: Tensor, weights: Tensor) -> Tensor:
        """(batch, 128) word numbers and weights -> (batch, 500) logits."""
        logits: Tensor = self.tags(words, weights)
        return logits


def multi_hot(tags: Tensor, like: Tensor) -> Tensor:
    """(batch, any) different tag numbers, padded with -1 -> (batch, 500) of 0 and 1."""
    real = (tags >= 0).to(like.dtype)  # padding adds 0 to the first tag
    return like.new_zeros(len(tags), TAGS).scatter_add_(1, tags.long().clamp(min=0), real)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """(batch,): binary cross-entropy, mean over the tags. The SUM of these is taken: the rate belongs to it."""
    logits = model(batch["words"], batch["weights"])
    true = multi_hot(batch["tags"], logits)
    # Not mean(dim=1), whose gradient is formed for every tag.
    return F.binary_cross_entropy_with_logits(logits, true, reduction="none").sum(dim=1) / TAGS


def count(model: nn.Module, batch: Batch) -> Counts:
    """Recall among the five highest scores, over all true tags of all posts; precision of scores above a half."""
    logits = model(batch["words"], batch["weights"])
    true = multi_hot(batch["tags"], logits)
    guessed = logits > 0
    return {
        "recall_at_5": (true.gather(1, logits.topk(GUESSES, dim=1).indices).sum(), true.sum()),
        "precision": ((true * guessed).sum(), guessed.sum()),
    }


def build(settings: TrainSettings, population: Population, test: Population) -> LoadedTask:
    """The task on these users. Of a user's posts the first 1000 are taken, then shuffled."""
    make = partial(initialised, TagRegression)
    part = str(settings.evaluate_on)
    evaluate = evaluator(
        count, test, part, batch_size=500, gpu_batch_size=VALIDATION_POSTS, max_examples=VALIDATION_POSTS
    )
    return LoadedTask(population, make, loss, evaluate, reduction="sum", row_fields={"tags.weight": "words"})


TASK = paper_task(
    "so_lr",
    title="tagged Stack Overflow by user: {users} users with topics of their own",
    stand_in=so_lr_users,
    fields=FIELDS,
    build=build,
    test_users=100,
)
