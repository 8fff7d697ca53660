"""Operations of one user on a processor core equal torch's own; their gradients may be differentiated again."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from clipline.engine.cpu.autograd_ops import conv, fits, relu, sum_of_squares

DOUBLE = torch.float64


def channels_last(*shape):
    return torch.randn(*shape, dtype=DOUBLE).contiguous(memory_format=torch.channels_last).requires_grad_()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (1, 1), (2, 1)])
def test_convolution_and_its_first_and_second_derivatives(stride, padding, bias):
    torch.manual_seed(0)
    images, weight = channels_last(2, 3, 6, 6), torch.randn(4, 27, dtype=DOUBLE, requires_grad=True)
    offset = torch.randn(4, dtype=DOUBLE, requires_grad=True) if bias else None
    out = conv(images, weight, offset, 3, stride, padding)
    assert "_Conv" in out.grad_fn.name()
    kernel = weight.detach().view(4, 3, 3, 3).permute(0, 3, 1, 2)
    torch.testing.assert_close(out, F.conv2d(images, kernel, offset, stride, padding), rtol=1e-12, atol=1e-12)
    given = (images, weight, offset, 3, stride, padding)
    assert torch.autograd.gradcheck(conv, given)
    assert torch.autograd.gradgradcheck(conv, given)


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_asked_for_are_computed(trained):
    torch.manual_seed(0)
    images, weight, bias = channels_last(2, 3, 6, 6), torch.randn(4, 27, dtype=DOUBLE), torch.randn(4, dtype=DOUBLE)
    given = [tensor.detach().requires_grad_(wish) for tensor, wish in zip((images, weight, bias), trained, strict=True)]
    assert torch.autograd.gradcheck(lambda *given: conv(*given, 3, 1, 1), given)


def test_sum_of_squares_and_its_first_and_second_derivatives():
    values = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    torch.testing.assert_close(sum_of_squares(values), values.square().sum(), rtol=1e-14, atol=0)
    assert torch.autograd.gradcheck(sum_of_squares, values)
    assert torch.autograd.gradgradcheck(sum_of_squares, values)
    many = torch.randn(5, 3, 4)
    torch.testing.assert_close(vmap(sum_of_squares)(many), many.square().sum(dim=(1, 2)))


def test_relu_works_in_place_on_what_was_computed_and_leaves_what_was_given_alone():
    given = torch.tensor([-1.0, 2.0], requires_grad=True)
    assert relu(given).tolist() == [0, 2]
    assert given.tolist() == [-1, 2]
    data = torch.tensor([-1.0, 2.0])
    relu(data)
    assert data.tolist() == [-1, 2]
    computed = given + 0
    out = relu(computed)
    assert out.data_ptr() == computed.data_ptr()
    (gradient,) = torch.autograd.grad(out.sum(), given)
    assert gradient.tolist() == [0, 1]


def test_stacks_other_types_and_forward_derivatives_keep_to_torchs_own_way():
    values = torch.ones(3)
    assert fits(values)
    with torch.autocast("cpu", torch.bfloat16):
        assert not fits(values)
    with torch.autograd.forward_ad.dual_level():
        assert not fits(values)
    seen = []
    vmap(lambda row: (seen.append(fits(row)), row)[1])(torch.ones(2, 3))
    assert seen == [False]
