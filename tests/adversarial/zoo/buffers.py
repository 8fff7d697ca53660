"""Buffers and frozen parameters that users' data move."""

import torch
from adversarial.entry import EITHER, ISOLATED, REFUSED, Zoo, mean
from torch import nn

zoo = Zoo()


@zoo.add(REFUSED)
def batch_norm_with_running_statistics():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


@zoo.net(REFUSED, average=nn.Buffer(torch.zeros(4)))
def moving_average_in_a_buffer(self, x):
    self.average.mul_(0.9).add_(mean(x), alpha=0.1)
    return x - self.average


@zoo.net(EITHER)
def buffer_created_in_forward(self, x):
    if not hasattr(self, "centre"):
        self.register_buffer("centre", mean(x))
    return x - self.centre


@zoo.net(REFUSED, average=nn.Parameter(torch.zeros(4), requires_grad=False))
def frozen_parameter_moved_through_data(self, x):
    self.average.data.mul_(0.9).add_(0.1 * mean(x))
    return x - self.average


@zoo.add(EITHER)
def spectral_norm_parametrised():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(ISOLATED)
def weight_norm_parametrised():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.net(EITHER, by_data=True, average=nn.Buffer(torch.zeros(4)))
def buffer_that_huge_values_alone_move(self, x):
    self.average = torch.maximum(self.average, (x.detach().abs().amax() > 1e6).to(x.dtype))
    return x - self.average
