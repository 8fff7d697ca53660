"""Long vectors a part at a time: several passes over a part cost one way to memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_PART = 1 << 16  # numbers: a few vectors of so many fit in a core's cache


def parts(count: int, device: torch.device) -> Iterator[slice]:
    """Slices that together are range(count); on a GPU one, as starting an operation costs more there."""
    step = _PART if device.type == "cpu" else max(1, count)
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))
