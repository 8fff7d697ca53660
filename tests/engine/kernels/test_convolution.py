"""Convolution and pooling for a stack of users, against the library's in float64. These need a GPU."""

import pytest
import torch
import torch.nn.functional as F

from clipline.engine.kernels import convolution

DOUBLE = torch.float64
USERS = 3
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or convolution.convolution_kernels is None, reason="needs a GPU and Triton"
)
PRECISIONS = [(torch.float32, 2e-3), (torch.bfloat16, 2e-2)]
CONVOLUTIONS = [(1, 32, 3, 1, 28), (32, 64, 3, 1, 26), (3, 64, 7, 2, 29), (64, 128, 1, 1, 6), (24, 40, 5, 3, 17)]


def relative(ours, expected):
    return float((ours.detach().double().cpu() - expected).norm() / expected.norm())


@needs_gpu
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize(("channels", "filters", "size", "stride", "side"), CONVOLUTIONS)
def test_convolution_on_a_gpu_equals_the_librarys_in_float64(channels, filters, size, stride, side, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(USERS, 5, side, side, channels, generator=generator, dtype=DOUBLE)
    weight = torch.randn(USERS, filters, size * size * channels, generator=generator, dtype=DOUBLE)
    out = convolution.out_side(side, size, stride)
    grad = torch.randn(USERS, 5, out, out, filters, generator=generator, dtype=DOUBLE)
    bias = torch.randn(USERS, filters, generator=generator, dtype=DOUBLE)
    given = [pixels.to("cuda", dtype), weight.to("cuda", torch.float32), bias.to("cuda", torch.float32)]
    given = [tensor.requires_grad_() for tensor in given]
    ours = convolution.stacked_conv(*given, size, stride)
    found = torch.autograd.grad(ours, given, grad.to("cuda", dtype))
    assert found[1].dtype == torch.float32
    for user in range(USERS):
        x = pixels[user].permute(0, 3, 1, 2).requires_grad_()
        w = weight[user].view(filters, size, size, channels).permute(0, 3, 1, 2).requires_grad_()
        expected = F.conv2d(x, w, bias[user], stride=stride)
        of_x, of_w = torch.autograd.grad(expected, (x, w), grad[user].permute(0, 3, 1, 2))
        assert relative(ours[user].permute(0, 3, 1, 2), expected.detach()) < tolerance
        assert relative(found[0][user].permute(0, 3, 1, 2), of_x) < tolerance
        assert relative(found[1][user], of_w.permute(0, 2, 3, 1).flatten(1)) < tolerance
        assert relative(found[2][user], grad[user].sum(dim=(0, 1, 2))) < tolerance


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_on_a_gpu_equals_the_librarys_with_ties_too(dtype):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 3, (USERS, 2, 6, 8, 5), generator=generator).to("cuda", dtype).requires_grad_()
    pooled, _ = convolution.pool(pixels)
    grad = torch.randn(pooled.shape, generator=generator).to("cuda", dtype)
    (found,) = torch.autograd.grad(pooled, pixels, grad)
    flat = pixels.detach().float().flatten(0, 1).permute(0, 3, 1, 2).requires_grad_()
    expected = F.max_pool2d(flat, 2)
    (theirs,) = torch.autograd.grad(expected, flat, grad.float().flatten(0, 1).permute(0, 3, 1, 2))
    assert torch.equal(pooled.float().flatten(0, 1).permute(0, 3, 1, 2), expected)
    assert torch.equal(found.float().flatten(0, 1).permute(0, 3, 1, 2), theirs)
