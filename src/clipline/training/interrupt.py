"""Ctrl-C that waits for the end of a round."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

from ..federated.round import TrainState
from .callbacks import Callback

if TYPE_CHECKING:
    from .training import Training


class StopOnInterrupt(Callback):
    """The first Ctrl-C asks the run to stop after its round (`stop_requested`); a second one stops at once.

    Then the ledger, the files and the model all have the same number of rounds, and the result is returned with
    `stopped == "interrupted"`. SIGINT is taken over when the run starts and given back when it ends; one object may
    serve several runs at once and then stops all of them. Outside the main thread, where Python handles no signals,
    nothing changes. Without this callback Ctrl-C raises KeyboardInterrupt as usual.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._runs = 0
        self._restore = False

    def on_start(self, training: Training, state: TrainState) -> None:
        """Take over SIGINT."""
        self._runs += 1
        if self._runs == 1:
            self.stop_requested = False
            self._restore = threading.current_thread() is threading.main_thread()
            if self._restore:
                self._before = signal.signal(signal.SIGINT, self._handle)

    def close(self) -> None:
        """Give SIGINT back to whoever had it, with the last of the runs."""
        self._runs = max(0, self._runs - 1)
        if self._runs == 0 and self._restore:
            self._restore = False
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        print("\nstopping after this round (Ctrl-C again stops at once)", file=sys.stderr)
