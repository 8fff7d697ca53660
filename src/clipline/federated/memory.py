"""Memory for long vectors, and freed memory that stays with the process."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which large pages pay
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of settings in glibc's malloc.h
_MOST = 2**31 - 1
_ALLOWED = 1 << 25  # the most that glibc before 2.35 takes for the second


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
    """(count,) of anything, in large pages where the system has them: with small ones, the first use costs far more."""
    size = count * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype)
