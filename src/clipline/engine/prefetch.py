"""Prefetches the next round's cohort and noise, on idle cores, while the current round ends.

Reference implementation: `PlainDraws` of federated/draws.py, which draws the same numbers when they are needed.
Switch: `FastParts.prefetch`.
Held equal by: tests/engine/test_prefetch.py, tests/federated/test_draws.py.
Buys: on a GPU, 13.9 ms a round instead of 148 (so_lr, noise of cores; benchmarks/results/README.md). On cores that are
busy with training nothing was measured.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ..errors import RunError
from ..federated.draws import Noise, part_generators
from ..federated.sampling import Cohort, Sampler
from ..random.streams import NormalGenerator, Streams
from .core.problem import Problem
from .gpu.kernels import noise as device_noise
from .gpu.kernels.noise import DeviceNoise
from .gpu.streams import side_stream

_FEW = 1 << 15  # numbers that are drawn in less time than threads take to wake up
_STAGED = 1 << 13  # numbers, 64 KiB: so few are copied from any memory without waiting for what is under way (H200)


class BackgroundNoise:
    """`count` independent standard normal numbers, drawn by background threads from construction on.

    Few numbers are drawn at once. All depend on the generator alone, not on the number of threads.
    """

    def __init__(
        self, rng: NormalGenerator, count: int, device: torch.device | str = "cpu", *, threads: Executor
    ) -> None:
        self._device = torch.device(device)
        self._used = False
        # Pinned memory lets the copy run beside other work, but takes longer to allocate than a small copy does.
        pinned = self._device.type == "cuda" and count > _STAGED
        self._numbers = torch.empty(count, dtype=torch.float64, pin_memory=pinned)
        array = self._numbers.numpy()
        # All parts before any is drawn: drawing advances `rng`, from which the others jump.
        parts = list(part_generators(rng, count))
        self._pending: list[Future[object]] = []
        if count < _FEW:
            for part, where in parts:
                part.standard_normal(out=array[where])
            return
        self._pending += [threads.submit(part.standard_normal, out=array[where]) for part, where in parts]

    def numbers(self) -> Tensor:
        """(count,) float64 on the device; waits for the threads. Given out once: noise hides one release only."""
        if self._used:
            raise RunError("noise was asked for twice but hides one release only: draw new noise for each")
        self._used = True
        for part in self._pending:
            part.result()
        if len(self._numbers) < _FEW:  # copied in less time than another stream takes to be asked
            return self._numbers.to(self._device, non_blocking=True)
        with side_stream(self._device) as moved:
            moved.append(self._numbers.to(self._device, non_blocking=True))
        return moved[0]


class Prefetch:
    """Cohort and noise of the rounds below `until`; `prefetch` draws those of one round in the background.

    Its threads start with the first draw and end with `close`. With `on_device` the GPU draws the noise.
    """

    def __init__(
        self,
        sampler: Sampler,
        streams: Streams,
        dim: int,
        device: torch.device | str,
        until: int,
        *,
        on_device: bool = False,
    ) -> None:
        self._sampler, self._streams, self._dim, self._device = sampler, streams, dim, device
        self._until, self._on_device = until, on_device
        self._drawn: dict[int, tuple[Cohort, Noise]] = {}
        # As many as there are cores; each starts when it is first needed.
        self._threads = ThreadPoolExecutor(min(32, os.cpu_count() or 1), thread_name_prefix="clipline-noise")

    def take(self, round_index: int) -> tuple[Cohort, Noise]:
        """Cohort and noise of this round, prefetched or drawn now. Given out once."""
        if round_index not in self._drawn:
            self._draw(round_index)
        return self._drawn.pop(round_index)

    def prefetch(self, round_index: int) -> None:
        """Start drawing for this round, unless the run ends before it."""
        if round_index < self._until:
            self._draw(round_index)

    def close(self) -> None:
        """End the threads, and drop what was drawn for a round that does not come."""
        self._drawn.clear()
        self._threads.shutdown()  # without cancelling: what was taken is drawn to its end

    def _draw(self, round_index: int) -> None:
        self._drawn.clear()
        cohort = self._sampler.draw(self._streams.sampling(round_index), round_index)
        self._drawn[round_index] = cohort, self._noise(self._streams.noise(round_index))

    def _noise(self, rng: NormalGenerator) -> Noise:
        if self._on_device:
            return DeviceNoise(rng, self._dim + 1, self._device)
        return BackgroundNoise(rng, self._dim + 1, self._device, threads=self._threads)


def draws_on_device(problem: Problem) -> bool:
    """Whether the noise of a training is drawn by its GPU."""
    return problem.fast.device_noise and device_noise.usable(problem.device, problem.model.dim + 1)
