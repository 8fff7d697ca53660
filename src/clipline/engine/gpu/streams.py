"""Work beside the current CUDA stream: on a side stream, and scalars that are read late. Without CUDA, plain calls."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


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


class SideStreamTensor:
    """A tensor that is computed on a side stream from construction on. Calling this makes the current stream wait.

    What `compute` reads must be finished, or made on the side stream too. Without CUDA it is computed at once.
    """

    def __init__(self, device: torch.device, compute: Callable[[], Tensor]) -> None:
        self._done: torch.cuda.Event | None = None
        if device.type != "cuda":
            self._tensor = compute()
            return
        stream = _stream(torch.cuda.current_stream(device).device)
        with torch.cuda.stream(stream):
            self._tensor = compute()
            self._done = stream.record_event()

    def __call__(self) -> Tensor:
        """The tensor, for work that is launched on the current stream."""
        if self._done is not None:
            now = torch.cuda.current_stream(self._tensor.device)
            now.wait_event(self._done)
            self._tensor.record_stream(now)  # the allocator must not reuse it before the current stream is done
        return self._tensor


class LateScalar:
    """A float64 (1,) on a device. Calling this reads it: waits for the work that computes it, not for later work."""

    def __init__(self, number: Tensor) -> None:
        self._done: torch.cuda.Event | None = None
        if number.device.type != "cuda":
            self._value = number.clone()
            return
        try:
            self._value = _pinned.pop()
        except IndexError:
            self._value = torch.empty(1, dtype=torch.float64, pin_memory=True)
        self._value.copy_(number, non_blocking=True)
        self._done = torch.cuda.current_stream(number.device).record_event()
        weakref.finalize(self, _give_back, self._value, self._done).atexit = False

    def is_ready(self) -> bool:
        """Whether it can be read without waiting."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def __call__(self) -> float:
        """The number."""
        if self._done is not None:
            self._done.synchronize()
        return float(self._value)


_pinned: list[Tensor] = []  # memory for scalars that nothing uses now: to allocate one takes longer than the copy


def _give_back(value: Tensor, done: torch.cuda.Event) -> None:
    """Keep the memory of a scalar for the next one, unless the copy into it is still to come."""
    if not torch.cuda.is_current_stream_capturing() and done.query():  # type: ignore[no-untyped-call]
        _pinned.append(value)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
