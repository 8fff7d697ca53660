"""Random numbers that belong to the user who trains: for a model's dropout, crops and the like.

They are counter-based: a hash of a key and an index. The engine sets the key of every `UserRandom` before each
step, from seed, round, user, step and place in the model. So the user's own processor, a stack of users and a GPU draw
the same numbers, where torch's generators would not. On a processor core NumPy computes them for a user alone: it has
32-bit words without a sign, and works in place with less ado.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..streams import counter_bits
from .stacked.stacks import stacked

BITS = 31  # of a drawn number: 32 less the sign


class UserRandom(nn.Module):
    """A source of random numbers inside a model: hold one, or inherit from it, and draw in `forward`."""

    key: Tensor  # (2,) int32
    draws: int = 0  # in this call of the model so far: each draw is another

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)

    def bits(self, *shape: int) -> Tensor:
        """Whole numbers from 0 to 2^31 - 1, int32 of this shape, all independent and equally likely."""
        if self.key.device.type == "cpu" and not stacked(self.key):
            return torch.from_numpy(self._words(math.prod(shape))).view(shape)
        index = torch.arange(math.prod(shape), dtype=torch.int32, device=self.key.device)
        words = _mixed(index + self.key[0]).bitwise_xor_(self.key[1] + self._again())
        return _mixed(words).bitwise_and_(0x7FFFFFFF).view(shape)

    def kept(self, values: Tensor, p: float) -> Tensor:
        """What to multiply `values` with so that each is dropped with probability p and the others grow by 1 / (1 - p).

        Element i of the values, counted by row, is dropped if number i of `bits` is below p * 2^31.
        """
        limit, scale = round(p * 2**BITS), 1 / (1 - p)
        if self.key.device.type == "cpu" and values.dtype == torch.float32 and not stacked(self.key, values):
            words = self._words(values.numel())
            # The sign of limit - 1 - word, all over the word, cuts the scale out: comparing and converting take longer.
            np.subtract(np.int32(limit - 1), words, out=words)
            np.right_shift(words, 31, out=words)
            np.bitwise_and(words, np.float32(scale).view(np.int32), out=words)
            return torch.from_numpy(words.view(np.float32)).view(values.shape)
        factors: Tensor = (self.bits(*values.shape) >= limit).to(values.dtype) * scale
        return factors

    def _words(self, count: int) -> NDArray[np.int32]:
        """`bits` of this many, computed by NumPy."""
        first, second = (self.key.numpy() + np.array([0, self._again()], np.int32)).view(np.uint32)
        words = np.arange(count, dtype=np.uint32)
        words += first
        spare = np.empty_like(words)
        _mix(words, spare)
        words ^= second
        _mix(words, spare)
        words &= np.uint32(0x7FFFFFFF)
        return words.view(np.int32)

    def _again(self) -> int:
        """A 32-bit number that differs from draw to draw."""
        again = (self.draws * 0x9E3779B9 + 2**31) % 2**32 - 2**31
        self.draws += 1
        return again


def _mix(words: NDArray[np.uint32], spare: NDArray[np.uint32]) -> None:
    """`_mixed`, in place."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, None)):
        np.right_shift(words, shift, out=spare)
        words ^= spare
        if factor is not None:
            words *= np.uint32(factor)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of 32-bit words with hardly any bias (constants found by C. Wellons' search, "lowbias32")."""
    # A shift of int32 drags the sign along: it is masked off. In place, as fresh memory costs more than the arithmetic.
    words = (words ^ (words >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    words = words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))


def step_keys(keys: NDArray[np.uint64], steps: int, chances: int) -> NDArray[np.int32]:
    """The key of every `UserRandom` of a model at every step, from one key a user: (users, steps, chances, 2)."""
    words = counter_bits(keys[:, None], np.arange(steps * chances))
    return words.astype("<u8", copy=False).view(np.int32).reshape(len(keys), steps, chances, 2)
