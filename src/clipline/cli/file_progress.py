"""Progress of reading and loading files on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

_QUIET_SECONDS = 10.0  # without a terminal, a stage is printed at its end, and before that at most this often


class FileProgress:
    """Shows stages on standard error, each from nothing to all."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        self.bars = Progress(*columns, console=self.console, expand=True)
        self.stages: dict[str, TaskID] = {}
        self.ended: set[str] = set()
        self.printed = time.perf_counter()

    def __enter__(self) -> FileProgress:
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.console.is_terminal:
            self.bars.stop()

    def show(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` of a stage, in whatever unit."""
        if self.console.is_terminal:
            if stage not in self.stages:
                self.stages[stage] = self.bars.add_task(stage)
            self.bars.update(self.stages[stage], completed=done, total=total)
        elif stage not in self.ended and (done >= total or time.perf_counter() - self.printed > _QUIET_SECONDS):
            self.printed = time.perf_counter()
            self.ended |= {stage} if done >= total else set()
            print(f"{stage} {100 * done // max(total, 1)}%", file=sys.stderr, flush=True)
