"""The noise of a round drawn on the GPU that holds the sum, instead of by processor cores.

The numbers are defined by a key and a counter alone, whoever draws them. With noise from a seed they are NumPy's:
Philox-4x64-10, jumped ahead for every part, and NumPy's ziggurat. All are equal to the last bit, but for those of the
tail (one in 4,000), whose logarithm a GPU may round otherwise: by at most 2 units in the last place. Noise from the
system comes from ChaCha20 (RFC 8439) with a key of 256 bits for each round, which follows from the run's own.

Plain twin: `NoiseNow` of federated/draws.py for a seed, `plain_numbers` for any key.
Switch: `FastParts.device_noise`.
Held equal by: tests/engine/gpu/kernels/test_noise.py (the kernels need a GPU, or Triton's interpreter), and once in
every process that uses a GPU, before the first round.
Buys: so_lr on an H200: 13.0 ms a round without, 6.5 with; from the system 156 and 8.1 (benchmarks/results/README.md).
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass, field
from functools import cache, partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ....errors import RunError
from ....federated.draws import PART
from ....random.normal_numbers import KeyedNormal, SystemNormal, from_words, numpy_layers, words_for
from ....random.streams import NormalGenerator
from ..streams import SideStreamTensor

try:
    from . import noise_triton
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    noise_triton = None  # type: ignore[assignment]

FEW = 1 << 15  # fewer numbers are drawn sooner by one core than kernels are launched
_PARTS_AT_ONCE = 64  # parts whose words are in memory together: 132 MiB
_UNITS_OFF = 2  # how far numbers of the tail may differ, in units in the last place


@dataclass(frozen=True)
class Philox:
    """Philox-4x64-10 (Salmon et al., 2011) as NumPy's: part p is jumped ahead p times. Fast, not cryptographic."""

    key: tuple[int, int] = field(repr=False)  # of 64 bits each

    def words(self, part: int, count: int) -> NDArray[np.uint64]:
        """The first words of a part, by NumPy."""
        bits = np.random.Philox(key=self.key[0] | self.key[1] << 64, counter=part << 128)
        return np.asarray(bits.random_raw(count), np.uint64)

    def fill(self, words: Tensor, first_part: int) -> None:
        """Fill words (parts, width) int64 on a GPU, beginning with this part; width is a multiple of 8."""
        noise_triton.philox_words(words, self.key, first_part)


@dataclass(frozen=True)
class ChaCha20:
    """ChaCha20: the key stream with part p as the nonce (p, 0, 0), eight bytes a word, the lowest first."""

    key: bytes = field(repr=False)  # 32

    def words(self, part: int, count: int) -> NDArray[np.uint64]:
        """The first words of a part, in NumPy."""
        blocks = chacha20_blocks(self.key, np.arange(-(-count // 8), dtype=np.uint32), (part, 0, 0))
        return blocks.view("<u8").reshape(-1)[:count].astype(np.uint64)

    def fill(self, words: Tensor, first_part: int) -> None:
        """The same on a GPU."""
        noise_triton.chacha20_words(words, tuple(np.frombuffer(self.key, "<u4").tolist()), first_part)


WordGenerator = Philox | ChaCha20  # of 64-bit words, defined by its key: word i of part p is always the same


def chacha20_blocks(key: bytes, counters: NDArray[np.uint32], nonce: tuple[int, int, int]) -> NDArray[np.uint32]:
    """(blocks, 16): the block function of RFC 8439, section 2.3, for each counter. Key and nonce, lowest byte first."""
    start = np.empty((16, len(counters)), np.uint32)
    start[:4] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[4:12] = np.frombuffer(key, "<u4")[:, None]
    start[12] = counters
    start[13:] = np.array(nonce, np.uint32)[:, None]
    # Rows of four words; a quarter round on whole rows does all four columns, or diagonals once rows are rolled.
    a, b, c, d = (start[row : row + 4].copy() for row in (0, 4, 8, 12))
    for _ in range(10):
        for diagonal in (False, True):
            if diagonal:
                b, c, d = (np.roll(row, -by, axis=0) for row, by in ((b, 1), (c, 2), (d, 3)))
            a += b
            d = _rotated(d ^ a, 16)
            c += d
            b = _rotated(b ^ c, 12)
            a += b
            d = _rotated(d ^ a, 8)
            c += d
            b = _rotated(b ^ c, 7)
            if diagonal:
                b, c, d = (np.roll(row, by, axis=0) for row, by in ((b, 1), (c, 2), (d, 3)))
    return np.ascontiguousarray((np.concatenate([a, b, c, d]) + start).T)


def _rotated(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return np.asarray(words << np.uint32(bits) | words >> np.uint32(32 - bits))


def word_generator(rng: NormalGenerator) -> WordGenerator | None:
    """What draws on a GPU in the place of `rng`, which is moved on and never draws the same; None if nothing does."""
    if isinstance(rng, SystemNormal):
        return ChaCha20(rng.key if isinstance(rng, KeyedNormal) else secrets.token_bytes(32))
    bits = rng.bit_generator
    if not isinstance(bits, np.random.Philox):
        return None
    state = bits.state
    if state["buffer_pos"] != 4 or state["has_uint32"] or state["state"]["counter"].any():  # has drawn before
        return None
    bits.state = bits.jumped(1 << 64).state  # behind all parts
    first, second = (int(word) for word in state["state"]["key"])
    return Philox((first, second))


def plain_numbers(generator: WordGenerator, count: int, part_size: int = PART) -> NDArray[np.float64]:
    """(count,) standard normal numbers of this key, by one core: part p is numbers p * part_size and following."""
    sizes = [min(part_size, count - start) for start in range(0, count, part_size)]
    parts = [from_words(generator.words(part, words_for(size)), size) for part, size in enumerate(sizes)]
    return np.concatenate([*parts, np.empty(0)])


def device_numbers(generator: WordGenerator, count: int, device: torch.device, part_size: int = PART) -> Tensor:
    """The same on a GPU, (count,) float64; launched on the current stream."""
    # NaN, so that a number which was not drawn would spoil its release instead of leaving a sum without noise.
    numbers = torch.full((count,), torch.nan, dtype=torch.float64, device=device)
    width = _ceil(words_for(min(count, part_size)), noise_triton.SEGMENT) * noise_triton.SEGMENT
    for first in range(0, _ceil(count, part_size), _PARTS_AT_ONCE):
        some = numbers[first * part_size : (first + _PARTS_AT_ONCE) * part_size]
        words = torch.empty(_ceil(len(some), part_size), width, dtype=torch.int64, device=device)
        generator.fill(words, first)
        noise_triton.numbers_from(words, *_tables(device), some, part_size)
    return numbers


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    layers = numpy_layers()
    units, limits, heights = (torch.from_numpy(one).to(device) for one in (layers.units, layers.limits, layers.heights))
    return units, limits, heights


def usable(device: torch.device, count: int) -> bool:
    """Whether a GPU draws so many numbers of noise itself: it has Triton, and draws right, and it gains time."""
    return device.type == "cuda" and noise_triton is not None and count >= FEW and _agrees(device)


class DeviceNoiseWarning(UserWarning):
    """A GPU cannot draw noise, or not the right one: processor cores draw it."""


@cache
def _agrees(device: torch.device) -> bool:
    """Whether the kernels draw what the plain twin draws, tried once: noise that is wrong would protect nobody."""
    count, part_size = (1 << 14) + 5, 1 << 12  # five parts
    for generator in (Philox((1, 2)), ChaCha20(bytes(range(32)))):
        try:
            compute = partial(device_numbers, generator, count, device, part_size)
            drawn = SideStreamTensor(device, compute)().cpu().numpy()
        except Exception as error:  # whatever Triton raises where it has no compiler or does not know the GPU
            warnings.warn(
                f"noise is drawn by processor cores, as {device} cannot ({error})", DeviceNoiseWarning, stacklevel=2
            )
            return False
        if not agree(drawn, plain_numbers(generator, count, part_size)):
            warnings.warn(
                f"noise is drawn by processor cores, as {device} draws other numbers than NumPy: report this with the "
                "versions of torch, Triton and NumPy",
                DeviceNoiseWarning,
                stacklevel=2,
            )
            return False
    return True


def agree(drawn: NDArray[np.float64], expected: NDArray[np.float64]) -> bool:
    """Whether numbers are equal to the last bit, but for those of the tail, which may be off by a unit or two."""
    in_tail = np.abs(expected) > numpy_layers().tail
    off = np.abs(drawn - expected)
    return bool((np.where(in_tail, off <= _UNITS_OFF * np.spacing(np.abs(expected)), off == 0)).all())


class DeviceNoise:
    """`count` independent standard normal numbers, drawn on a GPU from construction on, beside its other work."""

    def __init__(self, rng: NormalGenerator, count: int, device: torch.device | str) -> None:
        generator = word_generator(rng)
        if generator is None:
            raise RunError("noise on a GPU needs a fresh generator of the run's streams: take Streams.noise(round)")
        on = torch.device(device)
        self._numbers: SideStreamTensor | None = SideStreamTensor(on, partial(device_numbers, generator, count, on))

    def numbers(self) -> Tensor:
        """(count,) float64 on the device. Given out once: noise hides one release only."""
        if self._numbers is None:
            raise RunError("noise was asked for twice but hides one release only: draw new noise for each")
        drawn, self._numbers = self._numbers(), None
        return drawn
