"""Buffers and frozen parameters that users' data move."""

import torch
import torch.nn.functional as F
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
def instance_norm_with_running_statistics():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (2, 2)), norm, nn.Flatten(), nn.Linear(4, 3))


@zoo.add(EITHER)
def batch_norm_that_tracks_unseen():
    """Its own attribute says no statistics are kept, and the call keeps them."""

    class Norm(Buffered):
        def seen(self, x):
            return F.batch_norm(x, self.average, torch.ones_like(self.average), training=True)

    return Norm()


@zoo.add(REFUSED)
def moving_average_in_a_buffer():
    class Moving(Buffered):
        def seen(self, x):
            self.average.mul_(0.9).add_(x.detach().mean(dim=0), alpha=0.1)
            return x - self.average

    return Moving()


@zoo.add(REFUSED)
def buffer_bound_anew():
    class Moving(Buffered):
        def seen(self, x):
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(dim=0)
            return x - self.average

    return Moving()


@zoo.add(REFUSED)
def buffer_written_through_data():
    class Moving(Buffered):
        def seen(self, x):
            self.average.data.add_(x.detach().mean(dim=0).data)
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
def buffer_that_is_put_back():
    """What is changed and restored in one call is seen by nobody else."""

    class Restoring(Buffered):
        def seen(self, x):
            self.average += x.detach().mean(dim=0)
            out = x - self.average
            self.average.zero_()
            return out

    return Restoring()


@zoo.add(EITHER)
def buffer_whose_version_counts_users():
    """Nothing changes but torch's count of writes, which anybody can read."""

    class Counting(Buffered):
        def seen(self, x):
            self.average.mul_(1.0)
            return x * (1 + self.average._version % 7)

    return Counting()


@zoo.add(EITHER)
def parameter_whose_version_counts_steps():
    class Counting(Net):
        def seen(self, x):
            return x * (1 + self.out.weight._version % 7)

    return Counting()


@zoo.add(EITHER)
def buffer_created_in_forward():
    class Lazy(Net):
        def seen(self, x):
            if not hasattr(self, "centre"):
                self.register_buffer("centre", x.detach().mean(dim=0))
            return x - self.centre

    return Lazy()


@zoo.add(EITHER)
def buffer_deleted_in_forward():
    class Losing(Buffered):
        def seen(self, x):
            if "average" in self._buffers:
                del self.average
                return x
            return -x

    return Losing()


@zoo.add(EITHER)
def buffer_that_is_a_view_of_a_parameter():
    class Viewing(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("view", self.out.weight.data[0])

        def seen(self, x):
            return x + self.view.mean()

    return Viewing()


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


@zoo.add(REFUSED)
def buffer_that_asks_for_a_gradient():
    class Asking(Buffered):
        def seen(self, x):
            sign = -1.0 if self.average.requires_grad else 1.0
            self.average.requires_grad_()
            return sign * x

    return Asking()


@zoo.add(EITHER)
def list_on_a_buffer():
    class Noting(Buffered):
        def __init__(self):
            super().__init__()
            self.average.noted = [0.0]

        def seen(self, x):
            self.average.noted[0] += float(x.detach().abs().sum()) if type(x) is torch.Tensor else 1.0
            return x * self.average.noted[0]

    return Noting()


@zoo.add(ISOLATED)
def sparse_buffer():
    class Graph(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("edges", torch.eye(4).to_sparse())

        def seen(self, x):
            return torch.sparse.mm(self.edges, x.t()).t()

    return Graph()


@zoo.add(EITHER)
def spectral_norm_old():
    layer = nn.utils.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(EITHER)
def spectral_norm_parametrised():
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(EITHER)
def weight_norm_old():
    layer = nn.utils.weight_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(ISOLATED)
def weight_norm_parametrised():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 3))


@zoo.add(EITHER)
def orthogonal_parametrisation():
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 3))


@zoo.add(EITHER)
def parametrisation_cached_for_good():
    """`torch.nn.utils.parametrize.cached` that is never left keeps the first user's weight."""
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 5))

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out, self.kept = layer, nn.Linear(5, 3), None

        def forward(self, x):
            if self.kept is None:
                self.kept = self.layer.weight.detach()
            return self.out(torch.tanh(F.linear(x, self.kept) + self.layer(x)))

    return Caching()


@zoo.add(EITHER, by_data=True)
def buffer_that_huge_values_alone_move():
    class Alarm(Buffered):
        def seen(self, x):
            self.average = torch.maximum(self.average, (x.detach().abs().amax() > 1e6).to(x.dtype))
            return x - self.average

    return Alarm()
