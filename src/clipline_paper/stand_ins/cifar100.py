"""Stand-in for federated CIFAR-100: users by Pachinko allocation, and a coloured texture for each of 100 labels.

The five fine labels of a coarse one share their colours and differ in their waves. Each user has an own tint and
contrast. Which labels a user holds depends on how many users there are, because labels are given out
without replacement; what an image looks like depends on user, place and label alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clipline import Population
from clipline.random import Streams, counter_bits

from ..paper_task import STAND_IN_SEED
from ..preprocessing.pachinko import pachinko_labels

FINE, COARSE = 100, 20
EXAMPLES = 100  # of every user, as in the original
SIDE = 32
WAVES = 3
BLOCK = 250  # images drawn at once
NOISE = 20.0  # half the range of the noise of a pixel

Real = NDArray[np.float32]


def cifar100_users(first: int, users: int) -> Population:
    """Users from number `first` on, 100 images each: `pixels` (32, 32, 3) uint8, `labels` uint8."""
    rng = np.random.Generator(np.random.Philox(key=Streams(STAND_IN_SEED).user_key("pictures/allocation", 0, first)))
    coarse_of_fine = np.arange(FINE) // (FINE // COARSE)
    counts = np.full(FINE, -(-users * EXAMPLES // FINE))
    labels = pachinko_labels(counts, coarse_of_fine, users, EXAMPLES, rng).ravel()
    owners = first + np.repeat(np.arange(users), EXAMPLES)
    places = np.tile(np.arange(EXAMPLES), users)
    pixels = np.empty((len(labels), SIDE, SIDE, 3), np.uint8)
    for start in range(0, len(labels), BLOCK):
        block = slice(start, start + BLOCK)
        pixels[block] = _draw(owners[block], places[block], labels[block])
    offsets = np.arange(users + 1, dtype=np.int64) * EXAMPLES
    return Population(offsets, {"pixels": pixels, "labels": labels.astype(np.uint8)})


def _draw(owners: NDArray[np.int64], places: NDArray[np.int64], labels: NDArray[np.int64]) -> NDArray[np.uint8]:
    """(n,) users, places and labels -> (n, 32, 32, 3)."""
    images = counter_bits(_keys("image", owners), places)
    own = _numbers(images, 4 * WAVES)
    waves = _numbers(_keys("waves", labels), 4 * WAVES)
    colours = 60 * _numbers(_keys("colours", labels // (FINE // COARSE)), 3 * WAVES).reshape(-1, WAVES, 3)
    tint = 25 * _numbers(_keys("tint", owners), 3)
    contrast = 1 + 0.3 * _numbers(_keys("contrast", owners), 1)
    turns = np.arange(SIDE, dtype=np.float32) * (2 * np.pi / SIDE)
    rows = (4 * waves[:, 0:WAVES] + 0.3 * own[:, 0:WAVES])[..., None] * turns  # up to 4 cycles, nearly the label's own
    columns = (4 * waves[:, WAVES : 2 * WAVES] + 0.3 * own[:, WAVES : 2 * WAVES])[..., None] * turns
    phases = np.pi * (waves[:, 2 * WAVES : 3 * WAVES] + 0.4 * own[:, 2 * WAVES : 3 * WAVES])
    height = np.sin(rows[:, :, :, None] + columns[:, :, None, :] + phases[..., None, None])  # (n, waves, 32, 32)
    height *= (1 + 0.4 * own[:, 3 * WAVES :])[..., None, None]
    light: Real = np.einsum("nwrc,nwk->nrck", height, colours * contrast[..., None], optimize=True)
    noise = counter_bits(images[:, None] ^ np.uint64(1), np.arange(SIDE * SIDE * 3 // 8)).view(np.uint8)
    light += noise.reshape(light.shape) * np.float32(2 * NOISE / 255)
    light += (128 - NOISE + tint)[:, None, None, :]
    return np.clip(light, 0, 255).astype(np.uint8)


def _keys(purpose: str, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """One key for each number: a hash of purpose and number."""
    base = Streams(STAND_IN_SEED).user_key(f"pictures/{purpose}", 0, 0)
    return counter_bits(np.array([base], np.uint64), numbers)


def _numbers(keys: NDArray[np.uint64], count: int) -> Real:
    """(n,) keys -> (n, count) uniform in [-1, 1)."""
    words = counter_bits(keys[:, None], np.arange(count))
    return ((words >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - 1).astype(np.float32)
