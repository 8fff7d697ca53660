"""A setting of glibc's allocator that keeps freed memory with the process.

Plain twin: malloc as it is. Switch: `FastParts.keep_freed_memory`, off by default, as it concerns the whole process;
the command line turns it on.
Held equal by: tests/engine/core/test_allocator.py.
Buys: 672 ms a round instead of 713 (emnist_cr, 6 users, 2 cores; benchmarks/fast_parts.py, 2026-11-16).
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_INT_MAX = 2**31 - 1
_MAX_MMAP_THRESHOLD = 1 << 25  # the most that some versions of glibc accept


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
