"""Activations of our own give torch's numbers and gradients."""

import pytest
import torch
import torch.nn.functional as F

from clipline.engine.rounding import activations as act

PAIRS = {
    "sigmoid": (act.sigmoid, torch.sigmoid),
    "softplus": (act.softplus, F.softplus),
    "softplus, steeper": (lambda x: act.softplus(x, 3.0, 5.0), lambda x: F.softplus(x, 3.0, 5.0)),
    "silu": (act.silu, F.silu),
    "mish": (act.mish, F.mish),
    "gelu": (act.gelu, F.gelu),
    "gelu by tanh": (lambda x: act.gelu(x, "tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "elu": (lambda x: act.elu(x, 0.7), lambda x: F.elu(x, 0.7)),
    "celu": (lambda x: act.celu(x, 2.0), lambda x: F.celu(x, 2.0)),
    "selu": (act.selu, F.selu),
    "glu": (lambda x: act.glu(x.view(2, -1), 0), lambda x: F.glu(x.view(2, -1), 0)),
    "softmax": (lambda x: act.softmax(x.view(2, -1), 0), lambda x: F.softmax(x.view(2, -1), 0)),
    "log_softmax": (lambda x: act.log_softmax(x.view(2, -1), dim=0), lambda x: F.log_softmax(x.view(2, -1), 0)),
    "huber": (
        lambda x: act.huber_loss(x, x.detach().flip(0), delta=0.3),
        lambda x: F.huber_loss(x, x.detach().flip(0), delta=0.3),
    ),
    "huber, weighted": (
        lambda x: act.huber_loss(x, x.detach() - 1, "sum", 0.3, x.detach().abs()),
        lambda x: F.huber_loss(x, x.detach() - 1, "sum", 0.3, x.detach().abs()),
    ),
    "smooth l1": (
        lambda x: act.smooth_l1_loss(x, x.detach().flip(0), beta=0.7, reduction="none"),
        lambda x: F.smooth_l1_loss(x, x.detach().flip(0), beta=0.7, reduction="none"),
    ),
    "smooth l1, no beta": (
        lambda x: act.smooth_l1_loss(x, 0.5 * x.detach(), beta=0),
        lambda x: F.smooth_l1_loss(x, 0.5 * x.detach(), beta=0),
    ),
    "var": (lambda x: act.variance(x.view(2, -1)), lambda x: torch.var(x.view(2, -1))),
    "var, biased": (lambda x: act.variance(x.view(2, -1), 1, False), lambda x: torch.var(x.view(2, -1), 1, False)),
    "var, of several": (
        lambda x: act.variance(x.view(2, 1, -1), (0, 2), correction=0, keepdim=True),
        lambda x: torch.var(x.view(2, 1, -1), (0, 2), correction=0, keepdim=True),
    ),
    "std": (lambda x: act.deviation(x.view(2, -1), dim=1), lambda x: torch.std(x.view(2, -1), dim=1)),
}


def values(dtype):
    return torch.cat([torch.linspace(-30, 30, 241), torch.tensor([0.0, -1e-9, 1e-9])]).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "rtol", "atol"), [(torch.float64, 1e-11, 1e-11), (torch.float32, 1e-5, 1e-5), (torch.bfloat16, 2e-2, 0.1)]
)
@pytest.mark.parametrize("name", PAIRS)
def test_numbers_and_gradients_are_torchs(name, dtype, rtol, atol):
    own, torchs = PAIRS[name]
    found = []
    for function in (own, torchs):
        x = values(dtype)
        out = function(x)
        assert out.dtype == dtype
        weights = torch.cos(torch.arange(out.numel())).to(dtype).view_as(out)
        found.append((out, *torch.autograd.grad((out * weights).sum(), x)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("own", "torchs"), [(act.silu, F.silu), (act.mish, F.mish), (act.elu, F.elu), (act.selu, F.selu)]
)
def test_what_is_told_to_write_in_place_does(own, torchs):
    x = values(torch.float64)
    written = x.detach().clone()
    assert own(written, inplace=True) is written
    torch.testing.assert_close(written, torchs(x.detach()))
    gradients = [torch.autograd.grad(function.sum(), x) for function in (own(x * 1, inplace=True), torchs(x))]
    torch.testing.assert_close(*gradients)


def test_a_softmax_may_be_asked_for_in_another_type_in_each_of_its_forms():
    x = torch.randn(3, 4)
    for function in (act.softmax, act.log_softmax):
        assert function(x, 0, torch.float64).dtype == torch.float64
    for function in (act.nn_softmax, act.nn_log_softmax):
        assert function(x, 0, 3, torch.float64).dtype == function(x, dim=0, dtype=torch.float64).dtype == torch.float64
