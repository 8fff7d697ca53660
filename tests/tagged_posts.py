"""Posts of words with tags, and a model that multiplies by its weight in several ways."""

import numpy as np
import torch
from torch import nn

from clipline import Population
from clipline.layers import BagLinear, bag

HEIGHT, TAGS, SIZES = 12, 5, (4, 0, 23, 1, 9)


def posts():
    """Words that repeat in a post and in a user, padding in the middle and beyond the last word, posts of padding."""
    rng = np.random.default_rng(0)
    count = sum(SIZES)
    words = rng.integers(0, HEIGHT - 3, (count, 6)).astype(np.int16)  # three rows that nobody touches
    weights = rng.normal(size=(count, 6)) * (rng.random((count, 6)) < 0.7)
    weights[5] = 0
    words[weights == 0] = rng.integers(0, 2 * HEIGHT, (weights == 0).sum())
    words[0, :2], weights[0, :2] = 3, (0.5, -0.25)
    fields = {"words": words, "weights": weights, "y": rng.integers(0, TAGS, count)}
    return Population(np.concatenate([[0], np.cumsum(SIZES)]), fields)


class Tags(nn.Module):
    def __init__(self, use="once"):
        super().__init__()
        self.tags, self.scale, self.use = BagLinear(HEIGHT, TAGS), nn.Parameter(torch.tensor(0.7)), use

    def forward(self, words, weights):
        logits = self.tags(words, weights)
        rows = words.long().clamp(max=len(self.tags.weight) - 1)
        if self.use == "twice":
            logits = logits + self.tags(words.flip(0), weights.flip(0).square())
        elif self.use == "without gradient":
            with torch.no_grad():
                factor = bag(words, self.tags.weight, weights)
            logits = logits * (1 + factor.tanh())
        elif self.use == "looked up":
            logits = logits + nn.functional.embedding(rows, self.tags.weight).mean(dim=1) * weights.sum()
        elif self.use == "detached":
            logits = logits * (1 + nn.functional.embedding(rows, self.tags.weight.detach()).mean(dim=1).tanh())
        elif self.use == "among others":
            logits = logits + torch.stack([self.tags.weight, self.tags.weight])[1][rows].mean(dim=1)
        elif self.use == "learned values":
            logits = self.tags(words, weights * self.scale)
        elif self.use == "drawn":
            logits = logits * torch.rand(TAGS, dtype=logits.dtype) + self.tags.weight[rows].mean(dim=1)
        return logits


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["words"], batch["weights"]), batch["y"], reduction="none")
