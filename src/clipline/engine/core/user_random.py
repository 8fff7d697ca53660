"""Random numbers of the user who trains, for dropout, crops and the like inside a model.

They are counter-based: a hash of a key and an index. The engine sets the key of every `UserRandom` before each step,
from seed, round, user, step and position in the model. So a CPU core, a stack of users and a GPU draw the same numbers,
which torch's generators would not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...random.streams import counter_bits

BITS = 31  # of a drawn number: 32 minus the sign


class UserRandom(nn.Module):
    """A source of random numbers inside a model: use one as a submodule, or inherit from it, and draw in `forward`."""

    key: Tensor  # (2,) int32
    draws: int = 0  # so far in this call of the model: each draw gives other numbers

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)

    def bits(self, *shape: int) -> Tensor:
        """Independent uniform integers from 0 to 2^31 - 1, int32 of this shape."""
        index = torch.arange(math.prod(shape), dtype=torch.int32, device=self.key.device)
        words = _hash(index + self.key[0]).bitwise_xor_(self.key[1] + self._next_offset())
        return _hash(words).bitwise_and_(0x7FFFFFFF).view(shape)

    def kept(self, values: Tensor, p: float) -> Tensor:
        """The dropout mask to multiply `values` with: 0 with probability p, otherwise 1 / (1 - p).

        Element i of the values, in row-major order, is dropped if number i of `bits` is below p * 2^31.
        """
        scales: Tensor = (self.bits(*values.shape) >= round(p * 2**BITS)).to(values.dtype) * (1 / (1 - p))
        return scales

    def dropped(self, values: Tensor, p: float) -> Tensor:
        """The values after dropout with probability p."""
        return values if p == 0 else values * 0 if p == 1 else values * self.kept(values, p)

    def _next_offset(self) -> int:
        """A 32-bit offset that differs from draw to draw."""
        offset = (self.draws * 0x9E3779B9 + 2**31) % 2**32 - 2**31
        self.draws += 1
        return offset


def _hash(words: Tensor) -> Tensor:
    """A low-bias bijective hash of 32-bit words (constants found by C. Wellons' search, "lowbias32")."""
    # The shift of an int32 extends the sign: mask it off. In place: new memory costs more than the arithmetic.
    words = (words ^ (words >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    words = words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))


def random_layer_keys(keys: NDArray[np.uint64], steps: int, random_keys: int) -> NDArray[np.int32]:
    """The key of every `UserRandom` of a model at every step, from one key a user: (users, steps, random_keys, 2)."""
    words = counter_bits(keys[:, None], np.arange(steps * random_keys))
    return words.astype("<u8", copy=False).view(np.int32).reshape(len(keys), steps, random_keys, 2)
