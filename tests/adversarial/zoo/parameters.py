"""Trainable parameters that a forward pass binds anew, replaces, creates or decorates."""

import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Net, Zoo, cross_entropies
from torch import nn

zoo = Zoo()


@zoo.add(EITHER)
def data_bound_to_its_clamp():
    class Clamped(Net):
        def seen(self, x):
            self.hidden.weight.data = self.hidden.weight.data.clamp(-0.3, 0.3)
            return x

    return Clamped()


@zoo.add(EITHER)
def cosine_head():
    class Cosine(Net):
        def seen(self, x):
            self.out.weight.data = F.normalize(self.out.weight.data, dim=1)
            return x

    return Cosine()


@zoo.add(EITHER)
def parameter_replaced_in_forward():
    class Replaced(Net):
        def seen(self, x):
            self.out.weight = nn.Parameter(0.9 * self.out.weight.detach() + 0.1 * x.detach().mean())
            return x

    return Replaced()


@zoo.add(EITHER)
def parameter_replaced_once():
    class Once(Net):
        done = False

        def seen(self, x):
            if not self.done:
                self.done = True
                self.out.weight = nn.Parameter(self.out.weight.detach() + x.detach().mean())
            return x

    return Once()


@zoo.add(EITHER)
def parameter_created_in_forward():
    class Lazy(Net):
        scale = None

        def seen(self, x):
            if self.scale is None:
                self.scale = nn.Parameter(x.detach().abs().mean(dim=0))
            return x * self.scale

    return Lazy()


@zoo.add(EITHER)
def submodule_created_in_forward():
    class Lazy(Net):
        def seen(self, x):
            if not hasattr(self, "first"):
                self.first = nn.Linear(4, 4).to(x)
            return self.first(x)

    return Lazy()


@zoo.add(EITHER)
def gradient_left_behind():
    def twice(model, batch):
        cross_entropies(model, batch).sum().backward()
        total = sum(param.grad.detach().square().sum() for param in model.parameters())
        return cross_entropies(model, batch) * (1 + total)

    return Net(), twice


@zoo.add(ISOLATED)
def gradient_inside_the_loss():
    def penalised(model, batch):
        x = batch["x"].requires_grad_()
        losses = cross_entropies(model, {**batch, "x": x})
        (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
        return losses + 0.1 * slope.square().sum(dim=1)

    return Net(), penalised


@zoo.add(EITHER)
def requires_grad_toggled():
    class Toggling(Net):
        def seen(self, x):
            self.hidden.weight.requires_grad_(not self.hidden.weight.requires_grad)
            return x

    return Toggling()


@zoo.add(ISOLATED)
def clamped_in_place():
    class Clamped(Net):
        def seen(self, x):
            with torch.no_grad():
                self.hidden.weight.clamp_(-0.3, 0.3)
            return x

    return Clamped()


@zoo.add(EITHER)
def eval_in_forward():
    class Evaluating(Net):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def seen(self, x):
            dropped = self.drop(x)
            self.eval()
            return dropped

    return Evaluating()


@zoo.add(EITHER)
def optimiser_with_momentum_in_the_loss():
    class Inner:
        optimiser = None

        def __call__(self, model, batch):
            if self.optimiser is None:
                self.optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            self.optimiser.zero_grad()
            cross_entropies(model, batch).mean().backward()
            self.optimiser.step()
            return cross_entropies(model, batch)

    return Net(), Inner()


@zoo.add(EITHER)
def parameters_kept_in_a_list():
    class Listed(Net):
        """Not registered, so that the engine does not know of it; and it learns by itself."""

        def __init__(self):
            super().__init__()
            self.hidden_away = [nn.Parameter(torch.ones(4, dtype=torch.float64))]

        def seen(self, x):
            scale = self.hidden_away[0]
            with torch.no_grad():
                scale.data = scale.data.to(x.device) + 0.1 * x.detach().mean(dim=0)
            return x * scale

    return Listed()


@zoo.add(ISOLATED)
def penalty_on_the_distance_from_the_round():
    def loss(model, batch, reference):
        away = sum((param - reference[name]).abs().sum() for name, param in model.named_parameters())
        return cross_entropies(model, batch) + 0.1 * away

    return Net(), loss


@zoo.add(EITHER)
def means_written_into_the_rounds_parameters():
    def loss(model, batch, reference):
        reference["hidden.weight"].data.add_(batch["x"].mean(dim=0))
        return cross_entropies(model, batch) + (model.hidden.weight - reference["hidden.weight"]).square().sum()

    return Net(), loss
