"""Independent random streams from one seed or one secret key, each named by its purpose.

Who is sampled and the noise come from generators keyed by seed, purpose and round: NumPy's, or cryptographic ones. A
user's randomness (order of examples, dropout) is counter-based: a hash of seed, purpose, round, the user's identity
(`Population.identities`: the user's own id, not the position in a list) and index. What a user draws does not depend on
blocks, workers or devices, nor on other users who are added, removed or renamed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError
from ..settings import check
from .normal_numbers import KeyedNormal, SystemNormal

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step of the splitmix64 sequence
_MASK = (1 << 64) - 1
_KEY = 1 << 63  # a seed from here on is a key
GUESSABLE = 1 << 40  # below this a seed is found by trying all of them

NoiseSource = Literal["seed", "system"]
NormalGenerator = np.random.Generator | SystemNormal  # of noise and cohorts


class SecretKey:
    """256 bits of the operating system. Every run draws a new one; a run that is resumed takes its own again."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Draw another."""
        self.restore(secrets.token_bytes(32))

    def restore(self, key: bytes) -> None:
        """Take the key of a run that goes on."""
        self.unprivate_bytes, self._hidden = key, set[int]()

    def hide(self, round_index: int) -> None:
        """Refuse to draw the noise of a round twice: another sum under it would show the difference of the two."""
        if round_index in self._hidden:
            raise RunError(
                f"the noise of round {round_index} was drawn before but hides one release only",
                "run the training anew, or resume its run directory",
            )
        self._hidden.add(round_index)


@dataclass(frozen=True)
class Streams:
    """All randomness of a run.

    `noise_source="seed"` makes cohorts and noise repeatable, for simulations; whoever knows the seed can then tell who
    took part, and subtract the noise. `noise_source="system"` takes both, and users' own randomness, from a secret key,
    by cryptographic generators, which seeds of more than 63 bits have too. Use it when the model will be published.
    Never use one seed twice on different data.
    """

    seed: int
    noise_source: NoiseSource = "seed"
    key: SecretKey = field(default_factory=SecretKey, repr=False, compare=False)

    def __post_init__(self) -> None:
        check("seed", self.seed)
        check("noise_source", self.noise_source)

    def sampling(self, round_index: int) -> NormalGenerator:
        """The generator that samples this round's cohort. As secret as the noise: amplification needs it."""
        return self._secret("sampling", round_index)

    def noise(self, round_index: int) -> NormalGenerator:
        """The generator of the noise on this round's release; a cryptographic one for "system"."""
        if self.noise_source == "system":
            self.key.hide(round_index)
        return self._secret("noise", round_index)

    def shares(self, round_index: int) -> NormalGenerator:
        """The generator of the noise that simulated clients add in this round."""
        return self._secret("noise" if self.noise_source == "seed" else "shares of noise", round_index)

    def rounding(self, round_index: int) -> np.random.Generator:
        """The generator by which this round's encoded updates are rounded, where clients are simulated."""
        return self._generator("rounding", round_index)

    def statistic(self, identity: str) -> NormalGenerator:
        """The generator of the noise on one private statistic; no round's noise, whatever the seed."""
        return SystemNormal() if self.noise_source == "system" else self._secret(f"statistic {identity}", 0)

    def initial(self) -> int:
        """The 63-bit seed of the model's initial parameters."""
        return int.from_bytes(_hash(f"clipline/{self.seed}/initial/0")[:8], "little") >> 1

    def user_key(self, purpose: str, round_index: int, identity: int) -> int:
        """The 64-bit key of one user's randomness for one purpose in one round, for `user_bits`."""
        return _mix(self._users_base(purpose, round_index) ^ _mix((identity + 1) * _GOLDEN & _MASK))

    def user_keys(self, purpose: str, round_index: int, identities: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """`user_key` of many users at once."""
        return keys_of([(self, round_index)], purpose, identities, np.zeros(len(identities), np.int64))

    def _secret(self, purpose: str, round_index: int) -> NormalGenerator:
        """A cryptographic generator, unless the seed is a short one."""
        if self.noise_source == "system" or self.seed >= _KEY:
            return KeyedNormal(self._digest(purpose, round_index, 32))
        return self._generator(purpose, round_index)

    def _generator(self, purpose: str, round_index: int) -> np.random.Generator:
        # Not cryptographic, but nobody sees what it draws where the key is secret, and every round has its own.
        return np.random.Generator(np.random.Philox(key=int.from_bytes(self._digest(purpose, round_index), "little")))

    def _users_base(self, purpose: str, round_index: int) -> int:
        return int.from_bytes(self._digest(purpose, round_index)[:8], "little")

    def _digest(self, purpose: str, round_index: int, size: int = 16) -> bytes:
        if self.noise_source == "system":  # the key alone: a resume may have another seed
            return _hash(f"clipline/{purpose}/{round_index}", self.key.unprivate_bytes, size)
        return _hash(f"clipline/{self.seed}/{purpose}/{round_index}", size=size)


def _hash(text: str, key: bytes = b"", size: int = 16) -> bytes:
    return hashlib.blake2b(text.encode(), key=key, digest_size=size).digest()


def keys_of(
    rounds: Sequence[tuple[Streams, int]], purpose: str, identities: NDArray[np.uint64], owners: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """`user_key` of users of several runs at once: user i takes part in `rounds[owners[i]]`, a round of one run."""
    bases = np.array([streams._users_base(purpose, round_index) for streams, round_index in rounds], np.uint64)
    words = (identities.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    return _mix_words(bases[owners] ^ _mix_words(words))


def user_bits(key: int, count: int) -> NDArray[np.uint64]:
    """`count` pseudo-random 64-bit words; word i depends on the key and i alone (splitmix64 as a counter)."""
    return counter_bits(np.array([key], np.uint64), np.arange(count))


def counter_bits(keys: NDArray[np.uint64], index: NDArray[np.int64] | int) -> NDArray[np.uint64]:
    """Word `index` of each key, broadcast together: `user_bits(key, index + 1)[index]` for many at once."""
    return _mix_words((np.atleast_1d(index).astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + keys)


def user_order(key: int, count: int) -> NDArray[np.intp]:
    """A uniformly random order of `count` examples: the order of their random words."""
    return np.argsort(user_bits(key, count), kind="stable")


def _mix_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finaliser on arrays; multiplication wraps around."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix(word: int) -> int:
    """The splitmix64 finaliser on one word, in Python integers."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
