"""Memory for long vectors, and freed memory that stays with the process."""

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

_LARGE = 1 << 22  # bytes from which large pages pay
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of settings in glibc's malloc.h
_MOST = 2**31 - 1
_ALLOWED = 1 << 25  # the most that some versions of glibc take for the second
_FEW = 3  # areas
_kept: list[mmap.mmap] = []


@cache
def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed, once in a process; say whether it did.

    By default it gives large tensors back to the system as soon as they are freed, and every step pays again for each
    page of its activations and gradients. What the environment sets stands; elsewhere than on glibc nothing happens.
    """
    names = (*os.environ, os.environ.get("GLIBC_TUNABLES", ""))
    if sys.platform != "linux" or any(name.startswith("MALLOC_") or "glibc.malloc" in name for name in names):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _MOST) or mallopt(_MMAP_THRESHOLD, _ALLOWED)) and bool(
        mallopt(_TRIM_THRESHOLD, _MOST)
    )


def new(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) of anything, in large pages where the system has them: with small ones, the first use costs far more.

    A few areas that nothing uses any more are kept for the next of their size: the first use of a new one costs as much
    as drawing a third of the noise that fills it.
    """
    size = count * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    area = _taken(size)
    if area is None:
        area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a system without them
            area.madvise(mmap.MADV_HUGEPAGE)
    use = memoryview(area)  # which lives as long as any tensor there
    weakref.finalize(use, _keep, area).atexit = False
    return torch.frombuffer(use, dtype=dtype)


def _taken(size: int) -> mmap.mmap | None:
    """An area of that size which was kept. Several threads may ask at once: each step here is one of Python's own."""
    for _ in range(len(_kept)):
        with suppress(IndexError):  # another thread was first
            area = _kept.pop(0)
            if len(area) == size:
                return area
            _kept.append(area)
    return None


def _keep(area: mmap.mmap) -> None:
    _kept.append(area)
    del _kept[:-_FEW]
