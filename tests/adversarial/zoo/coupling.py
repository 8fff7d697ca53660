"""Models and losses that look across the examples of a batch: widths and filling show in them."""

import torch
from adversarial.entry import EITHER, ISOLATED, Zoo, cross_entropies
from torch import nn

zoo = Zoo()


class Lone(nn.Module):
    """Batch norm that leaves a single example alone, where torch would refuse."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5, track_running_stats=False, eps=0.1)

    def forward(self, x):
        return self.norm(x) if len(x) > 1 else x


@zoo.add(ISOLATED)
def batch_norm_without_statistics():
    return nn.Sequential(nn.Linear(4, 5), Lone(), nn.Linear(5, 3))


@zoo.add(ISOLATED)
def zero_head_behind_batch_statistics():
    """At the initial parameters nothing shows."""
    model = batch_norm_without_statistics()
    nn.init.zeros_(model[2].weight)
    return model


@zoo.net(ISOLATED)
def attention_between_examples(self, x):
    return torch.softmax(x @ x.T, dim=1) @ x


@zoo.loss(ISOLATED)
def losses_scaled_by_the_length_of_the_batch(model, batch):
    return cross_entropies(model, batch) * len(batch["y"])


@zoo.add(ISOLATED)
def scalar_loss_behind_batch_statistics_and_a_zero_head():
    return zero_head_behind_batch_statistics(), lambda model, batch: cross_entropies(model, batch).mean()


@zoo.loss(EITHER)
def batch_written_to(model, batch):
    with torch.no_grad():
        batch["x"].mul_(0.5)
        batch["y"].zero_()
    return cross_entropies(model, batch)
