"""Long vectors a part at a time: several passes over a part cost one way to memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

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
