import math

import pytest
import torch
from samples import aggregate, opened

from clipline.engine.updates import Dense, Updates
from clipline.federated.clipping import clip_factors, clip_rows, join_bit


def test_a_row_within_is_unchanged_and_a_longer_one_is_scaled_to_the_clip():
    deltas = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])  # norms 5, 0.5, 0
    clipped, within = clip_rows(deltas, 1.0)
    assert within.tolist() == [False, True, True]
    assert clipped[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-6)
    assert torch.equal(clipped[1:], deltas[1:].double())


def test_a_norm_equal_to_the_clip_is_within():
    _, within = clip_rows(torch.tensor([[3.0, 4.0]]), 5.0)
    assert within.tolist() == [True]


@pytest.mark.parametrize(
    ("dtype", "clip", "size", "entry"),
    [
        (torch.float16, 0.01, 100, 3e4),
        (torch.float32, 0.01, 100_000, 3e38),
        (torch.float32, 0.01, 4096, 2.7e38),
        (torch.float32, 1e-30, 10, 1e12),
        (torch.float64, 1.0, 1000, 1e306),
        (torch.float64, 1e-30, 1000, 1e-25),
    ],
)
def test_huge_rows_and_tiny_clips_of_any_type_end_within_the_clip(dtype, clip, size, entry):
    rows = torch.full((1, size), entry, dtype=dtype)
    clipped, within = clip_rows(rows, clip)
    assert within.tolist() == [False]
    length = math.sqrt(math.fsum((float(value) / clip) ** 2 for value in clipped[0]))
    assert 1 - 1e-9 < length <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_clipped_row_is_longer_than_the_clip_even_by_a_rounding(dtype):
    rows = torch.randn(500, 333, generator=torch.Generator().manual_seed(0)).to(dtype)
    for clip in (1e-20, 0.0123, 1.0, 7.7):
        clipped, _ = clip_rows(rows * 1e3, clip)
        for row in clipped:
            exact = math.fsum(float(value) ** 2 for value in row.double())
            assert exact <= clip**2
        assert float(clipped.double().norm(dim=1).min()) >= clip * (1 - 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_zero_and_is_not_within(bad):
    deltas = torch.tensor([[1.0, bad], [0.1, 0.0]])
    for clip in (0.5, math.inf):
        clipped, within = clip_rows(deltas, clip)
        assert within.tolist() == [False, True]
        assert clipped[0].tolist() == [0.0, 0.0]
        assert clipped[1].tolist() == pytest.approx([0.1, 0.0])


def test_a_huge_but_finite_row_is_clipped_and_not_lost():
    clipped, within = clip_rows(torch.full((1, 4), 1e38), 2.0)  # its norm overflows float32
    assert within.tolist() == [False]
    assert clipped[0].tolist() == pytest.approx([1.0] * 4, rel=1e-6)


def test_update_and_centred_bit_are_one_vector():
    joint = join_bit(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([True, False]))
    assert joint.tolist() == [[1.0, 2.0, 0.5], [3.0, 4.0, -0.5]]


@pytest.mark.parametrize("block", [1, 2, 7, 40])
def test_the_sum_does_not_depend_on_the_blocks(block):
    deltas = torch.randn(40, 5, generator=torch.Generator().manual_seed(1))
    total = aggregate([Updates([Dense(0, rows)]) for rows in deltas.split(block)], 1.5, dim=5)
    norms = deltas.double().norm(dim=1)
    expected = (deltas.double() * (1.5 / norms).clamp(max=1).unsqueeze(1)).sum(0)
    inside = opened(total)
    assert inside[:-1].tolist() == pytest.approx(expected.tolist(), rel=1e-6, abs=1e-6)
    assert float(inside[-1]) == float((norms <= 1.5).sum()) - 20
    assert total.bound == 1.5


def test_an_empty_cohort_sums_to_zero():
    assert opened(aggregate([], 1.0, dim=3)).tolist() == [0.0] * 4


def test_a_private_sum_shows_nothing_of_itself_and_updates_neither():
    updates = Updates([Dense(0, torch.tensor([[123.456, 0.0]]))])
    total = aggregate([updates], 1e9, dim=2)
    for private in (total, updates, *updates.pieces):
        assert "123" not in repr(private)
        assert "tensor" not in str(private)


@pytest.mark.parametrize("clips", ["one", "each its own"])
def test_factors_at_the_ends_of_what_a_norm_can_be(clips):
    tiny, huge = 5e-324, 1.7e308
    norms = torch.tensor([0.0, tiny, 1e-309, 1.0, 2.0, huge, torch.inf, torch.nan], dtype=torch.float64)

    def factors(clip):
        scale, within = clip_factors(norms, clip if clips == "one" else torch.full_like(norms, clip))
        return scale.tolist(), within.tolist()

    assert factors(1.0)[0][:4] == [1.0] * 4
    assert factors(1.0)[0][4] == pytest.approx(0.5, rel=1e-11)
    assert factors(1.0)[0][5:] == [pytest.approx(1 / huge), 0.0, 0.0]
    assert factors(1.0)[1] == [True] * 4 + [False] * 4
    assert factors(math.inf) == ([1.0] * 6 + [0.0] * 2, [True] * 6 + [False] * 2)
    scale, within = factors(1e-320)
    assert within == [True, True] + [False] * 6
    for norm, factor in zip(norms[2:6].tolist(), scale[2:6], strict=True):
        assert norm * factor <= 1e-320
