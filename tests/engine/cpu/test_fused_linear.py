"""Weights that move without their gradient being formed: where they do, and that it is the same step everywhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from clipline.engine.cpu import fused_linear as factors
from clipline.engine.working_model import WorkingModel

LR = 0.3


class Net(nn.Module):
    """Two layers of 18,200 weights, enough for factors to be worth while."""

    def __init__(self, use="once", bias=True):
        super().__init__()
        self.first, self.second = nn.Linear(140, 130, bias=bias), nn.Linear(130, 140, bias=bias)
        self.square = nn.Linear(140, 140, bias=bias)
        self.use = use
        if use == "tied":
            self.third = nn.Linear(140, 130, bias=bias)
            self.third.weight = self.first.weight
        if use == "frozen":
            self.first.weight.requires_grad_(False)
        if use == "learned input":
            self.queries = nn.Parameter(torch.randn(5, 140))
        if use == "weight norm":
            torch.nn.utils.parametrizations.weight_norm(self.first)

    def forward(self, x):
        if self.use == "learned input":
            return self.second(self.first(self.queries)).sum(dim=0) + self.square(x)
        if self.use == "weight as input":
            return self.square(x) + self.second(self.first.weight.T).sum(dim=0)
        if self.use == "solver":
            return self.second(solved(self.first, x))
        if self.use == "saved elsewhere":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                return self.second(torch.tanh(self.first(x)))
        if self.use == "in place":
            return self.square(torch.relu_(self.second(torch.relu_(self.first(x)))))
        if self.use == "in place, leading axes":
            return torch.relu_(self.first(x.view(2, -1, 140)))
        if self.use == "leading axes":
            x = x.view(2, -1, 140)
        if self.use == "checkpoint":
            hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False)
        else:
            hidden = torch.tanh(self.first(x))
        out = self.second(hidden)
        if self.use == "twice":
            out = self.second(torch.tanh(self.first(out)))
        elif self.use == "tied":
            out = self.second(torch.tanh(self.third(out)))
        elif self.use == "by hand":
            out = F.linear(out, self.first.weight) @ self.first.weight
        elif self.use == "by hand before":
            out = self.second(F.linear(torch.tanh(x), self.first.weight)) + out
        elif self.use == "detached":
            out = F.linear(out, self.first.weight.detach()) @ self.first.weight.data
        return self.square(out) if self.use != "unused" else out


def solved(layer, x):
    """A layer whose backward pass asks for gradients of its own, as those do that solve an equation."""
    hidden = torch.tanh(layer(x))
    again = hidden.detach().clone().requires_grad_()
    small = torch.tanh(layer(F.pad(again, (0, 10))))
    hidden.register_hook(lambda grad: grad + 0.1 * torch.autograd.grad(small, again, grad, retain_graph=True)[0])
    return hidden


def loss(model, batch):
    x = batch["x"].clone().requires_grad_(model.use == "gradient penalty")
    out = model(x)
    total = out.square().mean()
    if model.use == "penalised":
        total = total + 0.1 * sum(param.square().sum() for param in model.parameters())
    if model.use == "gradient penalty":
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        total = total + slope.square().mean()
    if model.use == "hook":
        model.first.weight.register_hook(lambda gradient: 2 * gradient)
    return total


USES = ["once", "twice", "tied", "by hand", "by hand before", "detached", "penalised", "gradient penalty", "frozen"]
USES += ["learned input", "weight as input", "solver", "saved elsewhere", "in place", "in place, leading axes"]
USES += ["weight norm", "leading axes", "checkpoint", "unused", "hook"]


def both_steps(use, dtype=torch.float64, rows=6, bias=True):
    """Parameters after two steps by the engine, and by torch's own layers and gradients."""
    torch.manual_seed(0)
    net = Net(use, bias).to(dtype)
    batch = {"x": torch.randn(rows, 140, dtype=dtype)}
    flat, plain = WorkingModel(net), copy.deepcopy(net)
    for _ in range(2):
        flat.sgd_step(loss(flat.module, batch), LR)
        params = [param for param in plain.parameters() if param.requires_grad]
        gradients = torch.autograd.grad(loss(plain, batch), params, allow_unused=True)
        with torch.no_grad():
            for param, gradient in zip(params, gradients, strict=True):
                if gradient is not None:
                    param -= LR * gradient
    return flat, torch.cat([param.detach().flatten() for param in params])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("use", USES)
def test_a_step_is_that_of_plain_gradients_however_the_weights_are_used(use, bias):
    flat, expected = both_steps(use, bias=bias)
    torch.testing.assert_close(flat.vector, expected, rtol=1e-12, atol=1e-12)
    assert not torch.equal(flat.vector, flat.initial)


def matrices_moved_by_factors(monkeypatch, use, **options):
    moved = []
    plain = factors.FusedLinearStep.subtract
    monkeypatch.setattr(
        factors.FusedLinearStep, "subtract", lambda self, lr: (moved.append(len(self._kept)), plain(self, lr))[1]
    )
    both_steps(use, **options)
    return moved


@pytest.mark.parametrize(
    ("use", "count"), [("once", 3), ("twice", 5), ("penalised", 3), ("frozen", 2), ("weight norm", 2), ("hook", 2)]
)
def test_factors_are_kept_for_every_use_of_a_large_matrix_that_is_trained_itself(monkeypatch, use, count):
    assert matrices_moved_by_factors(monkeypatch, use) == [count, count]


def test_factors_larger_than_the_gradient_are_not_kept(monkeypatch):
    # 60 rows of 270 numbers are 16,200 and the gradient 18,200; 70 are 18,900. `square`: 280 a row and 19,600.
    assert matrices_moved_by_factors(monkeypatch, "once", rows=60) == [3, 3]
    assert matrices_moved_by_factors(monkeypatch, "once", rows=70) == [1, 1]
    assert matrices_moved_by_factors(monkeypatch, "once", rows=71) == [0, 0]


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # by torch's own forward derivatives
def test_small_matrices_other_types_and_forward_derivatives_keep_to_torchs_own_way():
    flat = WorkingModel(nn.Linear(127, 129))  # 16,383 weights
    values = torch.randn(3, 127)
    assert flat.module(values).grad_fn.name() == "AddmmBackward0"
    flat = WorkingModel(nn.Linear(128, 128))
    values = torch.randn(3, 128)
    assert "_Linear" in flat.module(values).grad_fn.name()
    with torch.autocast("cpu", torch.bfloat16):
        assert flat.module(values).dtype == torch.bfloat16
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(values, torch.ones_like(values))
        slope = torch.autograd.forward_ad.unpack_dual(flat.module(dual)).tangent
    torch.testing.assert_close(slope, torch.ones_like(values) @ flat.module.weight.T)


def test_outside_a_step_gradients_are_formed_as_always_and_nothing_is_kept():
    torch.manual_seed(0)
    flat = WorkingModel(Net().double())
    batch = {"x": torch.randn(6, 140, dtype=torch.float64)}
    params = list(flat.module.parameters())
    gradients = torch.autograd.grad(loss(flat.module, batch), params)
    plain = flat.export(flat.initial)
    for got, want in zip(gradients, torch.autograd.grad(loss(plain, batch), list(plain.parameters())), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert torch.equal(flat.vector, flat.initial)
    assert flat._factors._kept is None


def test_what_a_failed_step_kept_is_forgotten():
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("no gradient today")

    torch.manual_seed(0)
    flat = WorkingModel(nn.Sequential(nn.Linear(140, 130), nn.Linear(130, 140)))
    hidden = Failing.apply(flat.module[0](torch.randn(4, 140)))
    with pytest.raises(ValueError, match="no gradient today"):
        flat.sgd_step(flat.module[1](hidden).sum(), LR)
    assert flat._factors._kept is None
    assert torch.equal(flat.vector, flat.initial)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_products_by_large_matrices_are_torchs_up_to_rounding(monkeypatch, turned, bias):
    torch.manual_seed(0)
    weight = torch.randn(700, 600).t() if turned else torch.randn(600, 700)
    rows, bias = torch.randn(20, 700), torch.randn(600) if bias else None
    calls = []
    monkeypatch.setattr(factors.F, "linear", lambda *given: calls.append(given))
    with torch.no_grad():
        out = factors.product(rows, weight, bias)
    assert not calls  # by oneDNN, which every build of torch for this kind of processor has
    exact = rows.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-4)  # sums of 700 products, of deviation 26
    monkeypatch.undo()
    with torch.no_grad():
        assert factors.product(rows[:0], weight, bias).shape == (0, 600)
        strided = torch.randn(20, 1400)[:, ::2]
        torch.testing.assert_close(factors.product(strided, weight), strided @ weight.t(), rtol=1e-5, atol=1e-4)


def test_a_step_in_float32_is_that_of_plain_gradients_up_to_rounding():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(700, 600), nn.Tanh(), nn.Linear(600, 500))
    values = torch.randn(20, 700)
    flat, exact = WorkingModel(net), copy.deepcopy(net).double()
    flat.sgd_step(flat.module(values).square().mean(), LR)
    gradients = torch.autograd.grad(exact(values.double()).square().mean(), list(exact.parameters()))
    step = torch.cat([gradient.flatten() for gradient in gradients])
    moved = (flat.initial.double() - flat.vector.double()) / LR
    assert float((moved - step).norm() / step.norm()) < 1e-4  # a parameter of 0.03 is held to 2e-9, a gradient is 1e-4
