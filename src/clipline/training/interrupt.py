"""Ctrl-C that waits for the end of a round."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class CtrlC:
    """Within the block the first Ctrl-C only asks to stop (`pressed`); a second one stops at once.

    So that the ledger, the files and the model always speak of the same number of rounds. Outside the main thread,
    where signals cannot be handled, nothing changes.
    """

    def __init__(self) -> None:
        self.pressed = False

    def __enter__(self) -> CtrlC:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.pressed:
            raise KeyboardInterrupt
        self.pressed = True
        print("\nstopping after this round (Ctrl-C again stops at once)", file=sys.stderr)
