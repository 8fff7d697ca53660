"""The rounds of a run for TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SettingError
from ..federated.round import TrainState
from .callbacks import Callback
from .reports import RoundReport, finite_or_none

if TYPE_CHECKING:
    from .training import Training

_FLUSH_SECONDS = 5


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
            "epsilon": report.guarantee.epsilon,
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
