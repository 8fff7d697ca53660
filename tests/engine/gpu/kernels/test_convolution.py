"""Convolution for a stack of users, against the library's in float64. Most of it needs a GPU."""

import pytest
import torch
import torch.nn.functional as F

from clipline.engine.gpu.kernels import convolution
from clipline.engine.gpu.recorded_step import traced

DOUBLE = torch.float64
USERS = 3
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or convolution.convolution_kernels is None, reason="needs a GPU and Triton"
)
PRECISIONS = [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)]
# channels, filters, size, stride, padding, side: general ones, then those where a tile lies in one tap of the filter
CONVOLUTIONS = [
    (1, 32, 3, 1, 0, 28),
    (32, 64, 3, 1, 0, 26),
    (3, 64, 7, 2, 0, 29),
    (24, 40, 5, 3, 0, 17),
    (64, 128, 1, 1, 0, 6),
    (48, 40, 3, 2, 1, 7),
    (64, 64, 3, 1, 1, 6),
    (128, 256, 3, 1, 1, 6),
    (256, 128, 5, 2, 2, 5),
]


def relative(ours, expected):
    return float((ours.detach().double().cpu() - expected).norm() / expected.norm())


def given(channels, filters, size, stride, padding, side, users=USERS):
    """Pixels, weights, biases and the gradient of the outputs, of these users, in float64."""
    generator = torch.Generator().manual_seed(1)
    out = convolution.out_side(side, size, stride, padding)
    shapes = [(5, side, side, channels), (filters, size, size, channels), (filters,), (5, out, out, filters)]
    return [torch.randn(users, *shape, generator=generator, dtype=DOUBLE) for shape in shapes]


def library(pixels, weight, bias, grad, stride, padding):
    """One user's outputs and gradients of pixels, weights and bias, in float64, laid out as ours."""
    x, w = (tensor.permute(0, 3, 1, 2).requires_grad_() for tensor in (pixels, weight))
    expected = F.conv2d(x, w, bias, stride, padding)
    of_x, of_w = torch.autograd.grad(expected, (x, w), grad.permute(0, 3, 1, 2))
    return [*(one.detach().permute(0, 2, 3, 1) for one in (expected, of_x, of_w)), grad.sum(dim=(0, 1, 2))]


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("channels", "filters", "size", "stride", "padding", "side"), CONVOLUTIONS)
def test_convolution_on_a_gpu_equals_the_librarys_in_float64(
    channels, filters, size, stride, padding, side, dtype, tolerance
):
    *inputs, grad = given(channels, filters, size, stride, padding, side)
    pixels, weight, bias = (
        tensor.to("cuda", kind).requires_grad_()
        for tensor, kind in zip(inputs, (dtype, torch.float32, torch.float32), strict=True)
    )
    rounded = weight.detach().to(dtype).flatten(2)
    ours = convolution.stacked_conv(pixels, weight, rounded, bias, stride, padding)
    found = [ours, *torch.autograd.grad(ours, (pixels, weight, bias), grad.to("cuda", dtype))]
    assert found[2].dtype == torch.float32
    for user in range(USERS):
        expected = library(*(tensor[user] for tensor in (*inputs, grad)), stride, padding)
        for one, other in zip(found, expected, strict=True):
            assert relative(one[user], other) < tolerance


@needs_gpu
@pytest.mark.parametrize("shape", [(3, 64, 7, 2, 0, 29), (32, 64, 3, 1, 0, 26), (128, 256, 3, 1, 1, 6)])
def test_a_users_gradient_is_the_same_to_the_bit_whoever_else_is_in_the_stack(shape):
    pixels, weight, _, grad = (tensor.to("cuda", torch.bfloat16) for tensor in given(*shape, users=40))
    _, _, size, stride, padding, side = shape
    rounded = weight.flatten(2)
    for operation, tensors, rest in [
        (convolution.stacked_conv_pixels, (grad, rounded), (side, side, size, stride, padding)),
        (convolution.stacked_conv_weight, (grad, pixels), (size, stride, padding, True)),
    ]:
        among = operation(*tensors, *rest)[7]
        alone = operation(*(tensor[7:8] for tensor in tensors), *rest)[0]
        assert torch.equal(among, alone)


class Plain:
    """What the kernels compute, by the library, user by user."""

    @staticmethod
    def conv_forward(pixels, weight, bias, size, stride, padding):
        shape = (weight.shape[1], size, size, pixels.shape[4])
        kernels = weight.unflatten(2, shape[1:]).permute(0, 1, 4, 2, 3)
        outs = [
            F.conv2d(one.permute(0, 3, 1, 2), kernel, None, stride, padding).permute(0, 2, 3, 1)
            for one, kernel in zip(pixels, kernels, strict=True)
        ]
        return torch.stack(outs).contiguous()

    @staticmethod
    def conv_weight(grad, pixels, size, stride, biased, padding):
        shape = (grad.shape[4], pixels.shape[4], size, size)
        last = (tensor.double().permute(0, 1, 4, 2, 3) for tensor in (pixels, grad))
        found = [torch.nn.grad.conv2d_weight(one, shape, own, stride, padding) for one, own in zip(*last, strict=True)]
        return torch.stack(found).permute(0, 1, 3, 4, 2).flatten(1).float()


def test_the_step_rounds_weights_once_and_gets_their_gradient_unrounded(monkeypatch):
    monkeypatch.setattr(convolution, "convolution_kernels", Plain)
    pixels, weight, _, grad = (tensor.float() for tensor in given(16, 4, 3, 1, 1, 5))
    images, grad = pixels.permute(0, 1, 4, 2, 3).bfloat16(), grad.bfloat16()

    def step(stack, images, grad):
        """As a stack's step; a penalty reads the weights in float32, too, and they are laid out as torch's."""
        (own,) = stack
        leaf = own.detach().requires_grad_()
        out = torch.func.vmap(lambda x, w: convolution.convolved(x, w.permute(0, 2, 3, 1), None, 1, (1, 1, 1, 1)))
        outs = out(images, leaf).permute(0, 1, 3, 4, 2)
        (gradient,) = torch.autograd.grad((outs * grad).float().sum() + leaf.square().sum(), leaf)
        own.sub_(0.1 * gradient)

    ours = [weight.permute(0, 1, 4, 2, 3).contiguous()]
    monkeypatch.setattr(convolution, "autocast_dtype", lambda tensor: torch.bfloat16)
    traced(step, (ours, images, grad))(ours, images, grad)
    for user in range(USERS):
        inputs = (pixels[user].bfloat16().double(), weight[user].bfloat16().double(), None, grad[user].double())
        gradient = library(*inputs, 1, 1)[2] + 2 * weight[user].double()
        moved = (weight[user].double() - 0.1 * gradient).permute(0, 3, 1, 2)
        assert relative(ours[0][user], moved) < 1e-6  # a gradient in bfloat16 would be off by 1e-3
