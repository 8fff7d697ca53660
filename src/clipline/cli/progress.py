"""What a person sees while rounds go by: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..federated.round import TrainState
from ..training.reports import RoundReport

_QUIET_SECONDS = 10.0  # without a terminal, a round that was not evaluated is mentioned at most this often


class TrainProgress:
    """Shows rounds on standard error."""

    def __init__(self, rounds: int, metric_name: str, done: int = 0) -> None:
        self.rounds, self.metric_name = rounds, metric_name
        self.metric: float | None = None
        self.first, self.begun, self.printed = done, time.perf_counter(), time.perf_counter()
        self.console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[speed]}"),
        )
        self.rows = Progress(*columns, expand=True)
        self.bar = self.rows.add_task("train", total=rounds, completed=done, speed="")
        self.live = Live(self.rows, console=self.console, refresh_per_second=5)

    def __enter__(self) -> TrainProgress:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.live.stop()

    def show(self, report: RoundReport, state: TrainState) -> None:
        """One finished round."""
        self.metric = report.metrics.get(self.metric_name, self.metric)
        done = report.round_index + 1
        rate = (done - self.first) / (time.perf_counter() - self.begun)
        speed = f"{rate:.1f} rounds/s  {_clock((self.rounds - done) / rate)} left"
        numbers = "  ".join(
            (
                f"{self.metric_name} {_short(self.metric, '.3f')}",
                f"clip {report.clip:.3g}",
                f"fraction within {_short(report.fraction_within, '.2f')}",
                f"epsilon so far {report.guarantee.epsilon_text}",
            )
        )
        self.rows.update(self.bar, completed=done, speed=speed)
        self.live.update(Group(self.rows, numbers))
        quiet = time.perf_counter() - self.printed > _QUIET_SECONDS
        if not self.console.is_terminal and (report.metrics or quiet):
            self.printed = time.perf_counter()
            print(f"round {done}/{self.rounds}  {numbers}  {speed}", file=sys.stderr, flush=True)


def _short(number: float | None, digits: str) -> str:
    return "-" if number is None else format(number, digits)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
