"""Trainable parameters that a forward pass binds anew, replaces, creates or decorates."""

import torch
import torch.nn.functional as F
from adversarial.entry import EITHER, ISOLATED, Net, Zoo, cross_entropies, mean
from torch import nn

zoo = Zoo()


@zoo.net(EITHER)
def cosine_head(self, x):
    self.out.weight.data = F.normalize(self.out.weight.data, dim=1)
    return x


@zoo.net(EITHER, done=False)
def parameter_replaced_once(self, x):
    if not self.done:
        self.done = True
        self.out.weight = nn.Parameter(self.out.weight.detach() + x.detach().mean())
    return x


@zoo.net(EITHER)
def submodule_created_in_forward(self, x):
    if not hasattr(self, "first"):
        self.first = nn.Linear(4, 4).to(x)
    return self.first(x)


@zoo.loss(EITHER)
def gradient_left_behind(model, batch):
    cross_entropies(model, batch).sum().backward()
    total = sum(param.grad.detach().square().sum() for param in model.parameters())
    return cross_entropies(model, batch) * (1 + total)


@zoo.loss(ISOLATED)
def gradient_inside_the_loss(model, batch):
    x = batch["x"].requires_grad_()
    losses = cross_entropies(model, {**batch, "x": x})
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + 0.1 * slope.square().sum(dim=1)


@zoo.net(EITHER)
def requires_grad_toggled(self, x):
    self.hidden.weight.requires_grad_(not self.hidden.weight.requires_grad)
    return x


@zoo.net(ISOLATED)
def clamped_in_place(self, x):
    with torch.no_grad():
        self.hidden.weight.clamp_(-0.3, 0.3)
    return x


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


@zoo.net(EITHER, hidden_away=[nn.Parameter(torch.ones(4, dtype=torch.float64))])
def parameters_kept_in_a_list(self, x):
    """Not registered, so that the engine does not know of it; and it learns by itself."""
    scale = self.hidden_away[0]
    with torch.no_grad():
        scale.data = scale.data.to(x.device) + 0.1 * mean(x)
    return x * scale


@zoo.add(ISOLATED)
def penalty_on_the_distance_from_the_round():
    def loss(model, batch, reference):
        away = sum((param - reference[name]).abs().sum() for name, param in model.named_parameters())
        return cross_entropies(model, batch) + 0.1 * away

    return Net(), loss
