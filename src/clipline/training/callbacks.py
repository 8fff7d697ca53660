"""What may look on while a model trains. A callback is given released numbers only."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, refuse
from ..federated.round import TrainState
from .result import Metrics, RoundReport, round_json
from .run_files import finite_or_none

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training


class Callback:
    """Called by `Training.run`, in the order of the list. Derive from it and write the methods you need.

    `Training.run` looks at five attributes of a callback:

    - `charged`, the `Ledger` of all that it has ever written down. Such a callback comes before the others, so that a
      round is on record before anything else is done with it. The result's guarantee covers that ledger too.
    - `stop_requested` ends the run after the round if it is true. With `stop_reason = "early"` the run is over;
      otherwise it is "interrupted" and can be resumed.
    - `kept` is the model of an earlier round, which goes into the result.
    - `waits_for_metrics` holds the next round back until this one is measured.
    - `reads_guarantee` has every round accounted as it ends. Without it rounds are accounted when somebody asks.

    Example:
      >>> class ClipAlarm(cl.Callback):
      ...     def on_round(self, report, state):
      ...         if report.clip > 100: print("the clip is", report.clip)
    """

    reads_guarantee = True

    def on_start(self, training: Training, state: TrainState) -> None:
        """Before the first round of this call. An error here stops the run.

        Args:
          training: The training that begins.
          state: What it begins from.
        """

    def on_wait(self, reason: str | None) -> None:
        """Training waits for something that is done once, such as compiling.

        Which users are drawn may decide when this happens. The guarantee does not cover it, as it does not cover times.

        Args:
          reason: What it waits for: "compiling, about 15 s, once". None means that it goes on.
        """

    def on_release(self, state: TrainState) -> None:
        """As soon as a round has released, before the new state is measured or shown: to write its event down.

        Args:
          state: What came of the round.
        """

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """After a round, in order. The next round may train meanwhile.

        Args:
          report: What the round released and what was measured.
          state: What came of the round.
        """

    def on_end(self, result: TrainResult) -> None:
        """After the last round, also if the budget or Ctrl-C stopped the run; not after an error.

        Args:
          result: What `Training.run` will return.
        """

    def close(self) -> None:
        """Always, at last, once `on_start` has returned: let go of files, threads and the screen."""


class Measuring(Callback):
    """A callback whose numbers belong into the report: `measure` is asked first, `on_round` sees the result."""

    def measure(self, state: TrainState, *, last: bool) -> Future[Metrics] | None:
        """Metrics of this state, begun in the background; None if this round is not measured."""
        return None


class StopOnInterrupt(Callback):
    """The first Ctrl-C, or SIGTERM, asks the run to stop after its round; a second one stops at once.

    Ledger, files and model then all have the same number of rounds, and the result has `stopped == "interrupted"`.
    Both signals are taken over when the run starts and given back when it ends. Outside the main thread nothing
    changes. Without this callback Ctrl-C raises KeyboardInterrupt as usual, and SIGTERM ends the process.

    Example:
      >>> training.run([cl.StopOnInterrupt(), cl.RunDirectory("runs/rides")])
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self._runs = 0
        self._before: dict[signal.Signals, Any] = {}  # who had each signal

    def on_start(self, training: Training, state: TrainState) -> None:
        """Take over both signals."""
        self._runs += 1
        if self._runs == 1:
            self.stop_requested = False
            if threading.current_thread() is threading.main_thread():
                self._before = {one: signal.signal(one, self._handle) for one in (signal.SIGINT, signal.SIGTERM)}

    def close(self) -> None:
        """Give both back to whoever had them, with the last of the runs."""
        self._runs = max(0, self._runs - 1)
        if self._runs == 0:
            for one, before in self._before.items():
                signal.signal(one, signal.SIG_DFL if before is None else before)
            self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop_requested:
            raise KeyboardInterrupt
        self.stop_requested = True
        again = "Ctrl-C" if number == signal.SIGINT else "the signal"
        print(f"\nstopping after this round ({again} again stops at once)", file=sys.stderr)


class Log(Callback):
    """Hands the numbers of each round to a function: `wandb.log`, `print`, or one of your own.

    The function is given a dict, as a line of metrics.jsonl. It has round (from 0), clip and fraction_within. Epsilon
    and delta are there if the round was accounted, and metrics if it was measured. Infinite numbers are left out.

    All rounds are handed over when the run ends, in order, and also if it ends by an error. Whoever notes when it was
    called would learn how long each round took, and that tells whether a user with much data took part.

    Args:
      function: Called with one dict for each round. Its errors end the run.
      unprivate_timing: Hand over each round as it ends, with `unprivate_seconds`.

    Raises:
      SettingError: If `function` cannot be called.

    Example:
      >>> training.run([cl.Log(print)])
    """

    def __init__(self, function: Callable[[dict[str, float]], object], *, unprivate_timing: bool = False) -> None:
        if not callable(function):
            raise refuse("function", function, "a function of a dict", "give wandb.log or print, say")
        self.function, self.unprivate_timing = function, unprivate_timing
        self._kept: list[dict[str, float]] = []

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin with no rounds."""
        self._kept = []

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Note the numbers of the round."""
        numbers = round_json(report, self.unprivate_timing)
        self._kept.append({name: number for name, number in numbers.items() if number is not None})
        if self.unprivate_timing:
            self._hand_over()

    def on_end(self, result: TrainResult) -> None:
        """Hand over what is kept."""
        self._hand_over()

    def close(self) -> None:
        """After an error: hand over what is kept."""
        self._hand_over()

    def _hand_over(self) -> None:
        kept, self._kept = self._kept, []  # a function that fails is not given the same again
        for numbers in kept:
            try:
                self.function(numbers)
            except KeyError as error:
                if error.args and error.args[0] in numbers:
                    raise
                missing = f"the row of round {numbers['round']} has {', '.join(numbers)}"
                raise SettingError(
                    f"function of Log fails (KeyError: {error}): {missing}; epsilon is there where it was accounted "
                    "and a metric where it was measured, so read them with row.get(...)"
                ) from error


class TensorBoard(Callback):
    """Writes clip, fraction within, epsilon and metrics as TensorBoard's event files into a folder.

    `tensorboard --logdir FOLDER` shows them. A step is the number of rounds done. Infinite numbers are left out. After
    a resume TensorBoard drops the steps that are run again.

    Args:
      path: The folder.
      unprivate_timing: Note when each number came. Left out, all numbers of a run have the time at which it began,
        since how long a round took tells whether a user with much data took part.

    Raises:
      SettingError: If the package is missing: `pip install 'clipline[tensorboard]'`.

    Example:
      >>> training.run([cl.TensorBoard("runs/rides/events")])
    """

    def __init__(self, path: str | Path, *, unprivate_timing: bool = False) -> None:
        self.path, self.unprivate_timing = Path(path), unprivate_timing
        self._writer: Any = None
        _writer_class()  # before anything is trained

    def on_start(self, training: Training, state: TrainState) -> None:
        """Open an event file."""
        self._began = time.time()
        purge = state.round_index + 1 if state.round_index else None
        self._writer = _writer_class()(str(self.path), purge_step=purge, flush_secs=5)

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """One number for each of what the round released and what was measured."""
        assert self._writer is not None, "on_start comes first"
        numbers = {
            "clip": report.clip,
            "fraction_within": report.fraction_within,
            "epsilon": report.guarantee.epsilon if report.accounted else None,
            **report.metrics,
        }
        now = time.time() if self.unprivate_timing else self._began
        for name, number in numbers.items():
            if number is not None and finite_or_none(number) is not None:
                self._writer.add_scalar(name, number, report.round_index + 1, walltime=now)

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise SettingError(
            f"tensorboard=True needs the package tensorboard, which is not there ({error}): "
            "pip install 'clipline[tensorboard]'"
        ) from None
    return SummaryWriter
