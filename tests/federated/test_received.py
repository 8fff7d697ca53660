"""Vectors that clients have clipped and encoded themselves: no client moves a sum by more than its bound."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from samples import opened

from clipline.federated.clipping import ModularSum, PartialSums, centred
from clipline.privacy.events import PoissonSampling

SAMPLING = PoissonSampling(0.5)


def received(vectors, clip=1.0, dim=3):
    """What is in the sum of these vectors, and which of them were added."""
    sums = PartialSums(torch.empty(1, dim + 1, dtype=torch.float64))
    added = [sums.add_clipped(vector, clip) for vector in vectors]
    (total,) = sums.finished([clip], [SAMPLING])
    return opened(total), added


def test_vectors_within_the_clip_are_added_as_they_are():
    total, added = received([torch.tensor([0.5, 0.0, 0.25, 0.5]), torch.tensor([0.0, -0.5, 0.25, -0.5])])
    assert total.tolist() == [0.5, -0.5, 0.5, 0.0]
    assert added == [True, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_longer_update_is_clipped_again_and_the_bit_kept_within_a_half(dtype):
    total, _ = received([torch.tensor([30.0, 40.0, 0.0, 7.0], dtype=dtype)], clip=5.0)
    assert total[:3].tolist() == pytest.approx([3.0, 4.0, 0.0], rel=1e-9)
    assert math.fsum(float(one) ** 2 for one in total[:3]) <= 25
    assert float(total[3]) == 0.5
    assert float(received([torch.tensor([0.0, 0.0, 0.0, -7.0], dtype=dtype)])[0][3]) == -0.5


@pytest.mark.parametrize(
    "vector",
    [
        *map(torch.tensor, ([math.nan, 0.0, 0.0, 0.5], [0.0, math.inf, 0.0, 0.5], [0.0, 0.0, 0.0, math.nan])),
        *map(torch.zeros, (3, 5, (1, 4), 0)),
        *(torch.zeros(4, dtype=dtype) for dtype in (torch.int64, torch.complex64, torch.bool)),
    ],
    ids=str,
)
def test_what_is_no_vector_of_this_sum_adds_nothing(vector):
    good = torch.tensor([0.25, 0.0, 0.0, 0.5])
    total, added = received([vector, good])
    assert added == [False, True]
    assert total.tolist() == [0.25, 0.0, 0.0, 0.5]


@given(arrays(np.float64, 4, elements=st.floats(allow_nan=True, allow_infinity=True)), st.floats(1e-20, 1e20))
@settings(max_examples=200, deadline=None)
def test_no_vector_moves_the_sum_by_more_than_its_bound(vector, clip):
    total, _ = received([torch.from_numpy(vector)], clip=clip)
    assert math.fsum((float(one) / clip) ** 2 for one in total[:3]) <= 1 + 1e-12
    assert abs(float(total[3])) <= 0.5


def test_a_modular_sum_wraps_around_and_is_centred():
    sums = ModularSum(4, 16)
    for vector in ([1, 65535, 40000, 32767], [2, 65535, 40000, 1]):
        assert sums.add(np.array(vector, np.uint16))
    whole = sums.finished(1.0, SAMPLING)
    # by hand, modulo 65536: 3, -2, 80000 - 65536 = 14464, 32768 = -32768
    assert repr(whole) == "ClippedSum(private)"
    assert centred(np.array([3, 131070, 80000, 32768]), 16).tolist() == [3, -2, 14464, -32768]


def test_a_modular_sum_of_32_bits_wraps_at_the_word():
    assert centred(np.array([2**32 - 1, 2**31, 2**31 - 1], np.uint32), 32).tolist() == [-1, -(2**31), 2**31 - 1]


@pytest.mark.parametrize(
    "vector",
    [
        np.zeros(3, np.uint16), np.zeros((1, 4), np.uint16), np.zeros(4, np.int32), np.zeros(4), np.zeros(4, np.uint64),
        np.zeros(4, object), np.zeros(4, bool),
    ],
    ids=lambda array: f"{array.shape} {array.dtype}",
)  # fmt: skip
def test_what_is_no_vector_of_words_adds_nothing(vector):
    assert not ModularSum(4, 16).add(vector)
