"""The rounds of a run for those who keep records of runs: TensorBoard, or any function."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, refuse
from ..federated.round import TrainState
from .callbacks import Callback
from .reports import RoundReport, finite_or_none, round_json

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training

_FLUSH_SECONDS = 5


class Log(Callback):
    """Hands the numbers of each round to a function: `Log(wandb.log)`, `Log(print)`, or one of your own.

    `function(numbers)` is given a dict, as a line of metrics.jsonl: round (counted from 0), clip, fraction_within,
    epsilon and delta of a round that was accounted, and the metrics of one that was measured. What is not finite, as
    the epsilon of a run without noise, is left out.

    Whoever notes when it was called, as W&B does, learns how long each round took, and that tells whether a user with
    much data took part. So all rounds are handed over when the run ends, in order, also where it ends by an error. With
    `unprivate_timing` each is handed over as it ends, and the dict has unprivate_seconds too. An error of the function
    is raised, and ends the run.
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

    `tensorboard --logdir FOLDER` shows them. A step is the number of rounds done. What is not finite, as the epsilon of
    a run without noise, is left out. After a resume TensorBoard drops the steps that are run again.

    TensorBoard notes the time of every number, and how long a round took tells whether a user with much data took part.
    So all numbers of a run have the time at which it began, unless `unprivate_timing`.

    Needs the package tensorboard: pip install 'clipline[tensorboard]'.
    """

    def __init__(self, path: str | Path, *, unprivate_timing: bool = False) -> None:
        self.path, self.unprivate_timing = Path(path), unprivate_timing
        self._writer: Any = None
        _writer_class()  # before anything is trained

    def on_start(self, training: Training, state: TrainState) -> None:
        """Open an event file."""
        self._began = time.time()
        purge = state.round_index + 1 if state.round_index else None
        self._writer = _writer_class()(str(self.path), purge_step=purge, flush_secs=_FLUSH_SECONDS)

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
