"""What a person sees while rounds go by: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..federated.round import TrainState
from ..federated.training import RoundReport

_QUIET_SECONDS = 10.0  # without a terminal, a round that was not evaluated is mentioned at most this often


class TrainProgress:
    """Shows rounds on standard error."""

    def __init__(self, rounds: int, metric_name: str, done: int = 0) -> None:
        self.rounds, self.metric_name = rounds, metric_name
        self.metric: float | None = None
        self.first, self.begun, self.printed = done, time.perf_counter(), time.perf_counter()
        self.console = Console(stderr=True, highlight=False)
        self.live = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.bar = self.live.add_task("train", total=rounds, completed=done, numbers="")

    def __enter__(self) -> TrainProgress:
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
        numbers = "  ".join(
            (
                f"{self.metric_name} {'-' if self.metric is None else format(self.metric, '.3f')}",
                f"clip {report.clip:.3g}",
                f"within {'-' if report.fraction_within is None else format(report.fraction_within, '.2f')}",
                f"epsilon {report.guarantee.epsilon_text}",
                f"{rate:.1f} rounds/s",
                f"{_clock((self.rounds - done) / rate)} left",
            )
        )
        self.live.update(self.bar, completed=done, numbers=numbers)
        quiet = time.perf_counter() - self.printed > _QUIET_SECONDS
        if not self.console.is_terminal and (report.metrics or quiet):
            self.printed = time.perf_counter()
            print(f"round {done}/{self.rounds}  {numbers}", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
