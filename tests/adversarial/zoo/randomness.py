"""Models that draw: every draw must belong to the user who trains."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Zoo, cross_entropies
from torch import nn

zoo = Zoo()


@zoo.add(ISOLATED)
def dropout():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))


@zoo.add(ISOLATED)
def no_randomness_but_the_order_of_batches():
    return nn.Linear(4, 3)


@zoo.net(ISOLATED)
def functional_dropout(self, x):
    return F.dropout(x, 0.5, self.training)


@zoo.loss(ISOLATED)
def batch_mixed_by_randperm(model, batch):
    order = torch.randperm(len(batch["y"]), device=batch["x"].device)
    return cross_entropies(model, {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][order]})


@zoo.net(EITHER)
def torch_seed_set_in_forward(self, x):
    noise = torch.rand(4, dtype=torch.float64).to(x)
    torch.manual_seed(int(1000 * x.detach().abs().mean().nan_to_num().clamp(max=1e9)))
    return x + noise


@zoo.net(EITHER, generator=torch.Generator())
def torch_generator_as_attribute(self, x):
    return x + torch.rand(4, generator=self.generator, dtype=torch.float64).to(x)


@zoo.net(EITHER)
def global_numpy(self, x):
    return x + torch.from_numpy(np.random.rand(4)).to(x)  # noqa: NPY002  # the mistake itself


@zoo.net(EITHER, rng=np.random.default_rng(0))
def numpy_generator_as_attribute(self, x):
    return x + torch.from_numpy(self.rng.random(4)).to(x)


@zoo.net(EITHER)
def python_random(self, x):
    return x * random.choice([0.5, 1.0, 2.0])
