"""A random rotation that spreads every vector over all coordinates: no coordinate of the result is large.

Random signs, then an orthogonal and symmetric matrix whose entries are all small. Everybody can make the signs of a
round: they are public, and nobody's update depends on them.
"""

from __future__ import annotations

import hashlib
import math
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

_BLOCKS = 32  # at least so many blocks where there are as many numbers, so that padding adds a 32nd at most
_LARGEST = 14  # of a block, in bits: larger ones cost more work
_SIDE = 7  # of a Hadamard matrix, in bits


class Rotation:
    """The rotation of vectors with `length` numbers, which it pads with zeros to `dim`.

    The matrix is a product over axes: Hadamard matrices within blocks of a power of two, and one across the blocks.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        bits = min(max(length // _BLOCKS, 1).bit_length() - 1, _LARGEST)
        self.blocks = math.ceil(length / (1 << bits))
        self.dim = self.blocks << bits
        parts = math.ceil(bits / _SIDE)
        self._sides = [1 << ((bits + part) // parts) for part in range(parts)]

    @property
    def flatness(self) -> float:
        """No entry of the matrix is larger than sqrt(flatness / dim)."""
        return 1.0 if self.blocks & (self.blocks - 1) == 0 else 2.0

    @cached_property
    def _matrices(self) -> list[Tensor]:
        across = hadamard(self.blocks) if self.flatness == 1 else hartley(self.blocks)
        return [across, *(hadamard(side) for side in self._sides)]

    def forward(self, vector: Tensor, round_index: int) -> Tensor:
        """(dim,): the rotated vector (length,), in its own type."""
        padded = vector.new_zeros(self.dim)
        torch.mul(vector, self._signs(round_index, vector.dtype)[: self.length], out=padded[: self.length])
        return self._product(padded)

    def backward(self, rotated: Tensor, round_index: int) -> Tensor:
        """(length,): the vector whose rotation this is."""
        return (self._product(rotated) * self._signs(round_index, rotated.dtype))[: self.length]

    def _product(self, vector: Tensor) -> Tensor:
        outer = 1
        for matrix in self._matrices:
            side, matrix = len(matrix), matrix.to(vector.dtype)
            if outer * side == self.dim:  # the last axis
                vector = vector.view(outer, side) @ matrix
            else:
                vector = torch.matmul(matrix, vector.view(outer, side, -1))
            outer *= side
        return vector.reshape(-1)

    def _signs(self, round_index: int, dtype: torch.dtype) -> Tensor:
        return _signs(self.dim, round_index, dtype)


def public_generator(purpose: str, round_index: int) -> np.random.Generator:
    """A generator that everybody can make: of signs and masks, never of noise."""
    digest = hashlib.blake2b(f"clipline/public/{purpose}/{round_index}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


@lru_cache(maxsize=2)
def _signs(dim: int, round_index: int, dtype: torch.dtype) -> Tensor:
    words = np.frombuffer(public_generator("signs", round_index).bytes((dim + 7) // 8), np.uint8)
    return 1 - 2 * torch.from_numpy(np.unpackbits(words)[:dim]).to(dtype)


@lru_cache(maxsize=16)
def hadamard(side: int) -> Tensor:
    """(side, side) float64 for a power of two: every entry is +-1 / sqrt(side)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < side:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(side)


@lru_cache(maxsize=16)
def hartley(side: int) -> Tensor:
    """(side, side) float64, symmetric and orthogonal: no entry is larger than sqrt(2 / side)."""
    turns = (torch.outer(torch.arange(side), torch.arange(side)) % side).double() / side
    return ((2 * math.pi * turns).cos() + (2 * math.pi * turns).sin()) / math.sqrt(side)
