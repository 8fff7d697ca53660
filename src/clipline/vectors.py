"""Work on long vectors: in parts that fit a core's cache, on a side CUDA stream, and late reads of a scalar."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

_PART = 1 << 16  # numbers: a few vectors of so many fit in a core's cache
_MANY = 4  # parts from which threads pay


def parts(count: int, device: torch.device) -> Iterator[slice]:
    """Slices that together are range(count); on a GPU one, as starting an operation costs more there."""
    step = _PART if device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


def in_parts(work: Callable[[slice], None], count: int, device: torch.device) -> None:
    """Call work(part) for all of `parts`, in any order; what it writes must be the part's own.

    Where torch has one thread, as in a process that trains beside others, they are done by several: the others wait
    for what is done here, and leave their cores free.
    """
    todo = list(parts(count, device))
    if len(todo) < _MANY or torch.get_num_threads() > 1 or _cores() == 1:
        for part in todo:
            work(part)
        return
    shared = iter(todo)  # of a list: two threads never get the same part

    def some() -> None:
        for part in shared:
            work(part)

    helpers = [_threads().submit(some) for _ in range(_cores() - 1)]
    try:
        some()
    finally:
        for helper in helpers:
            helper.result()


def _cores() -> int:
    return min(8, os.cpu_count() or 1)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_cores() - 1, thread_name_prefix="clipline-parts")


if hasattr(os, "register_at_fork"):  # a forked process has the pool but none of its threads: it makes its own
    os.register_at_fork(after_in_child=_threads.cache_clear)


@contextmanager
def side_stream(device: torch.device) -> Iterator[list[Tensor]]:
    """Within, a GPU works on that stream; put what it makes into the list, and what comes after may use it.

    What is read on the device must be finished, or made aside too. Where there are no streams nothing is different.
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
        tensor.record_stream(now)  # its memory is not used again before that stream is done with it


class LateScalar:
    """A single number of a device, to be read by calling this: waits for what computes it, not for later work."""

    def __init__(self, number: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if number.device.type != "cuda":
            self._value = number.clone()
            return
        self._value = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
        self._done = torch.cuda.current_stream(number.device).record_event()

    def is_ready(self) -> bool:
        """Whether reading would not wait."""
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
