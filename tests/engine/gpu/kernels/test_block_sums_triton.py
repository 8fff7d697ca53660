"""Norms and sums of a block of updates on a GPU, against those of the CPU in float64."""

import math

import pytest
import torch

from clipline.engine import choose  # hands the sums their kernels
from clipline.engine.core.precision import kernels_switched
from clipline.engine.core.updates import Dense, Rows, Updates
from clipline.engine.gpu.kernels import convolution

DOUBLE = torch.float64
USERS = 3
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or convolution.convolution_kernels is None, reason="needs a GPU and Triton"
)


@needs_gpu
@pytest.mark.parametrize("width", [1, 1023, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_norms_and_sums_on_a_gpu_are_those_of_float64(dtype, width):
    values = torch.randn(7, width + 5, generator=torch.Generator().manual_seed(1), dtype=DOUBLE).to(dtype)
    values = (values * torch.logspace(-15, 15, 7, dtype=dtype).unsqueeze(1))[:, 2 : width + 2]  # rows of a wider matrix
    updates = Updates([Dense(0, values.cuda())])
    expected = [math.sqrt(math.fsum(value * value for value in row)) for row in values.tolist()]  # torch's is 1e-14 off
    assert updates.norms().tolist() == pytest.approx(expected, rel=1e-15)
    scale, total = torch.linspace(0, 1, 7, dtype=DOUBLE), torch.ones(width, dtype=DOUBLE, device="cuda")
    updates.add_to(total.unsqueeze(0), scale.cuda())
    error = (total.cpu() - 1 - scale @ values.double()).abs()
    assert (error <= 1e-14 * (1 + scale @ values.double().abs())).all()
    updates.pieces[0].values[3, 0] = torch.inf
    assert not updates.norms()[3].isfinite()


@needs_gpu
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("width", [1, 250, 1023, 9_001, 70_001, 600_000])
def test_a_norm_on_a_gpu_is_the_same_to_the_last_bit_whoever_else_is_in_the_block(width, kernels):
    generator = torch.Generator(device="cuda").manual_seed(1)
    after, before = (torch.randn(130, width, generator=generator, device="cuda") for _ in range(2))
    bias = torch.randn(130, 62, generator=generator, device="cuda")
    used = torch.ones(130, 1, dtype=torch.bool, device="cuda")

    def norms(users):  # slices begin at any place in memory
        dense = Updates([Dense(0, after[users], before[users]), Dense(width, bias[users])]).norms()
        shared = Updates([Dense(0, after[users], before[:1]), Dense(width, bias[users])]).norms()
        places = torch.zeros(len(dense), 1, dtype=torch.int64, device="cuda")
        rows = Rows(0, 1, places, after[users].unsqueeze(1), used[users], before[users].unsqueeze(1))
        return torch.stack([dense, shared, Updates([rows]).norms()])

    with kernels_switched(kernels):
        together = norms(slice(0, 130))
        for users in (slice(0, 1), slice(3, 5), slice(1, 20), slice(7, 40), slice(0, 129), slice(1, 130)):
            assert torch.equal(norms(users), together[:, users])


@needs_gpu
@pytest.mark.parametrize("runs", ["one", "several"])
@pytest.mark.parametrize("width", [1, 129, 70_001])
def test_what_was_before_is_subtracted_as_a_subtraction_does(width, runs):
    generator = torch.Generator().manual_seed(1)
    after = torch.randn(21, width, generator=generator).cuda()
    before = torch.randn(1 if runs == "one" else 21, width, generator=generator).cuda()
    formed, later = Updates([Dense(0, after - before)]), Updates([Dense(0, after, before)])
    torch.testing.assert_close(later.norms(), formed.norms(), rtol=1e-14, atol=0)
    scale = torch.linspace(0, 1, 21, dtype=DOUBLE, device="cuda")
    totals = [torch.ones(width, dtype=DOUBLE, device="cuda") for _ in range(2)]
    for updates, total in zip((formed, later), totals, strict=True):
        updates.add_to(total.unsqueeze(0), scale)
    torch.testing.assert_close(*totals, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(totals[0], 1 + scale @ (after - before).double(), rtol=1e-13, atol=1e-13)
    assert torch.equal(later.dense(width), formed.dense(width))
    after[4, 0] = torch.inf
    after[0] = torch.nan  # whose scale is 0
    later.add_to(totals[0].unsqueeze(0), torch.where(torch.arange(21, device="cuda") == 4, 0.0, scale))
    assert totals[0].isfinite().all()
    assert later.norms().isfinite().tolist() == [user not in (0, 4) for user in range(21)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_rows_that_began_somewhere_are_those_with_the_beginning_subtracted_and_padding_left_out(device):
    generator = torch.Generator().manual_seed(1)
    places = torch.stack([torch.randperm(50, generator=generator)[:20].sort().values for _ in range(7)]).to(device)
    after, before = (torch.randn(7, 20, 600, generator=generator).to(device) for _ in range(2))
    used = (torch.arange(20) < torch.tensor([20, 3, 0, 7, 19, 1, 12]).unsqueeze(1)).to(device)
    formed = Rows(5, 50, places, (after - before) * used.unsqueeze(2))
    later = Rows(5, 50, places, after, used, before)
    scale = torch.linspace(0, 1, 7, dtype=DOUBLE, device=device)
    torch.testing.assert_close(Updates([later]).norms(), Updates([formed]).norms(), rtol=1e-14, atol=0)
    totals = [torch.ones(5 + 50 * 600, dtype=DOUBLE, device=device) for _ in range(2)]
    for rows, total in zip((formed, later), totals, strict=True):
        rows.add_to(total, scale)
    torch.testing.assert_close(*totals, rtol=1e-13, atol=1e-13)
    dense = [Updates([rows]).dense(5 + 50 * 600) for rows in (formed, later)]
    assert torch.equal(*dense)
    torch.testing.assert_close(totals[0], 1 + scale @ dense[0].double(), rtol=1e-13, atol=1e-13)
    chosen = scale > 0.4
    assert torch.equal(later.of_users(chosen).formed(), formed.values[chosen])


@needs_gpu
@pytest.mark.parametrize("padded", [True, False])
def test_rows_on_a_gpu_add_up_as_on_the_cpu_and_the_same_every_time(padded):
    generator = torch.Generator().manual_seed(1)
    places = torch.stack([torch.randperm(50, generator=generator)[:20].sort().values for _ in range(30)])
    values = torch.randn(30, 20, 600, generator=generator)
    used = torch.arange(20) < torch.randint(0, 20, (30, 1), generator=generator) if padded else None
    if used is not None:
        places, values = places.masked_fill(~used, 0), values.masked_fill(~used.unsqueeze(2), 0.0)
    scale = torch.linspace(0, 1, 30, dtype=DOUBLE)
    values[0] = torch.nan  # whose scale is 0
    expected = torch.ones(5 + 50 * 600 + 3, dtype=DOUBLE)
    Rows(5, 50, places, values).add_to(expected, scale)
    sums = []
    for _ in range(2):
        total = torch.ones(expected.shape, dtype=DOUBLE, device="cuda")
        on_gpu = Rows(5, 50, places.cuda(), values.cuda(), None if used is None else used.cuda())
        on_gpu.add_to(total, scale.cuda())
        sums.append(total)
    assert torch.equal(*sums)
    torch.testing.assert_close(sums[0].cpu(), expected, rtol=1e-13, atol=1e-13)


@needs_gpu
@pytest.mark.parametrize("users", [1, 8, 21])
def test_spreading_writes_every_row_and_nothing_beside(users):
    row, rows = torch.randn(1, 3001, device="cuda"), torch.full((users + 1, 3001), 7.0, device="cuda")
    choose.block_sums_triton.spread(row[0], rows[:users])
    assert torch.equal(rows[:users], row.expand(users, 3001))
    assert (rows[users:] == 7).all()
    rounded = torch.zeros(users, 3001, dtype=torch.bfloat16, device="cuda")
    choose.block_sums_triton.spread(row[0], rounded)
    assert torch.equal(rounded, row.bfloat16().expand(users, 3001))
