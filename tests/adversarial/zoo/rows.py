"""Weights of which a user touches few rows (`row_fields`), used and misused."""

import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Zoo
from torch import nn

from clipline.layers import BagLinear, bag

HEIGHT = 600

zoo = Zoo()
FACTS = {"data": "words", "row_fields": {"weight": "words"}}


class Bagging(nn.Module):
    """A table of rows; entries say what is done with it."""

    def __init__(self, width=3):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(HEIGHT, width))


@zoo.add(ISOLATED, **FACTS)
def bag_linear():
    return BagLinear(HEIGHT, 3)


class Lookup(Bagging):
    """What `bag` computes, in operations that run in a stack too."""

    def forward(self, words, values):
        rows = F.embedding(words.long().clamp(max=len(self.weight) - 1), self.weight)
        return torch.bmm(values.unsqueeze(1), rows).squeeze(1)


@zoo.add(ISOLATED, **FACTS)
def lookup_through_embedding():
    return Lookup()


@zoo.add(ISOLATED, **FACTS)
def bag_and_embedding_by_one_user_alone():
    """Only the largest user fills all places, and only then the weight is used otherwise."""

    class Both(Bagging):
        def forward(self, words, values):
            out = bag(words, self.weight, values)
            return out + self.weight[words[:, 0].long()] if bool((values[:, -1] != 0).any()) else out

    return Both()


@zoo.add(EITHER, **FACTS)
def written_in_place():
    class Writing(Bagging):
        def forward(self, words, values):
            with torch.no_grad():
                self.weight[words.long()] *= 0.9
            return bag(words, self.weight, values)

    return Writing()


@zoo.add(EITHER, **FACTS)
def mean_of_the_weight_as_penalty():
    """Behind a scale that is zero at first: then a trial sees nothing of it."""

    class Penalised(Lookup):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, words, values):
            out = super().forward(words, values)
            return out + self.scale * 100 * self.weight.mean() * torch.arange(3, device=out.device)

    return Penalised()


@zoo.add(ISOLATED, **FACTS)
def dropout_behind_the_bag():
    class Dropping(Bagging):
        def __init__(self):
            super().__init__(5)
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, words, values):
            return self.out(self.drop(torch.tanh(bag(words, self.weight, values))))

    return Dropping()
