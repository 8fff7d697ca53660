"""Updates as terms of a sum: measured, clipped and added up as the rows that they stand for."""

import pytest
import torch
from samples import one_by_one, request
from tagged_posts import SIZES, Tags, loss, posts

from clipline import LocalSGD
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.core.outer_products import SparseOuterProducts
from clipline.engine.core.recorded_updates import OuterProductUpdates
from clipline.engine.core.updates import Updates
from clipline.federated.clipping import clip_factors
from clipline.random.streams import Streams

HEIGHT = 12


def test_norms_and_sums_of_terms_are_those_of_the_rows_they_stand_for():
    torch.manual_seed(0)
    local, rows = LocalSGD(0.5, batch_size=4, epochs=3, reduction="sum"), {"tags.weight": "words"}
    fast = FastParts()
    made = one_by_one(Tags().double(), loss, posts(), local, Streams(0), row_fields=rows, fast=fast)
    ((updates, _),) = made.train([request(made.problem.model.initial, range(len(SIZES)))])
    dense = updates.dense(made.problem.model.dim)
    torch.testing.assert_close(updates.norms(), dense.norm(dim=1), rtol=1e-14, atol=0)
    scale = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.25], dtype=torch.float64)
    total = torch.arange(made.problem.model.dim, dtype=torch.float64)
    updates.add_to(total.unsqueeze(0), scale)
    torch.testing.assert_close(total, torch.arange(made.problem.model.dim) + scale @ dense, rtol=1e-14, atol=1e-14)
    chosen = torch.tensor([False, True, True, False, True])
    assert torch.equal(updates.of_users(chosen).dense(made.problem.model.dim), dense[chosen])


def wide_updates(value=1.0, dtype=torch.float32, width=1100):
    """Three users whose rows are longer than what C forms at a time; the second touches one row, the third none."""
    rng = torch.Generator().manual_seed(0)

    def user(terms):
        numbers, sources = torch.randint(HEIGHT, (terms,), generator=rng), torch.randint(7, (terms,), generator=rng)
        factors, table = torch.randn(terms, generator=rng), value * torch.randn(7, width, generator=rng)
        return SparseOuterProducts(numbers, sources, factors.to(dtype), table.to(dtype))

    users = [[user(40), user(3)], [user(1)], [SparseOuterProducts.none(torch.empty(HEIGHT, width, dtype=dtype))]]
    return Updates([OuterProductUpdates(0, HEIGHT, users)]), HEIGHT * width


@pytest.mark.parametrize("value", [1e-20, 1.0, 1e18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clipped_sum_of_terms_is_longer_than_the_clip_nor_much_shorter(dtype, value):
    updates, dim = wide_updates(value, dtype)
    norms = updates.norms()
    exact = torch.stack([row.double().div(value).square().sort().values.sum().sqrt() for row in updates.dense(dim)])
    torch.testing.assert_close(norms, exact * value, rtol=1e-14, atol=0)
    for user in (0, 1):
        scale, within = clip_factors(norms, 0.3 * float(norms[user]))
        assert not within[user]
        total = torch.zeros(dim, dtype=torch.float64)
        updates.add_to(total.unsqueeze(0), torch.where(torch.arange(3) == user, scale, 0.0))
        clipped = float((total / value).square().sort().values.sum().sqrt()) * value
        assert 0.3 * float(norms[user]) * (1 - 1.1e-12) <= clipped <= 0.3 * float(norms[user])


def test_the_norm_of_very_many_rows_is_far_closer_than_the_margin_of_the_clip():
    rows = torch.arange(300_000)
    terms = SparseOuterProducts(rows, torch.zeros_like(rows), torch.ones(len(rows)), torch.tensor([[0.1]]))
    exact = float(torch.tensor(0.1)) * len(rows) ** 0.5
    norm = float(Updates([OuterProductUpdates(0, len(rows), [[terms]])]).norms()[0])
    assert norm == pytest.approx(exact, rel=1e-14)  # one after the other the squares would be off by 1e-12


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_terms_that_are_not_finite_make_the_norm_so_and_take_no_part(dtype, bad):
    updates, dim = wide_updates(dtype=dtype)
    updates.pieces[0].users[1][0].table[:, 3] = bad
    norms = updates.norms()
    assert norms.isfinite().tolist() == [True, False, True]
    total, expected = torch.zeros(2, dim, dtype=torch.float64)
    updates.add_to(total.unsqueeze(0), clip_factors(norms, 1e9)[0])
    updates.of_users(torch.tensor([True, False, True])).add_to(
        expected.unsqueeze(0), torch.ones(2, dtype=torch.float64)
    )
    assert torch.equal(total, expected)
