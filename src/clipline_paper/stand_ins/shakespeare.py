"""Stand-in for Shakespeare by role: each role draws characters from a Markov chain of its own, near a common one."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clipline import Population
from clipline.random import Streams, counter_bits

from ..paper_task import STAND_IN_SEED
from ..preprocessing.text import CHARACTER_BOS, CHARACTER_EOS, CHARACTERS, PAD, ROW

MEAN_SNIPPETS = 16_068 / 715  # of the original: 22.5 a role
UNEVENNESS = 1.0  # standard deviation of the logarithm of a role's number of snippets
MEDIAN_LENGTH, LENGTH_SPREAD, LONGEST = 110, 0.9, 800  # characters of a snippet
COMMON_SPREAD, ROLE_SPREAD = 1.6, 0.5  # of the common chain's log weights, and of a role's deviations from them
FREQUENT_FIRST = " etaonhisrdlumywc,gf\nbp.vkIATSWHOMBN'EDLRFCPGUYK;?!-jxqzVJQX:[]Z"
BLOCK = 64  # roles drawn at once: their chains take 4 MB

Whole = NDArray[np.int64]


def shakespeare_users(first: int, users: int) -> Population:
    """Roles from number `first` on: `tokens` (81,) uint8, rows of snippets as `encode_snippet` cuts them."""
    blocks = [_roles(first + start, min(BLOCK, users - start)) for start in range(0, users, BLOCK)]
    sizes = np.concatenate([sizes for sizes, _ in blocks])
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    return Population(offsets, {"tokens": np.concatenate([tokens for _, tokens in blocks])})


def _roles(first: int, users: int) -> tuple[Whole, NDArray[np.uint8]]:
    """Rows of each role (users,), and the rows (sum, 81)."""
    rngs = [_rng("snippets", first + user) for user in range(users)]
    mean_of_exp = np.exp(UNEVENNESS**2 / 2)
    snippets = [1 + int((MEAN_SNIPPETS - 1) * rng.lognormal(0, UNEVENNESS) / mean_of_exp) for rng in rngs]
    lengths = np.concatenate(
        [
            1 + (MEDIAN_LENGTH * rng.lognormal(0, LENGTH_SPREAD, n)).astype(np.int64)
            for rng, n in zip(rngs, snippets, strict=True)
        ]
    )
    lengths = np.minimum(lengths, LONGEST)
    owners = np.repeat(np.arange(users), snippets)
    keys = np.concatenate([rng.integers(0, 2**64, n, np.uint64) for rng, n in zip(rngs, snippets, strict=True)])
    rows = -(-(lengths + 2) // ROW)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)]) * ROW
    tokens = np.full(starts[-1], PAD, np.uint8)
    tokens[starts[:-1]] = CHARACTER_BOS
    tokens[starts[:-1] + lengths + 1] = CHARACTER_EOS
    ends = np.stack([_chain(first + user) for user in range(users)])  # (users, 86, 86)
    state = np.full(len(lengths), CHARACTERS.index("\n"))
    for place in range(int(lengths.max())):
        alive = np.flatnonzero(lengths > place)
        draws = (counter_bits(keys[alive], place) >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
        state[alive] = (draws[:, None] >= ends[owners[alive], state[alive], :-1]).sum(axis=1)
        tokens[starts[alive] + 1 + place] = state[alive] + 1
    return np.bincount(owners, rows, minlength=users).astype(np.int64), tokens.reshape(-1, ROW)


def _chain(role: int) -> NDArray[np.float32]:
    """One role's cumulative probabilities of the next character, (86, 86): a row for each character before it."""
    weights = np.exp(_common() + ROLE_SPREAD * _rng("chain", role).standard_normal((len(CHARACTERS),) * 2))
    ends: NDArray[np.float64] = np.cumsum(weights, axis=1)
    return (ends / ends[:, -1:]).astype(np.float32)


def _common() -> NDArray[np.float64]:
    """Log weights that all roles share: how frequent a character is, and how well it follows another."""
    ranks = np.array([FREQUENT_FIRST.find(character) for character in CHARACTERS])
    popularity = np.where(ranks < 0, -9.0, -np.log(ranks + 2.0))
    return popularity + COMMON_SPREAD * _rng("habit", 0).standard_normal((len(CHARACTERS),) * 2)


def _rng(purpose: str, number: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=Streams(STAND_IN_SEED).user_key(f"roles/{purpose}", 0, number)))
