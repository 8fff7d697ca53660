"""New memory for long vectors."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_LARGE = 1 << 22  # bytes from which large pages pay


def new(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) of anything, in large pages where the system has them: with small ones, the first use costs far more."""
    size = count * dtype.itemsize
    if size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(count, dtype=dtype)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system without them
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype)
