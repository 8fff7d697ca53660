"""Models that draw: every draw must belong to the user who trains."""

import random

import numpy as np
import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Net, Zoo, cross_entropies
from torch import nn

zoo = Zoo()


@zoo.add(ISOLATED)
def dropout():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3))


@zoo.add(ISOLATED)
def no_randomness_but_the_order_of_batches():
    return nn.Linear(4, 3)


@zoo.add(ISOLATED)
def functional_dropout():
    class Loose(Net):
        def seen(self, x):
            return F.dropout(x, 0.5, self.training)

    return Loose()


@zoo.add(ISOLATED)
def torch_rand():
    class Noisy(Net):
        def seen(self, x):
            return x + torch.rand(4, device=x.device, dtype=x.dtype)

    return Noisy()


@zoo.add(ISOLATED)
def batch_mixed_by_randperm():
    def mixed(model, batch):
        order = torch.randperm(len(batch["y"]), device=batch["x"].device)
        return cross_entropies(model, {**batch, "x": 0.7 * batch["x"] + 0.3 * batch["x"][order]})

    return Net(), mixed


@zoo.add(ISOLATED)
def number_of_draws_by_data():
    """Users draw more or fewer numbers before the one that counts."""

    class Drawing(Net):
        def seen(self, x):
            for _ in range(int((x.detach() > 0).sum())):
                torch.rand(3)
            return x + torch.rand(4, dtype=torch.float64).to(x)

    return Drawing()


@zoo.add(EITHER)
def torch_seed_set_in_forward():
    class Seeding(Net):
        def seen(self, x):
            noise = torch.rand(4, dtype=torch.float64).to(x)
            torch.manual_seed(int(1000 * x.detach().abs().mean().nan_to_num().clamp(max=1e9)))
            return x + noise

    return Seeding()


@zoo.add(EITHER)
def torch_generator_as_attribute():
    class Generating(Net):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(0)

        def seen(self, x):
            return x + torch.rand(4, generator=self.generator, dtype=torch.float64).to(x)

    return Generating()


@zoo.add(EITHER)
def global_numpy():
    class Noisy(Net):
        def seen(self, x):
            return x + torch.from_numpy(np.random.rand(4)).to(x)  # noqa: NPY002  # the mistake itself

    return Noisy()


@zoo.add(EITHER)
def numpy_generator_as_attribute():
    class Noisy(Net):
        def __init__(self):
            super().__init__()
            self.rng = np.random.default_rng(0)

        def seen(self, x):
            return x + torch.from_numpy(self.rng.random(4)).to(x)

    return Noisy()


@zoo.add(EITHER)
def python_random():
    class Noisy(Net):
        def seen(self, x):
            return x * random.choice([0.5, 1.0, 2.0])

    return Noisy()
