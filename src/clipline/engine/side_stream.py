"""Beside what a GPU has to do already: other work, on a stream that waits for nothing, and a number to read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


@contextmanager
def aside(device: torch.device) -> Iterator[list[Tensor]]:
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


def read_later(number: Tensor) -> Callable[[], float]:
    """How to read a single number of a device: that waits for what computes it, and for nothing that is begun after."""
    if number.device.type != "cuda":
        value = float(number)
        return lambda: value
    place = torch.empty(number.shape, dtype=number.dtype, pin_memory=True).copy_(number, non_blocking=True)
    done = torch.cuda.current_stream(number.device).record_event()

    def read() -> float:
        done.synchronize()
        return float(place)

    return read


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
