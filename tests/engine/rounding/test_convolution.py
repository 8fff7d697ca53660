"""Convolutions of a stack on cores give what torch gives each user."""

import pytest
import torch
from torch.func import vmap

from clipline.engine.rounding.convolution import in_chunks

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's own, of a copy that it makes
TORCHS = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}


@pytest.mark.parametrize("users", [1, 3, 8, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("axes", "options"),
    [(1, {}), (2, {}), (3, {}), (2, {"stride": 2, "padding": (1, 2)}), (2, {"padding": "same"}),
     (1, {"padding": "valid"}),
     (2, {"dilation": 2, "padding": "same"}), (1, {"groups": 2}), (2, {"groups": 2, "padding": 1}),
     (2, {"stride": (2,)})],
)  # fmt: skip
def test_numbers_and_gradients_are_torchs(axes, options, dtype, users):
    own, generator = in_chunks(axes, TORCHS[axes]), torch.Generator().manual_seed(0)
    groups = options.get("groups", 1)
    shapes = [(2, 4, *[7] * axes), (6, 4 // groups, *range(2, 2 + axes)), (6,)]
    given = [torch.randn(users, *shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]
    out = vmap(lambda x, w, b: own(x, w, b, **options))(*given)
    expected = torch.stack([TORCHS[axes](*(one[user] for one in given), **options) for user in range(users)])
    precision = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {}
    torch.testing.assert_close(out, expected, **precision)
    gradients = [torch.autograd.grad(one.sin().sum(), given) for one in (out, expected)]
    torch.testing.assert_close(*gradients, **precision)


@pytest.mark.parametrize("options", [{}, {"stride": (2, 3)}, {"padding": (1, 0), "groups": 2}, {"groups": 4}])
def test_filters_of_one_point_are_torchs(options):
    own = in_chunks(2, torch.conv2d)
    shapes = [(2, 4, 5, 6), (8, 4 // options.get("groups", 1), 1, 1), (8,)]
    given = [torch.randn(3, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    out = vmap(lambda x, w, b: own(x, w, b, **options))(*given)
    expected = torch.stack([torch.conv2d(*(one[user] for one in given), **options) for user in range(3)])
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.sin().sum(), given) for one in (out, expected)))


@pytest.mark.parametrize("kernel", [1, 3])
def test_weights_may_be_frozen_and_images_single_and_without_bias(kernel):
    own, x = in_chunks(2, torch.conv2d), torch.randn(5, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 4, kernel, kernel, dtype=torch.float64)
    out = vmap(lambda x: own(x, weight))(x)
    expected = torch.conv2d(x, weight)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(*(torch.autograd.grad(one.sin().sum(), x) for one in (out, expected)))


def test_only_gradients_that_are_wanted_are_formed():
    own, x = in_chunks(2, torch.conv2d), torch.randn(5, 2, 4, 6, 6)
    weight = torch.randn(5, 3, 4, 3, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(vmap(own)(x, weight).sum(), weight)
    assert gradient.shape == weight.shape


def test_under_autocast_a_convolution_is_in_bfloat16():
    own = in_chunks(2, torch.conv2d)
    with torch.autocast("cpu", torch.bfloat16):
        out = vmap(own)(torch.randn(3, 2, 4, 6, 6), torch.randn(3, 5, 4, 3, 3), torch.randn(3, 5))
    assert out.dtype == torch.bfloat16
