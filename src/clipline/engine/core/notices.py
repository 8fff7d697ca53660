"""Tells callbacks that training waits for something that is done once, as compiling is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

Listener = Callable[[str | None], None]  # why training waits, in words; None when it goes on

_SECONDS_A_NODE = 0.04  # of compiling, by operations of the graph, until something has been measured
_ROUNDED = (1, 2, 5, 10, 15, 20, 30, 45, 60, 90, 120, 180, 240, 300)  # seconds, as they are said


class Notices:
    """The listeners of one training's engine. There are none unless one is added."""

    _seconds_a_node = _SECONDS_A_NODE  # as measured last in this process

    def __init__(self, others: Sequence[Notices] = ()) -> None:
        """`others` are told too: those of runs that train side by side."""
        self._listeners: list[Listener] = [other.tell for other in others]

    @contextmanager
    def heard_by(self, listener: Listener) -> Iterator[None]:
        """Within, `listener` is told why training waits, and with None that it goes on."""
        self._listeners.append(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    @contextmanager
    def compiling(self, nodes: int) -> Iterator[None]:
        """Around the compilation of a graph of so many operations."""
        expected = nodes * Notices._seconds_a_node
        about = next((seconds for seconds in _ROUNDED if seconds >= expected), _ROUNDED[-1])
        self.tell(f"compiling, about {about} s, once")
        begun = time.perf_counter()
        try:
            yield
            Notices._seconds_a_node = (time.perf_counter() - begun) / max(1, nodes)
        finally:
            self.tell(None)

    def tell(self, reason: str | None) -> None:
        """Say why training waits, or with None that it goes on."""
        for listener in list(self._listeners):
            listener(reason)
