"""Weights of which a user touches few rows (`row_fields`), used and misused."""

import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Zoo
from torch import nn

from clipline.engine.core.recorded_weight import bag
from clipline.engine.stacked.layers import BagLinear

HEIGHT = 600

zoo = Zoo()
FACTS = {"data": "words", "row_fields": {"weight": "words"}}


class Bagging(nn.Module):
    """A table of rows; entries say what is done with it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(HEIGHT, 3))


def looked_up(words, weight, values):
    """What `bag` computes, in operations that run in a stack too."""
    rows = F.embedding(words.long().clamp(max=len(weight) - 1), weight)
    return torch.bmm(values.unsqueeze(1), rows).squeeze(1)


@zoo.add(ISOLATED, **FACTS)
def bag_linear():
    return BagLinear(HEIGHT, 3)


@zoo.add(ISOLATED, **FACTS)
def lookup_through_bag():
    class Lookup(Bagging):
        def forward(self, words, values):
            return bag(words, self.weight, values)

    return Lookup()


@zoo.add(ISOLATED, **FACTS)
def lookup_through_embedding():
    class Lookup(Bagging):
        def forward(self, words, values):
            return looked_up(words, self.weight, values)

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


def shrink(weight: torch.Tensor) -> int:
    weight.mul_(0.9)
    return 0


@zoo.add(EITHER, **FACTS)
def written_through_a_scripted_function():
    scripted = torch.jit.script(shrink)

    class Writing(Bagging):
        def forward(self, words, values):
            with torch.no_grad():
                scripted(self.weight)
            return bag(words, self.weight, values)

    return Writing()


class Penalised(Bagging):
    """A penalty on all rows, behind a scale that is zero at first: then a trial sees nothing of it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, words, values):
        out = looked_up(words, self.weight, values)
        return out + self.scale * self.penalty() * torch.arange(3, device=out.device)


@zoo.add(EITHER, **FACTS)
def mean_of_the_weight_as_penalty():
    class Mean(Penalised):
        def penalty(self):
            return 100 * self.weight.mean()

    return Mean()


@zoo.add(EITHER, **FACTS)
def weight_bound_anew():
    class Binding(Bagging):
        def forward(self, words, values):
            self.weight.data = self.weight.data.clamp(-0.1, 0.1)
            return bag(words, self.weight, values)

    return Binding()


@zoo.add(EITHER, **FACTS)
def former_rows_kept():
    class Keeping(Bagging):
        last = None

        def forward(self, words, values):
            out = bag(words, self.weight, values)
            before, self.last = self.last, out.detach().mean(dim=0)
            return out if before is None else out + before

    return Keeping()


@zoo.add(ISOLATED, **FACTS)
def dropout_behind_the_bag():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(0.1 * torch.randn(HEIGHT, 5))
            self.drop, self.out = nn.Dropout(0.5), nn.Linear(5, 3)

        def forward(self, words, values):
            return self.out(self.drop(torch.tanh(bag(words, self.weight, values))))

    return Dropping()
