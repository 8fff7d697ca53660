"""The random draws of a round: its cohort, and the noise of its release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError
from ..random.discrete_gaussian import Words, words_of
from ..random.normal_numbers import SystemNormal
from ..random.streams import NormalGenerator, Streams
from .sampling import Cohort, Sampler

PART = 1 << 18  # numbers drawn from one generator


class Noise(Protocol):
    """Standard normal numbers for one release."""

    def numbers(self) -> Tensor:
        """(dim + 1,) float64 on the device of the sum. Given out once: noise hides one release only."""
        ...


class Draws(Protocol):
    """Cohort and noise of every round."""

    def take(self, round_index: int) -> tuple[Cohort, Noise]:
        """Cohort and noise of this round. Given out once."""
        ...

    def prefetch(self, round_index: int) -> None:
        """May start drawing for this round in the background. Never changes what is drawn."""
        ...

    def close(self) -> None:
        """Ends what goes on in the background: no more rounds come."""
        ...


def part_generators(rng: NormalGenerator, count: int) -> Iterator[tuple[NormalGenerator, slice]]:
    """Generators for `count` numbers, each with the part that it fills, so that parts can be drawn in parallel.

    Part p uses `rng` jumped ahead p times, by 2^128 draws each; `rng` must not be used for anything else. Noise from
    the system has generators of parts.
    """
    bits = rng.bit_generator if isinstance(rng, np.random.Generator) else None
    size = PART if bits is None or isinstance(bits, np.random.Philox) else max(1, count)  # others cannot jump: one part
    for part, start in enumerate(range(0, count, size)):
        if isinstance(rng, SystemNormal):
            ahead: NormalGenerator = rng.part(part)
        else:
            ahead = np.random.Generator(bits.jumped(part)) if part else rng  # type: ignore[union-attr]
        yield ahead, slice(start, min(start + size, count))


class NoiseNow:
    """`count` independent standard normal numbers, drawn when `numbers` is called."""

    def __init__(self, rng: NormalGenerator, count: int, device: torch.device | str = "cpu") -> None:
        self._rng: NormalGenerator | None = rng
        self._count, self._device = count, device

    def numbers(self) -> Tensor:
        """(count,) float64 on the device, once."""
        if self._rng is None:
            raise RunError("noise was asked for twice but hides one release only: draw new noise for each")
        values = np.empty(self._count)
        for generator, part in list(part_generators(self._rng, self._count)):
            generator.standard_normal(out=values[part])
        self._rng = None
        return torch.from_numpy(values).to(self._device)


class WholeNoise:
    """Words of one round's generator, from which a `DiscreteMechanism` draws whole numbers."""

    def __init__(self, rng: NormalGenerator, count: int = 0, device: torch.device | str = "cpu") -> None:
        self._words: Words | None = words_of(rng)

    def numbers(self) -> NoReturn:
        """Refused: the mechanism and the draws do not fit together."""
        raise RunError("normal noise was asked for, but this training draws whole numbers: take its own mechanism")

    def words(self) -> Words:
        """The words. Given out once."""
        if self._words is None:
            raise RunError("noise was asked for twice but hides one release only: draw new noise for each")
        words, self._words = self._words, None
        return words


@dataclass(frozen=True, eq=False)
class PlainDraws:
    """Draws on demand, for a sum of `dim` coordinates and the bit. `engine.prefetch` draws the same numbers earlier.

    `noise` makes the noise from a generator, a count and a device.
    """

    sampler: Sampler
    streams: Streams
    dim: int
    device: torch.device | str = "cpu"
    noise: Callable[[NormalGenerator, int, torch.device | str], Noise] = NoiseNow

    def take(self, round_index: int) -> tuple[Cohort, Noise]:
        """The cohort now, the noise when its numbers are read."""
        cohort = self.sampler.draw(self.streams.sampling(round_index), round_index)
        return cohort, self.noise(self.streams.noise(round_index), self.dim + 1, self.device)

    def prefetch(self, round_index: int) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""
