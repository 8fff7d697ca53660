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
def zero_scale_before_the_batch_mean():
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

        def seen(self, x):
            return x - self.scale * x.mean(dim=0)

    return Scaled()


@zoo.add(ISOLATED)
def batch_mean_subtracted():
    class Centred(Net):
        def seen(self, x):
            return x - x.mean(dim=0)

    return Centred()


@zoo.add(ISOLATED)
def batch_size_in_the_forward_pass():
    class Sized(Net):
        def seen(self, x):
            return x * len(x)

    return Sized()


@zoo.add(ISOLATED)
def other_course_for_whole_batches():
    class Branching(Net):
        def seen(self, x):
            return -x if len(x) == 3 else x

    return Branching()


@zoo.add(ISOLATED)
def softmax_over_the_batch():
    class Attending(Net):
        def seen(self, x):
            return x * torch.softmax(x, dim=0)

    return Attending()


@zoo.add(ISOLATED)
def attention_between_examples():
    class Attending(Net):
        def seen(self, x):
            return torch.softmax(x @ x.T, dim=1) @ x

    return Attending()


@zoo.add(ISOLATED)
def running_sum_along_the_batch():
    class Summing(Net):
        def seen(self, x):
            return x.cumsum(dim=0)

    return Summing()


@zoo.add(ISOLATED)
def order_of_the_batch():
    class Sorting(Net):
        def seen(self, x):
            return x + x.sort(dim=0).values

    return Sorting()


@zoo.add(ISOLATED)
def last_example_added_to_all():
    class Last(Net):
        def seen(self, x):
            return x + x[-1]

    return Last()


@zoo.add(ISOLATED)
def contrastive_loss():
    def contrastive(model, batch):
        codes = F.normalize(model(batch["x"]), dim=1)
        return F.cross_entropy(4 * codes @ codes.T, torch.arange(len(codes), device=codes.device), reduction="none")

    return Net(), contrastive


@zoo.add(ISOLATED)
def losses_relative_to_their_mean():
    def relative(model, batch):
        losses = cross_entropies(model, batch)
        return losses * losses.detach() / losses.detach().mean()

    return Net(), relative


@zoo.add(ISOLATED)
def losses_scaled_by_the_length_of_the_batch():
    def scaled(model, batch):
        return cross_entropies(model, batch) * len(batch["y"])

    return Net(), scaled


@zoo.add(ISOLATED)
def worst_example_alone():
    def worst(model, batch):
        return cross_entropies(model, batch).max()

    return Net(), worst


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
def number_for_whole_batches_and_numbers_otherwise():
    def changing(model, batch):
        losses = cross_entropies(model, batch)
        return losses.mean() if len(losses) == 3 else losses

    return Net(), changing


@zoo.add(EITHER)
def batch_written_to():
    def spoiling(model, batch):
        with torch.no_grad():
            batch["x"].mul_(0.5)
            batch["y"].zero_()
        return cross_entropies(model, batch)

    return Net(), spoiling


@zoo.add(EITHER)
def batch_kept_and_written_to_later():
    """Writes into the last batch, which belonged to another user."""
    kept = []

    def spoiling(model, batch):
        with torch.no_grad():
            for former in kept:
                former.zero_()
            kept[:] = [batch["x"]]
        return cross_entropies(model, batch)

    return Net(), spoiling
