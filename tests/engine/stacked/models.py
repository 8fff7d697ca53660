"""Models of several kinds on 16 features, and the trainers that are compared on them."""

import numpy as np
import torch
from samples import cross_entropies, one_by_one, population_of
from torch import nn

from clipline import LocalSGD
from clipline.random.streams import Streams


class Convolutional(nn.Module):
    """Two convolutions, the second with dilation, group norm, dropout and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(1, 4, 3, 2, padding=1), nn.GroupNorm(2, 4)
        self.conv2, self.row = nn.Conv2d(4, 6, 2, padding=1, dilation=2), nn.Conv1d(6, 5, 3, padding="same")
        self.fc1, self.drop, self.fc2 = nn.Linear(20, 5), nn.Dropout(0.3), nn.Linear(5, 3)

    def forward(self, x):
        maps = torch.relu(self.norm(self.conv1(x.view(-1, 1, 4, 4))))
        maps = self.row(torch.tanh(self.conv2(maps)).flatten(2))
        return self.fc2(self.drop(torch.tanh(self.fc1(maps.flatten(1)))))


class Words(nn.Module):
    """Two embeddings, of which one has padding and one looks up positions; a layer that is used twice."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(4, 5, padding_idx=1), nn.Embedding(16, 5)
        self.twice, self.norm, self.out = nn.Linear(5, 5), nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        words = self.words((4 * torch.sigmoid(x)).long()) + self.places(torch.arange(16))
        return self.out((torch.tanh(self.norm(self.twice(words))) + torch.tanh(self.twice(words))).mean(dim=1))


class Tied(nn.Module):
    """One weight that two layers share, one that a penalty uses too, and one that no layer multiplies with."""

    def __init__(self):
        super().__init__()
        self.enter, self.scale, self.out = nn.Linear(16, 16), nn.Parameter(torch.ones(16)), nn.Linear(16, 3)

    def forward(self, x):
        hidden = torch.tanh(self.enter(x)) * self.scale
        again = nn.functional.linear(hidden, self.enter.weight)
        return self.out(again) + self.out.weight.square().mean()


class Recurrent(nn.Module):
    """A recurrence over four steps. That of `nn.RNN` has no version for many users at once."""

    def __init__(self, layer=None):
        super().__init__()
        self.steps, self.out = layer or nn.RNN(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.out(self.steps(x.view(-1, 4, 4))[0][:, -1])


MODELS = {
    "logistic": lambda: nn.Linear(16, 3),
    "mlp": lambda: nn.Sequential(nn.Linear(16, 20), nn.ReLU(), nn.Linear(20, 3, bias=False)),
    "convolutional": Convolutional,
    "words": Words,
    "tied": Tied,
    "lstm": lambda: Recurrent(nn.LSTM(4, 4, batch_first=True)),
    "gru": lambda: Recurrent(nn.GRU(4, 4, batch_first=True)),
}
SHARED = {
    "logistic": {"weight"},
    "mlp": {"0.weight", "2.weight"},
    "convolutional": {"conv1.weight", "conv2.weight", "fc1.weight", "fc2.weight"},
    "lstm": {"out.weight"},
    "gru": {"out.weight"},
    "words": {"words.weight", "places.weight", "twice.weight", "out.weight"},
    "tied": {"enter.weight"},
}
USERS = np.arange(30)


def plain_trainer(model, *, dtype=torch.float64, population=None, loss=cross_entropies, **problem):
    """One by one, on 30 users of whom one has no example; each trains on one."""
    torch.manual_seed(0)
    population = population_of([*[1] * 20, 0, *[3] * 9], features=16) if population is None else population
    return one_by_one(model().to(dtype), loss, population, LocalSGD(0.5, max_examples=1), Streams(0), **problem)
