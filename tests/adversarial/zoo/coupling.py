"""Models and losses that look across the examples of a batch: widths and filling show in them."""

import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Net, Zoo, cross_entropies
from torch import nn

zoo = Zoo()


@zoo.add(ISOLATED)
def batch_norm_without_statistics():
    norm = nn.BatchNorm1d(5, track_running_stats=False, eps=0.1)
    return nn.Sequential(nn.Linear(4, 5), Lone(norm), nn.Linear(5, 3))


class Lone(nn.Module):
    """Batch norm that leaves a single example alone, where torch would refuse."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x) if len(x) > 1 else x


@zoo.add(ISOLATED)
def zero_head_behind_batch_statistics():
    """At the initial parameters nothing shows."""
    head = nn.Linear(5, 3)
    nn.init.zeros_(head.weight)
    norm = nn.BatchNorm1d(5, track_running_stats=False, eps=0.1)
    return nn.Sequential(nn.Linear(4, 5), Lone(norm), head)


@zoo.add(ISOLATED)
def batch_mean_subtracted():
    class Centred(Net):
        def seen(self, x):
            return x - x.mean(dim=0)

    return Centred()


@zoo.add(ISOLATED)
def attention_between_examples():
    class Attending(Net):
        def seen(self, x):
            return torch.softmax(x @ x.T, dim=1) @ x

    return Attending()


@zoo.add(ISOLATED)
def contrastive_loss():
    def contrastive(model, batch):
        codes = F.normalize(model(batch["x"]), dim=1)
        return F.cross_entropy(4 * codes @ codes.T, torch.arange(len(codes), device=codes.device), reduction="none")

    return Net(), contrastive


@zoo.add(ISOLATED)
def losses_scaled_by_the_length_of_the_batch():
    def scaled(model, batch):
        return cross_entropies(model, batch) * len(batch["y"])

    return Net(), scaled


@zoo.add(ISOLATED)
def scalar_loss():
    def scalar(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return Net(), scalar


@zoo.add(ISOLATED)
def scalar_loss_behind_batch_statistics_and_a_zero_head():
    def scalar(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    return zero_head_behind_batch_statistics(), scalar


@zoo.add(EITHER)
def batch_written_to():
    def spoiling(model, batch):
        with torch.no_grad():
            batch["x"].mul_(0.5)
            batch["y"].zero_()
        return cross_entropies(model, batch)

    return Net(), spoiling
