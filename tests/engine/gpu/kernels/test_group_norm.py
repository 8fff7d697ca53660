"""Group normalisation for a stack of users: the plain version anywhere, the kernels on a GPU, against float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipline.engine.gpu.kernels import group_norm
from clipline.engine.stacked.layers import GroupNormReLU

DOUBLE = torch.float64
USERS, EPS = 3, 1e-3
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or group_norm.group_norm_kernels is None, reason="needs a GPU and Triton"
)
# channels, groups, side: of ResNet-18 with 32 groups and with 2, then others that the kernels serve
NORMS = [(64, 32, 12), (64, 32, 6), (512, 32, 6), (512, 2, 6), (96, 6, 5), (8, 4, 3)]


def given(channels, side):
    """Pixels that are far from mean 0, weights, biases and the gradient of the outputs, in float64."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(5, side, side, channels), (channels,), (channels,), (5, side, side, channels)]
    pixels, *others = (torch.randn(USERS, *shape, generator=generator, dtype=DOUBLE) for shape in shapes)
    return [2 * pixels + 1, *others]


def library(pixels, weight, bias, grad, groups, relu):
    """One user's outputs, and gradients of pixels, weight and bias, in float64, laid out as ours."""
    x, w, b = (tensor.clone().requires_grad_() for tensor in (pixels.permute(0, 3, 1, 2), weight, bias))
    out = F.group_norm(x, groups, w, b, EPS)
    out = F.relu(out) if relu else out
    of_x, of_w, of_b = torch.autograd.grad(out, (x, w, b), grad.permute(0, 3, 1, 2))
    return [out.detach().permute(0, 2, 3, 1), of_x.permute(0, 2, 3, 1), of_w, of_b]


def relative(ours, expected):
    return float((ours.detach().double().cpu() - expected).norm() / expected.norm())


@needs_gpu
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("channels", "groups", "side"), NORMS)
def test_the_kernels_equal_the_librarys_in_float64(channels, groups, side, dtype, tolerance, relu):
    # Rounded first: a ReLU is open or shut by the numbers that the kernel sees.
    pixels, weight, bias, grad = (
        tensor.to(kind)
        for tensor, kind in zip(given(channels, side), (dtype, torch.float32, torch.float32, dtype), strict=True)
    )
    assert group_norm.group_norm_kernels.serves(channels, groups, side * side)
    inputs = [tensor.cuda().requires_grad_() for tensor in (pixels, weight, bias)]
    out = group_norm.stacked_group_norm(*inputs, groups, EPS, relu, dtype)[0]
    found = [out, *torch.autograd.grad(out, inputs, grad.cuda())]
    assert [one.dtype for one in found] == [dtype, dtype, torch.float32, torch.float32]
    for user in range(USERS):
        expected = library(*(tensor[user].double() for tensor in (pixels, weight, bias, grad)), groups, relu)
        for one, other in zip(found, expected, strict=True):
            assert relative(one[user], other) < tolerance


@needs_gpu
def test_under_autocast_a_stack_on_a_gpu_has_the_same_norms_as_without_kernels(monkeypatch):
    pixels, weight, bias, _ = (tensor.float().cuda() for tensor in given(64, 6))
    images = pixels.permute(0, 1, 4, 2, 3).bfloat16()

    def norms():
        with torch.autocast("cuda", torch.bfloat16):
            stacked = torch.func.vmap(lambda *of_user: group_norm.normalised(of_user[0], 32, *of_user[1:], EPS, True))
            return stacked(images, weight, bias)

    ours = norms()
    monkeypatch.setattr(group_norm, "_served", lambda values, groups: False)
    expected = norms()
    assert ours.dtype == torch.bfloat16
    assert expected.dtype == torch.float32
    assert relative(ours, expected.double().cpu()) < 4e-3


def test_norm_and_relu_are_the_librarys_alone_and_in_a_stack():
    layer = GroupNormReLU(2, 8, eps=EPS)
    pixels, weight, bias, _ = (tensor.float() for tensor in given(8, 3))
    images = pixels.permute(0, 1, 4, 2, 3)
    params = {"weight": weight, "bias": bias}
    stacked = torch.func.vmap(lambda own, x: torch.func.functional_call(layer, own, x))(params, images)
    for user in range(USERS):
        plain = nn.GroupNorm(2, 8, eps=EPS)
        plain.load_state_dict({name: value[user] for name, value in params.items()})
        layer.load_state_dict(plain.state_dict())
        expected = plain(images[user]).relu()
        assert 0.2 < float((expected == 0).float().mean()) < 0.8
        torch.testing.assert_close(layer(images[user]), expected)
        torch.testing.assert_close(stacked[user], expected)
