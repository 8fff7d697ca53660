"""Random numbers that belong to the user who trains: for a model's dropout, crops and the like.

They are counter-based: a hash of a key and an index. The engine sets the key of every `Chance` in the model before each
step, from seed, round, user, step and place in the model. So the user's own processor, a stack of users and a GPU draw
the same numbers, where torch's generators would not.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..streams import counter_bits

BITS = 31  # of a drawn number: 32 less the sign


class Chance(nn.Module):
    """A source of random numbers inside a model: hold one, or inherit from it, and draw in `forward`."""

    key: Tensor  # (2,) int32
    draws: int = 0  # in this call of the model so far: each draw is another

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros(2, dtype=torch.int32), persistent=False)

    def bits(self, *shape: int) -> Tensor:
        """Whole numbers from 0 to 2^31 - 1, int32 of this shape, all independent and equally likely."""
        index = torch.arange(math.prod(shape), dtype=torch.int32, device=self.key.device)
        again = (self.draws * 0x9E3779B9 + 2**31) % 2**32 - 2**31  # as a 32-bit number
        self.draws += 1
        words = _mixed(index + self.key[0]).bitwise_xor_(self.key[1] + again)
        return _mixed(words).bitwise_and_(0x7FFFFFFF).view(shape)


def _mixed(words: Tensor) -> Tensor:
    """A bijection of 32-bit words with hardly any bias (constants found by C. Wellons' search, "lowbias32")."""
    # A shift of int32 drags the sign along: it is masked off. In place, as fresh memory costs more than the arithmetic.
    words = (words ^ (words >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    words = words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))


def step_keys(keys: NDArray[np.uint64], steps: int, chances: int) -> NDArray[np.int32]:
    """The key of every `Chance` of a model at every step, from one key a user: (users, steps, chances, 2)."""
    words = counter_bits(keys[:, None], np.arange(steps * chances))
    return words.astype("<u8", copy=False).view(np.int32).reshape(len(keys), steps, chances, 2)
