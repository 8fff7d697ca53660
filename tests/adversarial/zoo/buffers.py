"""Buffers and frozen parameters that users' data move."""

import torch
from adversarial.entry import EITHER, ISOLATED, REFUSED, Net, Zoo
from torch import nn

zoo = Zoo()


class Buffered(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(4))


@zoo.add(REFUSED)
def batch_norm_with_running_statistics():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@zoo.add(REFUSED)
def moving_average_in_a_buffer():
    class Moving(Buffered):
        def seen(self, x):
            self.average.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
            return x - self.average

    return Moving()


@zoo.add(REFUSED)
def buffer_that_counts_steps():
    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def seen(self, x):
            self.steps += 1
            return x / self.steps

    return Counting()


@zoo.add(EITHER)
def buffer_created_in_forward():
    class Lazy(Net):
        def seen(self, x):
            if not hasattr(self, "centre"):
                self.register_buffer("centre", x.detach().mean(dim=0))
            return x - self.centre

    return Lazy()


@zoo.add(REFUSED)
def frozen_parameter_moved_through_data():
    class Average(Net):
        def __init__(self):
            super().__init__()
            self.average = nn.Parameter(torch.zeros(4), requires_grad=False)

        def seen(self, x):
            self.average.data.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
            return x - self.average

    return Average()


@zoo.add(EITHER)
def spectral_norm_parametrised():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(ISOLATED)
def weight_norm_parametrised():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(EITHER, by_data=True)
def buffer_that_huge_values_alone_move():
    class Alarm(Buffered):
        def seen(self, x):
            self.average = torch.maximum(self.average, (x.detach().abs().amax() > 1e6).to(x.dtype))
            return x - self.average

    return Alarm()
