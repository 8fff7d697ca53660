"""Updates in pieces: what they stand for, how long they are, and what of them reaches a sum."""

import math
from fractions import Fraction
from functools import partial

import pytest
import torch
from samples import aggregate, opened

from clipline.engine.core.updates import Dense, Rows, Updates
from clipline.federated.clipping import clip_factors, clip_rows, join_bit

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
DIM = 2 + 4 * 3 + 1  # a dense piece, a matrix of 4 rows of 3, a dense piece


def sample(dtype=torch.float64, device="cpu"):
    """Two users: one touches rows 3 and 0 of the matrix, the other row 2 and nothing more."""
    rows = [[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0, 8.0, 9.0], [0.0, 0.0, 0.0]]]
    made = partial(torch.tensor, dtype=dtype, device=device)
    matrix = Rows(2, 4, torch.tensor([[3, 0], [2, 2]], device=device), made(rows))
    return Updates([Dense(0, made([[1.0, 2.0], [3.0, 4.0]])), matrix, Dense(14, made([[10.0], [20.0]]))])


EXPECTED = torch.tensor([[1, 2, 4, 5, 6, 0, 0, 0, 0, 0, 0, 1, 2, 3, 10],
                         [3, 4, 0, 0, 0, 0, 0, 0, 7, 8, 9, 0, 0, 0, 20]], dtype=torch.float64)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pieces_stand_for_rows(dtype):
    updates = sample(dtype)
    rows = updates.dense(DIM)
    assert len(updates) == 2
    assert rows.dtype == dtype
    assert torch.equal(rows.double(), EXPECTED)
    norms = updates.norms()
    assert norms.dtype == torch.float64
    assert norms.tolist() == pytest.approx([math.sqrt(5 + 14 + 77 + 100), math.sqrt(25 + 194 + 400)], rel=1e-15)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scaled_sum_is_that_of_the_rows_and_adds_to_what_was_there(dtype, device):
    total = torch.arange(DIM, dtype=torch.float64, device=device)
    sample(dtype, device).add_to(total.unsqueeze(0), torch.tensor([0.5, 3.0], dtype=torch.float64, device=device))
    assert torch.equal(total.cpu(), torch.arange(DIM) + 0.5 * EXPECTED[0] + 3 * EXPECTED[1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_user_whose_scale_is_0_takes_no_part_whatever_the_values(bad, device):
    updates = sample(device=device)
    for piece in updates.pieces:
        piece.values[1] = bad
    assert not updates.norms().isfinite()[1]
    assert updates.norms()[0] == sample(device=device).norms()[0]
    total = torch.zeros(DIM, dtype=torch.float64, device=device)
    for scale in ([2.0, 0.0], [0.0, 0.0]):
        updates.add_to(total.unsqueeze(0), torch.tensor(scale, dtype=torch.float64, device=device))
        assert torch.equal(total.cpu(), 2 * EXPECTED[0])
    assert opened(aggregate([updates], 100.0, DIM, device=device)).tolist() == [*EXPECTED[0].tolist(), 0.0]


@pytest.mark.parametrize("piece", [0, 1, 2])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_in_any_piece_takes_the_whole_user_out(bad, piece):
    updates = sample(torch.float32)
    updates.pieces[piece].values[0].view(-1)[-1] = bad
    total = opened(aggregate([updates], math.inf, DIM))
    assert total.tolist() == [*EXPECTED[1].tolist(), 0.0]  # bits -1/2 and +1/2


@pytest.mark.parametrize("bad", [(4, 7), ()])
@pytest.mark.parametrize("cut", [lambda rows: Updates([Dense(0, rows[:, :9]), Dense(9, rows[:, 9:])]), None])
def test_updates_of_several_runs_go_each_to_the_sum_of_its_own(cut, bad):
    rows = torch.randn(12, DIM, generator=torch.Generator().manual_seed(1))
    scale = torch.linspace(0.1, 1.2, 12, dtype=torch.float64)
    for user, value in zip(bad, (math.inf, math.nan), strict=False):
        rows[user, 3:], scale[user] = value, 0.0
    run = torch.tensor([0, 3, 1, 0, 0, 1, 3, 3, 0, 0, 1, 3])  # nobody in run 2
    updates, totals = (cut or in_pieces)(rows), torch.ones(4, DIM, dtype=torch.float64)
    updates.add_to(totals, scale, run)
    expected = torch.ones(4, DIM, dtype=torch.float64)
    for user in range(12):
        if user not in bad:
            expected[run[user]] += scale[user] * rows[user].double()
    torch.testing.assert_close(totals, expected, rtol=1e-13, atol=1e-13)


def in_pieces(rows):
    """Random rows of (2 + 4 * 3 + 1) as dense, touched and dense pieces."""
    matrix = rows[:, 2:14].view(-1, 4, 3)
    places = torch.arange(4).flip(0).expand(len(rows), 4)
    return Updates([Dense(0, rows[:, :2]), Rows(2, 4, places, matrix.flip(1)), Dense(14, rows[:, 14:])])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("block", [1, 3, 10, 40])
@pytest.mark.parametrize("cut", [in_pieces, lambda rows: Updates([Dense(0, rows)])])
def test_a_sum_is_that_of_clipped_rows_and_bits_for_blocks_of_any_size(cut, block, dtype):
    rows = torch.randn(40, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    rows *= torch.logspace(-2, 2, 40, dtype=dtype).unsqueeze(1)
    rows[7, 3], rows[30, 14] = math.nan, math.inf
    expected = join_bit(*clip_rows(rows, 1.5)).sum(dim=0)
    total = opened(aggregate([cut(part) for part in rows.split(block)], 1.5, DIM))
    torch.testing.assert_close(total, expected, rtol=1e-13, atol=1e-13)
    assert -20 < float(total[-1]) < 20
    assert total.dtype == torch.float64


SIZES = {
    torch.float32: [1e-45, 1e-38, 1e-20, 1.0, 1e20, 1e38],
    torch.float64: [5e-324, 1e-300, 1e-160, 1.0, 1e150],
}


@pytest.mark.parametrize(("dtype", "sizes"), SIZES.items())
@pytest.mark.parametrize("clip", [1e-30, 0.01, 1.0, 1e10])
def test_no_clipped_update_is_longer_than_the_clip_however_large_or_small(dtype, sizes, clip):
    generator = torch.Generator().manual_seed(2)
    for size in sizes:
        rows = (torch.rand(20, DIM, generator=generator, dtype=torch.float64) * size).to(dtype)
        for updates in (in_pieces(rows), Updates([Dense(0, rows)])):
            for user in range(20):
                alone = updates.of_users(torch.arange(20) == user)
                total = opened(aggregate([alone], clip, DIM))
                parts = [float(value) / clip for value in total[:-1]]
                length = math.sqrt(math.fsum(part * part for part in parts))
                assert length <= 1
                if float(total[-1]) < 0:  # was longer: ends just below, unless no number is small enough for a factor
                    assert length > 1 - 1e-12 or clip / size < 1e-300
                else:
                    assert torch.equal(total[:-1], rows[user].double())


def test_a_user_whose_squares_overflow_adds_nothing_and_is_not_within():
    rows = torch.full((2, DIM), 1e160, dtype=torch.float64)
    rows[1] = 1.0
    total = opened(aggregate([Updates([Dense(0, rows)])], 10.0, DIM))
    assert total.tolist() == [1.0] * DIM + [0.0]  # bits -1/2 and +1/2


def test_many_numbers_go_through_in_parts(monkeypatch):
    monkeypatch.setattr("clipline.engine.core.updates._CHUNK", 8)
    rows = torch.randn(5, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    scale = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    total = torch.zeros(DIM, dtype=torch.float64)
    in_pieces(rows).add_to(total.unsqueeze(0), scale)
    torch.testing.assert_close(total, (scale.unsqueeze(1) * rows).sum(dim=0), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("size", [10**5, 10**6])
def test_no_clipped_update_of_many_equal_numbers_is_longer_than_the_clip(size):
    for value in (0.1, 0.3, 0.7, 1.1):
        row = torch.full((1, size), value, dtype=torch.float32)
        scale, _ = clip_factors(Updates([Dense(0, row)]).norms(), 1.0)
        clipped = float(scale[0]) * float(row[0, 0])
        assert Fraction(clipped) ** 2 * size <= 1  # exactly


BLOCKS = [slice(0, 1), slice(3, 5), slice(1, 20), slice(7, 40), slice(0, 69), slice(2, 70)]


def pieces_of(widths, dtype, users=70):
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(users, width, generator=rng, dtype=torch.float64).to(dtype) for width in widths]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(1,), (1023,), (4010,), (300_001,), (7,) * 60, (5000, 10, 1025, 1)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_is_the_same_to_the_last_bit_whoever_else_is_in_the_block(widths, dtype, threads, device):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pieces = [piece.to(device) for piece in pieces_of(widths, dtype)]
        together = Updates([Dense(0, piece) for piece in pieces]).norms()
        for users in BLOCKS:
            assert torch.equal(Updates([Dense(0, piece[users]) for piece in pieces]).norms(), together[users])
    finally:
        torch.set_num_threads(before)
    exact = [math.sqrt(math.fsum(x * x for piece in pieces for x in piece[user].tolist())) for user in (0, 69)]
    assert together[[0, 69]].tolist() == pytest.approx(exact, rel=1e-15)


def test_the_norm_of_rows_does_not_depend_on_padding_for_others():
    rng = torch.Generator().manual_seed(0)
    values, bias = torch.randn(3, 50, 600, generator=rng), torch.randn(3, 10, generator=rng)
    values[0, 13:], values[2, 31:] = 0.0, 0.0  # padding: user 1 alone touches 50 rows
    places = torch.arange(50).expand(3, 50)
    together = Updates([Rows(0, 50, places, values), Dense(30_000, bias)]).norms()
    for user, touched in ((0, 13), (2, 31)):
        own = Rows(0, 50, places[:1, :touched], values[user : user + 1, :touched])
        assert Updates([own, Dense(30_000, bias[user : user + 1])]).norms() == together[user]
