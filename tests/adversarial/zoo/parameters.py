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
def data_bound_to_a_clone():
    class Cloned(Net):
        def seen(self, x):
            self.hidden.weight.data = self.hidden.weight.data.clone()
            return x

    return Cloned()


@zoo.add(EITHER)
def data_swapped_between_two_parameters():
    class Swapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            self.one.weight.data, self.two.weight.data = self.two.weight.data, self.one.weight.data
            return self.one(x) + 2 * self.two(x)

    return Swapped()


@zoo.add(EITHER)
def data_set_to_another_storage():
    class Set(Net):
        def seen(self, x):
            with torch.no_grad():
                self.out.weight.set_(0.99 * self.out.weight)
            return x

    return Set()


@zoo.add(EITHER)
def data_written_by_vector_to_parameters():
    class Shrinking(Net):
        def seen(self, x):
            vector = nn.utils.parameters_to_vector(self.out.parameters()).detach()
            nn.utils.vector_to_parameters(0.95 * vector, self.out.parameters())
            return x

    return Shrinking()


@zoo.add(EITHER)
def parameter_replaced_in_forward():
    class Replaced(Net):
        def seen(self, x):
            self.out.weight = nn.Parameter(0.9 * self.out.weight.detach() + 0.1 * x.detach().mean())
            return x

    return Replaced()


@zoo.add(EITHER)
def parameter_replaced_by_setattr():
    class Replaced(Net):
        def seen(self, x):
            for name, param in list(self.out.named_parameters()):
                setattr(self.out, name, nn.Parameter(0.9 * param.detach()))
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
def parameter_registered_in_forward():
    class Lazy(Net):
        def seen(self, x):
            if "offset" not in self._parameters:
                self.register_parameter("offset", nn.Parameter(x.detach().mean(dim=0)))
            return x - self.offset

    return Lazy()


@zoo.add(EITHER)
def parameter_removed_in_forward():
    class Losing(Net):
        def seen(self, x):
            if bool((x.detach().abs() > 1.5).any()):
                self.out.bias = None
            return x

    return Losing()


@zoo.add(EITHER)
def submodule_created_in_forward():
    class Lazy(Net):
        def seen(self, x):
            if not hasattr(self, "first"):
                self.first = nn.Linear(4, 4).to(x)
            return self.first(x)

    return Lazy()


@zoo.add(EITHER)
def submodule_replaced_in_forward():
    class Replaced(Net):
        def seen(self, x):
            layer = nn.Linear(5, 3).to(x)
            with torch.no_grad():
                layer.weight.copy_(0.9 * self.out.weight)
            self.out = layer
            return x

    return Replaced()


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


@zoo.add(EITHER, by_data=True)
def requires_grad_taken_by_huge_values():
    class Freezing(Net):
        def seen(self, x):
            if bool((x.detach().abs() > 1e6).any()):
                self.hidden.requires_grad_(False)
            return x

    return Freezing()


@zoo.add(ISOLATED)
def clamped_in_place():
    class Clamped(Net):
        def seen(self, x):
            with torch.no_grad():
                self.hidden.weight.clamp_(-0.3, 0.3)
            return x

    return Clamped()


@zoo.add(ISOLATED)
def decayed_in_place_in_data():
    class Decayed(Net):
        def seen(self, x):
            self.out.weight.data.mul_(0.95)
            return x

    return Decayed()


@zoo.add(EITHER)
def attribute_on_a_parameter():
    class Tagged(Net):
        def seen(self, x):
            before = getattr(self.out.weight, "last", 0.0)
            self.out.weight.last = x.detach().mean(dim=0)
            return x + before

    return Tagged()


@zoo.add(EITHER)
def hook_registered_in_forward():
    class Hooked(Net):
        def seen(self, x):
            level = x.detach().mean()
            self.out.register_forward_hook(lambda layer, inputs, output: output * (1 + 0.1 * level))
            return x

    return Hooked()


@zoo.add(EITHER)
def parameter_hook_registered_in_forward():
    class Hooked(Net):
        def seen(self, x):
            if self.out.weight.requires_grad:
                self.out.weight.register_hook(lambda gradient: 0.9 * gradient)
            return x

    return Hooked()


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
def state_saved_and_loaded_from_the_last_call():
    class Loading(Net):
        saved = None

        def seen(self, x):
            if self.saved is not None:
                with torch.no_grad():
                    self.hidden.weight.lerp_(self.saved, 0.1)
            self.saved = self.hidden.weight.detach().clone()
            return x

    return Loading()


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


@zoo.add(EITHER)
def rounds_parameters_kept_and_written_to_by_the_next_user():
    kept = {}

    def loss(model, batch, reference):
        kept.setdefault("first", reference["out.bias"])
        kept["first"].data.add_(batch["x"].mean())
        return cross_entropies(model, batch) + (model.out.bias - reference["out.bias"]).square().sum()

    return Net(), loss
