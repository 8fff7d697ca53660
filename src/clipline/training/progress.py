"""Progress on standard error: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import rich.progress
from rich.console import Console, Group
from rich.live import Live

from ..federated.round import TrainState
from .callbacks import Callback
from .reports import Metrics, RoundReport

if TYPE_CHECKING:
    from .training import Training

_QUIET_SECONDS = 10.0  # without a terminal, a round that was not evaluated is mentioned at most this often


class Progress(Callback):
    """Shows rounds on standard error: metrics, clip, fraction within, epsilon so far, speed and time left.

    On a terminal one line is updated in place. Elsewhere, as in a log file, a line is printed for every round that was
    evaluated, and for others at most every ten seconds. `metric` names the one to show, from the first round on; left
    out, all metrics of the last evaluation are shown. Speed and time left depend on which users are drawn: the
    guarantee does not cover them.
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self._metrics: Metrics = {}
        self._live: Live | None = None

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin to count at the round that comes next."""
        self._rounds, self._first = training.rounds, state.round_index
        self._begun = self._printed = time.perf_counter()
        self._metrics = {}
        self._console = Console(stderr=True, highlight=False)
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("round"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[speed]}"),
            expand=True,
        )
        self._task = self._bar.add_task("train", total=self._rounds, completed=self._first, speed="")
        self._live = Live(self._bar, console=self._console, refresh_per_second=5)
        if self._console.is_terminal:
            self._live.start()

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Show one finished round."""
        assert self._live is not None, "on_start comes first"
        self._metrics = report.metrics or self._metrics
        done = report.round_index + 1
        rate = (done - self._first) / max(time.perf_counter() - self._begun, 1e-9)
        speed = f"{rate:.1f} rounds/s  {_clock((self._rounds - done) / rate)} left"
        shown = self._metrics if self.metric is None else {self.metric: self._metrics.get(self.metric)}
        numbers = "  ".join(
            (
                *(f"{name} {_short(value, '.3f')}" for name, value in shown.items()),
                f"clip {report.clip:.3g}",
                f"fraction within {_short(report.fraction_within, '.2f')}",
                f"epsilon so far {report.guarantee.epsilon_text}",
            )
        )
        self._bar.update(self._task, completed=done, speed=speed)
        self._live.update(Group(self._bar, numbers))
        quiet = time.perf_counter() - self._printed > _QUIET_SECONDS
        if not self._console.is_terminal and (report.metrics or quiet):
            self._printed = time.perf_counter()
            print(f"round {done}/{self._rounds}  {numbers}  {speed}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was, below the last line."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def _short(number: float | None, digits: str) -> str:
    return "-" if number is None else format(number, digits)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
