"""Work on long vectors: in parts that fit a core's cache, on a side CUDA stream, and late reads of a scalar.

`in_parts`, plain twin: one call of the work on `slice(0, count)`.
Held equal by: tests/test_vectors.py.
Buys: TO BE MEASURED (benchmarks/fast_parts.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_PART = 1 << 16  # numbers: a few vectors of this length fit in a core's cache
_MIN_PARTS = 4  # below that, threads do not pay


def parts(count: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover range(count); on a GPU a single one, as launching a kernel costs more there."""
    step = _PART if device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def in_parts(work: Callable[[slice], None], count: int, device: torch.device) -> None:
    """Call work(part) for all of `parts`, in any order; a call may write to its own part only.

    If torch has one thread, as in a run with worker processes, a thread pool is used: the other workers are idle here.
    """
    todo = list(parts(count, device))
    if len(todo) < _MIN_PARTS or torch.get_num_threads() > 1 or _cores() == 1:
        for part in todo:
            work(part)
        return
    remaining = iter(todo)  # next() on a list iterator is atomic: two threads never get the same part

    def run_parts() -> None:
        for part in remaining:
            work(part)

    helpers = [_threads().submit(run_parts) for _ in range(_cores() - 1)]
    try:
        run_parts()
    finally:
        for helper in helpers:
            helper.result()


def _cores() -> int:
    return min(8, os.cpu_count() or 1)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores() - 1, thread_name_prefix="clipline-parts")


if hasattr(os, "register_at_fork"):  # a forked process inherits the pool without its threads: it makes its own
    os.register_at_fork(after_in_child=_threads.cache_clear)


@contextmanager
def side_stream(device: torch.device) -> Iterator[list[Tensor]]:
    """Within, work is launched on a side CUDA stream. Append its results to the list; the current stream then waits.

    Tensors that are read within must be finished, or made on the side stream too. Without CUDA this does nothing.
    """
    made: list[Tensor] = []
    if device.type != "cuda":
        yield made
        return
    now = torch.cuda.current_stream(device)
    stream = _stream(now.device)
    with torch.cuda.stream(stream):
        yield made
    now.wait_stream(stream)
    for tensor in made:
        tensor.record_stream(now)  # the allocator must not reuse it before the current stream is done


class LateScalar:
    """A scalar on a device. Calling this reads it: waits for the work that computes it, not for later work."""

    def __init__(self, number: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if number.device.type != "cuda":
            self._value = number.clone()
            return
        self._value = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        self._done = torch.cuda.current_stream(number.device).record_event()

    def is_ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def __call__(self) -> float:
        """The number."""
        if self._done is not None:
            self._done.synchronize()
        return float(self._value)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
