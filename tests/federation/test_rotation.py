"""The rotation is orthogonal, flat, and everybody's."""

import math

import pytest
import torch

from clipline.federation.rotation import Rotation, hadamard, hartley, public_generator

LENGTHS = [1, 2, 3, 31, 64, 65, 1000, 5996, 20_000]


def matrix_of(rotation, round_index=0):
    identity = torch.eye(rotation.length, dtype=torch.float64)
    return torch.stack([rotation.forward(row, round_index) for row in identity], 1)  # (dim, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_rotating_back_gives_the_vector(length):
    rotation, vector = Rotation(length), torch.randn(length, dtype=torch.float64)
    rotated = rotation.forward(vector, 3)
    assert rotated.shape == (rotation.dim,)
    assert float(rotated.norm()) == pytest.approx(float(vector.norm()), rel=1e-12)
    torch.testing.assert_close(rotation.backward(rotated, 3), vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("length", LENGTHS[:7])
def test_the_matrix_is_orthogonal_and_no_entry_is_larger_than_stated(length):
    rotation = Rotation(length)
    matrix = matrix_of(rotation)
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(length, dtype=torch.float64), rtol=0, atol=1e-12)
    assert float(matrix.abs().max()) <= math.sqrt(rotation.flatness / rotation.dim) * (1 + 1e-12)


@pytest.mark.parametrize("length", [1, 10, 100, 1000, 5996, 100_000, 1_206_591, 50_000_000])
def test_padding_adds_a_32nd_at_most(length):
    assert length <= Rotation(length).dim <= max(length * 33 / 32, length + 1)


@pytest.mark.parametrize("side", [1, 2, 3, 5, 37, 47, 74])
def test_hartley_matrices_are_symmetric_and_orthogonal(side):
    matrix = hartley(side)
    torch.testing.assert_close(matrix @ matrix, torch.eye(side, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(matrix, matrix.T)
    assert float(matrix.abs().max()) <= math.sqrt(2 / side) * (1 + 1e-12)


def test_a_hadamard_matrix_by_hand():
    signs = [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
    assert (2 * hadamard(4)).tolist() == signs


def test_one_long_coordinate_and_many_equal_ones_are_spread():
    rotation = Rotation(20_000)
    for vector in (torch.arange(20_000) == 7, torch.full((20_000,), 20_000**-0.5)):
        rotated = rotation.forward(vector.double(), 5)
        # A normal number is beyond 6.5 deviations once in 10^10, and flatness can double the variance.
        assert float(rotated.abs().max()) < 6.5 * math.sqrt(rotation.flatness / rotation.dim)


def test_signs_are_those_of_the_round_for_everybody():
    vector = torch.ones(1000, dtype=torch.float64)
    first, again, other = (Rotation(1000).forward(vector, t) for t in (1, 1, 2))
    assert torch.equal(first, again)
    assert float((first - other).norm()) > 1
    assert public_generator("signs", 1).random() != public_generator("mask", 1).random()
