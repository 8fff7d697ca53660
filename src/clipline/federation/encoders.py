"""How a client's clipped update and its bit are put into words, and what the server can make of them.

| encoder | unbiased | may enlarge a norm by | bits a coordinate | the server decodes |
| --- | --- | --- | --- | --- |
| `KeptShare` of all | yes | 1 | 32 | every vector |
| `RotatedLevels` | yes | 1 + 2 sqrt(d) / (2^k - 1), usually by far less | k, 1 to 16 | every vector |
| `KeptShare` | yes | 1 / share | 32 share | every vector |
| `SecureIntegers` | but for 1e-6 of a step and float32 | nothing: noise is made for its bound | 14 to 32 | the sum |

Where the server decodes vectors it clips each of them once more (`PartialSums.add_clipped`). So an enlarged norm costs
accuracy and no privacy. All vectors are in clips: the range follows the clip, and nobody tunes it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import SettingError, check_number, check_whole, refuse
from ..federated.clipping import centred, clip_rows
from ..privacy.discrete_noise import SMALLEST_STDDEV, bound_for, share_stddev
from ..random.discrete_gaussian import Words, discrete_gaussian
from .rotation import Rotation, public_generator

Message = NDArray[np.generic]  # what a client uploads: one array

FEWEST_BITS, MOST_BITS = 14, 32  # of a secure sum
LONGEST = 2.0**31  # joint vector in whole numbers: int64 then holds the squared norm of every rounding of it
_TRIES = 8  # roundings of a vector, before it is rounded towards zero
_LONG = 1e-6  # chance, at most, that a rounded vector is longer than the bound, and is rounded anew
_WRAPPED = 1e-9  # chance, at most, that any number of a round's sum wraps around


class Encoder(Protocol):
    """Encodes vectors of one length so that the server can decode each of them; the table says what each states."""

    unbiased: bool

    @property
    def enlarges(self) -> float:
        """By how much the norm of a decoded vector may exceed that of the clipped one."""
        ...

    def encode(self, joint: Tensor, clip: float, round_index: int, rng: np.random.Generator) -> Message:
        """Update and centred bit (dim + 1,), already clipped, as an array. `rng` is the client's own."""
        ...

    def decode(self, message: Message, clip: float, round_index: int) -> Tensor | None:
        """(dim + 1,) float64; None for what is no message of this encoder. It may be longer than the clip."""
        ...


@dataclass(frozen=True)
class KeptShare:
    """A random share of the update, the same for all clients of a round and scaled up; by default all of it."""

    dim: int  # of the model
    share: float = 1.0
    unbiased = True

    def __post_init__(self) -> None:
        check_number("share", self.share, above=0, at_most=1, way_out="give the share of coordinates to send, say 0.1")

    @property
    def enlarges(self) -> float:
        """1 / share, for a vector of kept coordinates alone."""
        return 1 / self.share

    def encode(self, joint: Tensor, clip: float, round_index: int, rng: np.random.Generator) -> Message:
        """The kept coordinates and the bit, float32."""
        kept = _mask(self.dim, self.share, round_index)
        return torch.cat([joint[:-1][kept] / self.share, joint[-1:]]).float().numpy()

    def decode(self, message: Message, clip: float, round_index: int) -> Tensor | None:
        """Zeros where nothing was sent."""
        kept = _mask(self.dim, self.share, round_index)
        if message.dtype != np.float32 or message.shape != (int(kept.sum()) + 1,) or not np.isfinite(message).all():
            return None
        values, joint = torch.from_numpy(message.astype(np.float64)), torch.zeros(self.dim + 1, dtype=torch.float64)
        joint[:-1][kept], joint[-1] = values[:-1], values[-1]
        return joint


@lru_cache(maxsize=2)
def _mask(dim: int, share: float, round_index: int) -> Tensor:
    return torch.from_numpy(public_generator("mask", round_index).random(dim) < share)


@dataclass(frozen=True)
class RotatedLevels:
    """The rotated update, each number rounded at random to one of 2^bits levels; the bit as it is.

    The levels reach as far as the largest number of the client's own rotated update, which is sent along in clips.
    """

    dim: int
    bits: int
    unbiased = True

    def __post_init__(self) -> None:
        check_whole("bits", self.bits, at_least=1, at_most=16, way_out="give the bits a coordinate, say 8")

    @property
    def enlarges(self) -> float:
        """Every number is off by a step at most."""
        return 1 + 2 * math.sqrt(self._rotation.dim) / self._steps

    @property
    def _steps(self) -> int:
        return (1 << self.bits) - 1

    @cached_property
    def _rotation(self) -> Rotation:
        return Rotation(self.dim)

    def encode(self, joint: Tensor, clip: float, round_index: int, rng: np.random.Generator) -> Message:
        """uint8: the largest number (float32), the bit, then the levels, packed."""
        rotated = self._rotation.forward((joint[:-1].double() / clip).float(), round_index)
        reach = float(rotated.abs().max())
        reach = reach if reach > 1e-30 else 0.0  # an update that is almost nothing is sent as nothing
        scaled = (rotated.double() / reach + 1) * (self._steps / 2) if reach else torch.zeros(self._rotation.dim)
        levels = np.floor(scaled.numpy() + rng.random(self._rotation.dim)).clip(0, self._steps).astype(np.uint16)
        head = np.array([reach], "<f4").view(np.uint8), np.array([float(joint[-1]) > 0], np.uint8)
        return np.concatenate([*head, packed(levels, self.bits)])

    def decode(self, message: Message, clip: float, round_index: int) -> Tensor | None:
        """What the levels stand for, rotated back."""
        dim, length = self._rotation.dim, 5 + math.ceil(self._rotation.dim * self.bits / 8)
        if message.dtype != np.uint8 or message.shape != (length,) or message[4] > 1:
            return None
        reach = float(message[:4].copy().view("<f4")[0])
        if not 0 <= reach <= 2:  # of a vector within the clip it is 1 at most; also for NaN
            return None
        levels = torch.from_numpy(unpacked(message[5:], self.bits, dim).astype(np.float64))
        update = self._rotation.backward((levels * (2 / self._steps) - 1) * reach, round_index) * clip
        return torch.cat([update, torch.tensor([float(message[4]) - 0.5], dtype=torch.float64)])


def packed(numbers: NDArray[np.unsignedinteger], bits: int) -> NDArray[np.uint8]:
    """So many bits of each number, one after the other: eight numbers are `bits` bytes."""
    columns = np.zeros((8, -(-len(numbers) // 8)), numbers.dtype)
    columns.T.flat[: len(numbers)] = numbers
    found = np.zeros((columns.shape[1], bits), np.uint8)
    for place, column in enumerate(columns):
        first, shift = divmod(place * bits, 8)
        found[:, first] |= (column << shift).astype(np.uint8)
        for byte in range(first + 1, -(-(place + 1) * bits // 8)):
            found[:, byte] |= (column >> (8 * (byte - first) - shift)).astype(np.uint8)
    return found.reshape(-1)[: -(-len(numbers) * bits // 8)]


def unpacked(data: NDArray[np.generic], bits: int, count: int) -> NDArray[np.unsignedinteger]:
    """The `count` numbers, as `word_type`, that `packed` has made these bytes of."""
    rows = np.zeros((-(-count // 8), bits), np.uint8)
    rows.flat[: len(data)] = data.view(np.uint8)
    found = np.zeros((len(rows), 8), np.uint64)
    for place in range(8):
        first, shift = divmod(place * bits, 8)
        for byte in range(first, -(-(place + 1) * bits // 8)):
            found[:, place] |= rows[:, byte].astype(np.uint64) << (8 * (byte - first))
        found[:, place] >>= shift
    return (found.reshape(-1)[:count] & ((1 << bits) - 1)).astype(word_type(bits))


@dataclass(frozen=True)
class SecureIntegers:
    """Whole numbers for a secure sum modulo 2^bits: the rotated update and bit, scaled, rounded at random.

    The joint vector is (scale update / clip, +-bit_weight), of norm `length`. A rounded vector is never longer than
    `bound`: that is tested in whole numbers, and one that is longer is rounded anew, at last towards zero. Made by
    `secure_integers`, for a `DiscreteMechanism`.
    """

    model_dim: int
    bits: int
    stddev: float  # of the noise on the sum, in whole numbers
    length: float  # of the joint vector before rounding
    bit_weight: float  # 0 if no bit is released
    most_users: int  # more in one sum may wrap around
    unbiased = True  # but for what rounding anew does, less than 1e-6 of a step, and float32 where `bits` is at most 20

    def __post_init__(self) -> None:
        way_out = "take the numbers that secure_integers gives"
        check_number("stddev", self.stddev, at_least=SMALLEST_STDDEV, at_most=LONGEST, way_out=way_out)
        check_number("bit_weight", self.bit_weight, at_least=0, at_most=LONGEST, way_out=way_out)
        check_number("length", self.length, above=self.bit_weight, at_most=LONGEST, way_out=way_out)

    @cached_property
    def rotation(self) -> Rotation:
        """Of update and bit."""
        return Rotation(self.model_dim + 1)

    @property
    def dim(self) -> int:
        """How many numbers are sent."""
        return self.rotation.dim

    @property
    def scale(self) -> float:
        """Whole numbers in a clip."""
        return math.sqrt(self.length**2 - self.bit_weight**2)

    @property
    def unit(self) -> float:
        """Clips in a whole number."""
        return 1 / self.scale

    @property
    def bound_squared(self) -> int:
        """Of the longest rounded vector; a longer one has a chance of _LONG (Kairouz, Liu, Steinke 2021)."""
        factor = math.sqrt(2 * math.log(1 / _LONG))
        return math.floor(self.length**2 + self.dim / 4 + factor * (self.length + math.sqrt(self.dim) / 2))

    @property
    def bound(self) -> float:
        """Norm of the longest rounded vector."""
        return math.sqrt(self.bound_squared) * (1 + 1e-15)

    def encode(
        self, joint: Tensor, clip: float, round_index: int, rng: np.random.Generator, noise: Words | None = None,
        survivors: int = 1,
    ) -> NDArray[np.unsignedinteger]:  # fmt: skip
        """Whole numbers modulo 2^bits, as `word_type`; with a share of the noise if there are words for it.

        The share is made for `survivors`, the declared least number of clients in a sum. What is not finite is zero.
        """
        (update,), _ = clip_rows(joint[None, :-1], clip)
        vector = torch.cat([update * (self.scale / clip), update.new_zeros(1)])
        weight = float(joint[-1].double().clamp(-0.5, 0.5)) * 2 * self.bit_weight
        vector[-1] = weight if math.isfinite(weight) else 0.0
        numbers = self._rounded(self.rotation.forward(vector.to(self._dtype), round_index), rng)
        if noise is not None:
            numbers = numbers + discrete_gaussian(self.dim, share_stddev(self.stddev, survivors), noise)
        return (numbers & ((1 << self.bits) - 1)).astype(word_type(self.bits))

    def decode_sum(self, total: NDArray[np.int64], clip: float, round_index: int) -> Tensor:
        """(model_dim + 1,) float64: the sum of updates, then of (within - 1/2)."""
        vector = self.rotation.backward(torch.from_numpy(centred(total, self.bits)).double(), round_index)
        vector[:-1] *= clip / self.scale
        vector[-1] /= 2 * self.bit_weight if self.bit_weight else math.inf
        return vector

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.bits <= 20 else torch.float64  # numbers of float32 have 24 bits

    def _rounded(self, rotated: Tensor, rng: np.random.Generator) -> NDArray[np.int64]:
        for _ in range(_TRIES):
            up = torch.from_numpy(rng.random(self.dim, np.float32 if self._dtype == torch.float32 else np.float64))
            numbers: NDArray[np.int64] = torch.add(rotated, up).floor_().long().numpy()
            if int(np.dot(numbers, numbers)) <= self.bound_squared:
                return numbers
        numbers = rotated.trunc().long().numpy()
        return numbers if int(np.dot(numbers, numbers)) <= self.bound_squared else np.zeros_like(numbers)


def word_type(bits: int) -> type[np.uint16] | type[np.uint32]:
    """The words that carry numbers of so many bits."""
    return np.uint16 if bits <= 16 else np.uint32


def secure_integers(
    model_dim: int, bits: int, *, cohort_size: int, noise_multiplier: float, count_stddev: float | None,
    fixed_size: bool = False, survivors: int | None = None,
) -> SecureIntegers:  # fmt: skip
    """The finest whole numbers that fit the modulus, for rounds of this noise multiplier.

    Of all numbers of a round none wraps around, with a chance of 1e-9 at most, whatever the updates are. `fixed_size`
    says that no cohort is larger than `cohort_size`. `survivors` is the declared least number of clients in a sum,
    where clients add the noise: with more of them there is more of it.

    Raises:
      SettingError: If nothing fits, with the least bits that would.
    """
    check_whole("bits", bits, at_least=FEWEST_BITS, at_most=MOST_BITS, way_out="give bits=18, say")
    check_number("noise_multiplier", noise_multiplier, above=0, way_out="without noise leave upload out")
    if survivors is not None:
        check_whole("least_survivors", survivors, at_least=1, way_out="leave it out if the server adds the noise")
    from scipy.special import pdtrik

    # A Poisson cohort is larger with half the chance of a wrap-around, at most.
    most = cohort_size if fixed_size else math.ceil(float(pdtrik(1 - _WRAPPED / 2, cohort_size)))
    why = ""
    for enough in range(bits, MOST_BITS + 1):
        found = _fit(model_dim, enough, most, noise_multiplier, count_stddev, survivors)
        if isinstance(found, str):
            why = why or found
        elif enough == bits:
            return found
        else:
            raise refuse("bits", bits, f"at least {enough} here: {why}", f"give bits={enough} or more")
    raise SettingError(f"bits={bits} are too few: {why}; even {MOST_BITS} are", "take a smaller cohort or model")


def _fit(
    model_dim: int, bits: int, users: int, noise_multiplier: float, count_stddev: float | None, survivors: int | None
) -> SecureIntegers | str:
    """The code with the largest noise whose sums fit the modulus, or why there is none."""
    rotation = Rotation(model_dim + 1)
    dim, half = rotation.dim, 2.0 ** (bits - 1) - 1
    # Sub-Gaussian tails: 2 exp(-K^2 / 2) on each number. Half of the chance is left to cohorts above `users`.
    deviations = math.sqrt(2 * math.log(4 * dim / _WRAPPED)) * (1 + users * _LONG)
    noises = max(users / survivors, 1.0) if survivors else 1.0

    def largest(stddev: float) -> float:
        """How far the sum reaches: signs of the rotation, rounding of each user, and noise."""
        length = _length_for(bound_for(noise_multiplier, stddev), dim)
        if length > LONGEST:
            return math.inf
        signs = rotation.flatness * (users * length) ** 2 / dim
        return deviations * math.sqrt(stddev**2 * noises + users / 4 + signs)

    low, high = math.log(SMALLEST_STDDEV * math.sqrt(survivors or 1)), math.log(half)
    if low >= high or largest(math.exp(low)) > half:
        return "the sum and the least noise do not fit"
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if largest(math.exp(middle)) <= half else (low, middle)
    stddev = math.exp(low)
    length = _length_for(bound_for(noise_multiplier, stddev), dim)
    bit_weight = stddev / (2 * count_stddev) if count_stddev else 0.0
    if length <= 1:
        return "the updates drown in rounding"
    if count_stddev and bit_weight < 1:
        return "the count drowns in rounding"
    if bit_weight >= length:
        return "the count leaves nothing for the updates"
    return SecureIntegers(model_dim, bits, stddev, length, bit_weight, users)


def _length_for(bound: float, dim: int) -> float:
    """The longest vector that is no longer than `bound` when it is rounded; 0 if there is none."""
    half = math.sqrt(2 * math.log(1 / _LONG)) / 2
    left = bound**2 - dim / 4 - half * math.sqrt(dim) + half**2
    return max((math.sqrt(left) - half) * (1 - 1e-12), 0.0) if left > 0 else 0.0
