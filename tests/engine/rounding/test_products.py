"""Products of a stack on cores give torch's numbers and gradients, for all shapes that torch takes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from clipline.engine.rounding.products import addmm, einsum, linear, matmul, mm

USERS = 3


def compared(own, torchs, *shapes, shared=()):
    """Under vmap, ours against torch's own; arguments in `shared` are the same for all users."""
    generator = torch.Generator().manual_seed(0)
    sizes = [shape if number in shared else (USERS, *shape) for number, shape in enumerate(shapes)]
    given = [torch.randn(*size, generator=generator, dtype=torch.float64, requires_grad=True) for size in sizes]
    axes = tuple(None if number in shared else 0 for number in range(len(shapes)))
    outs = [vmap(function, axes)(*given) for function in (own, torchs)]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad(out.sin().sum(), given) for out in outs]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("shared", [(), (0,), (1,)])
@pytest.mark.parametrize(
    ("left", "right"),
    [((3, 5), (5, 2)), ((5,), (5,)), ((5,), (5, 2)), ((3, 5), (5,)), ((4, 3, 5), (5, 2)), ((4, 3, 5), (4, 5, 2)),
     ((2, 1, 3, 5), (4, 5, 2)), ((3, 5), (4, 5, 2)), ((4, 3, 5), (5,)), ((1, 17), (17, 16)), ((2, 3, 0), (0, 4))],
)  # fmt: skip
def test_matmul_is_torchs(left, right, shared):
    compared(matmul, torch.matmul, left, right, shared=shared)


@pytest.mark.parametrize(
    ("equation", "left", "right"),
    [("ij,jk->ik", (3, 4), (4, 5)), ("bij,bkj->bik", (2, 3, 4), (2, 5, 4)),
     ("bhid,bhjd->bhij", (2, 2, 3, 4), (2, 2, 5, 4)),
     ("ij,jk", (3, 4), (4, 5)), ("i,j->ji", (3,), (4,)), ("ij,k->k", (3, 4), (5,)), ("ijk,kl->li", (2, 3, 4), (4, 5)),
     (" b i , b i -> b ", (3, 4), (3, 4)), ("ij,ij->", (3, 4), (3, 4)), ("ii,ij->j", (3, 3), (3, 4)),
     ("...i,ij->...j", (2, 3), (3, 4)), ("ij,ij->ij", (3, 4), (1, 4))],
)  # fmt: skip
def test_einsum_is_torchs(equation, left, right):
    compared(lambda x, y: einsum(equation, x, y), lambda x, y: torch.einsum(equation, x, y), left, right)
    compared(lambda x, y: einsum(equation, [x, y]), lambda x, y: torch.einsum(equation, x, y), left, right)


@pytest.mark.parametrize("values", [(5,), (3, 5), (2, 3, 5)])
def test_linear_is_torchs(values):
    compared(linear, F.linear, values, (4, 5), (4,))
    compared(linear, F.linear, values, (4, 5), (4,), shared=(1, 2))


def test_addmm_is_torchs():
    compared(addmm, torch.addmm, (2,), (3, 5), (5, 2))
    halves = {"beta": 0.5, "alpha": 2}
    ours, torchs = (partial(function, **halves) for function in (addmm, torch.addmm))
    compared(ours, torchs, (3, 2), (3, 5), (5, 2))


def test_what_is_not_to_be_added_is_not_looked_at():
    nan = torch.full((USERS, 3, 2), torch.nan)
    left, right = torch.randn(USERS, 3, 5), torch.randn(USERS, 5, 2)
    out = vmap(lambda x, y, z: addmm(x, y, z, beta=0))(nan, left, right)
    torch.testing.assert_close(out, left @ right)
    named = vmap(lambda x, y: matmul(input=x, other=y) + mm(input=x, mat2=y))(left, right)
    torch.testing.assert_close(named, 2 * left @ right)


def test_under_autocast_products_are_in_bfloat16():
    x = torch.randn(USERS, 3, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert vmap(lambda x: matmul(x, x.T))(x).dtype == torch.bfloat16
        assert vmap(lambda x: linear(x, x, x[:, 0]))(x).dtype == torch.bfloat16
        assert vmap(lambda x: einsum("ij,kj->ik", x, x))(x).dtype == torch.bfloat16
