"""Standard normal numbers for a release, drawn beside the training that they will hide."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..engine.cpu.huge_pages import new
from ..engine.side_stream import aside
from ..errors import RunError

_PART = 1 << 18  # numbers from one generator; the parts are drawn by as many threads as there are


class Noise:
    """`count` independent standard normal numbers; drawing begins at once, in the background.

    They depend on the generator alone, not on the number of threads: part p comes from the generator p jumps ahead
    (each of 2^128 draws). The generator is not usable for anything else afterwards.
    """

    def __init__(self, rng: np.random.Generator, count: int, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._given = False
        pinned = self._device.type == "cuda"
        room = torch.empty(count, dtype=torch.float64, pin_memory=True) if pinned else new(count, torch.float64)
        self._numbers = room
        array = self._numbers.numpy()
        bits = rng.bit_generator
        part_size = _PART if isinstance(bits, np.random.Philox) else max(1, count)  # others cannot jump so far
        starts = range(0, count, part_size)
        parts = [rng, *(np.random.Generator(bits.jumped(part)) for part in range(1, len(starts)))]  # type: ignore[attr-defined]
        self._drawing = [
            _threads().submit(part.standard_normal, out=array[start : start + part_size])
            for part, start in zip(parts, starts, strict=False)
        ]

    def numbers(self) -> Tensor:
        """(count,) float64 on the device, once they are drawn. They are given out once: they hide one release."""
        if self._given:
            raise RunError("noise was asked for twice but hides one release only: draw new noise for each")
        self._given = True
        for part in self._drawing:
            part.result()
        with aside(self._device) as made:
            made.append(self._numbers.to(self._device, non_blocking=True))
        return made[0]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(32, os.cpu_count() or 1), thread_name_prefix="clipline-noise")


if hasattr(os, "register_at_fork"):  # a forked process has the pool but none of its threads: it makes its own
    os.register_at_fork(after_in_child=_threads.cache_clear)
