"""Memory for long vectors in huge pages, and an allocator setting that keeps freed memory with the process.

Plain twin: `torch.empty`, and glibc's malloc as it is; used below 4 MiB and where the system has no huge pages.
Switches: `FastParts.huge_pages`; `FastParts.keep_freed_memory`, off by default, as it concerns the whole process.
Held equal by: tests/engine/cpu/test_huge_pages.py.
Buys: TO BE MEASURED (benchmarks/fast_parts.py).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which huge pages pay
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_INT_MAX = 2**31 - 1
_MAX_MMAP_THRESHOLD = 1 << 25  # the most that some versions of glibc accept
_FEW = 3  # areas kept for reuse
_kept: list[mmap.mmap] = []  # areas that no tensor uses any more


@cache
def keep_freed_memory() -> bool:
    """Set glibc's malloc, once in a process, to keep freed memory; say whether it did.

    By default glibc returns large tensors to the system when they are freed, and every step pays again for the page
    faults of its activations and gradients. Settings in the environment win; without glibc nothing happens.
    """
    names = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or "glibc.malloc" in name for name in names):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _INT_MAX) or mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD)) and bool(
        mallopt(_M_TRIM_THRESHOLD, _INT_MAX)
    )


def new(count: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor (count,), in huge pages where the system has them: fewer page faults on first use.

    A few areas that no tensor uses any more are kept and reused for tensors of the same size: the page faults of a new
    area cost a third of the time it takes to draw the noise that fills it.
    """
    size = count * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    area = _reuse(size)
    if area is None:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the system has no huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(area)  # lives as long as any tensor on this area
    weakref.finalize(view, _recycle, area).atexit = False
    return torch.frombuffer(view, dtype=dtype)


def _reuse(size: int) -> mmap.mmap | None:
    """A kept area of that size. Safe from several threads: every list operation here is atomic."""
    for _ in range(len(_kept)):
        with suppress(IndexError):  # another thread was first
            area = _kept.pop(0)
            if len(area) == size:
                return area
            _kept.append(area)
    return None


def _recycle(area: mmap.mmap) -> None:
    _kept.append(area)
    del _kept[:-_FEW]
