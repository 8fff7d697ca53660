"""Progress of a study on standard error: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import rich.progress
from rich.console import Console

_QUIET_SECONDS = 10.0  # without a terminal, at most this often unless runs have ended


@dataclass
class Tally:
    """Counts of runs, and how long the rest will take at the speed so far. Times are in seconds."""

    rounds: dict[str, int]  # of every run that is not done
    total: int
    begun: float
    running: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    trained: int = 0  # rounds of runs, here, since `begun`
    unfinished: int = 0  # of these, rounds of runs that are not done

    @property
    def done(self) -> int:
        """Runs that have ended, here or elsewhere, before or now."""
        return self.total - len(self.rounds) - len(self.failed)

    def left(self, now: float) -> float | None:
        """Seconds until all are done; None before the first round."""
        if not self.trained:
            return None
        rounds = sum(self.rounds.values()) - self.unfinished
        return max(0.0, rounds * (now - self.begun) / self.trained)

    def text(self, now: float) -> str:
        """In a line."""
        parts = [f"runs {self.done}/{self.total} done", f"{len(self.running)} running"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        left = self.left(now)
        return "  ".join([*parts, "" if left is None else f"{_clock(left)} left"]).rstrip()


class NoProgress:
    """Shows nothing."""

    def begin(self, rounds: Mapping[str, int], done: Iterable[str]) -> None:
        """These runs are asked for: id -> rounds. Some are `done` already."""

    def start(self, ids: Iterable[str]) -> None:
        """These begin to train."""

    def round(self) -> None:
        """One run has trained one round more."""

    def end(self, ids: Iterable[str]) -> None:
        """These have ended, here or elsewhere."""

    def fail(self, what: str, run: str, error: str) -> None:
        """One run ended with an error."""

    def close(self) -> None:
        """All that was asked for is done, or an error ended it."""


class StudyProgress(NoProgress):
    """Shows on standard error how many runs are done, running and failed, and the time left.

    On a terminal one line is updated in place. Elsewhere, as in a log file, a line is printed when runs have ended, and
    at most every ten seconds. `label` says what is being done. How long runs take depends on which users are drawn: the
    guarantee does not cover it.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._tally: Tally | None = None
        self._live: rich.progress.Progress | None = None

    def begin(self, rounds: Mapping[str, int], done: Iterable[str]) -> None:
        """Show what was asked for and what of it is done already."""
        ended = set(done)
        left = {run: count for run, count in rounds.items() if run not in ended}
        self._tally = Tally(left, len(rounds), time.perf_counter())
        self._printed = time.perf_counter()
        self._console = Console(stderr=True, highlight=False)
        if self._console.is_terminal and left:
            columns = rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn(bar_width=None)
            self._live = rich.progress.Progress(
                *columns, console=self._console, expand=True, refresh_per_second=5, transient=True
            )
            self._bar = self._live.add_task("", total=max(1, sum(left.values())))
            self._live.start()
        self._show(always=True)

    def start(self, ids: Iterable[str]) -> None:
        """Count these as running."""
        if self._tally is not None:
            self._tally.running |= set(ids)
            self._show(always=False)

    def round(self) -> None:
        """Count one round."""
        if self._tally is not None:
            self._tally.trained += 1
            self._tally.unfinished += 1
            self._show(always=False)

    def end(self, ids: Iterable[str]) -> None:
        """Count these as done."""
        tally = self._tally
        ended = [run for run in ids if tally is not None and run in tally.rounds]
        if tally is None or not ended:
            return
        for run in ended:
            count = tally.rounds.pop(run)
            if run in tally.running:
                tally.running.discard(run)
                tally.unfinished = max(0, tally.unfinished - count)
        self._show(always=True)

    def fail(self, what: str, run: str, error: str) -> None:
        """Count this one as failed, and say why at once."""
        if self._tally is not None:
            self._tally.rounds.pop(run, None)
            self._tally.running.discard(run)
            self._tally.failed.add(run)
        print(f"run {run} ({what}) failed: {error}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was, below a last line."""
        if self._tally is not None and self._live is not None:
            self._live.stop()
            print(self._line(), file=sys.stderr, flush=True)
        self._tally = self._live = None

    def _line(self) -> str:
        assert self._tally is not None, "begin comes first"
        return f"{self.label + '  ' if self.label else ''}{self._tally.text(time.perf_counter())}"

    def _show(self, *, always: bool) -> None:
        assert self._tally is not None, "begin comes first"
        if self._live is not None:
            left = sum(self._tally.rounds.values()) - self._tally.unfinished
            total = self._live.tasks[0].total or 1
            self._live.update(self._bar, description=self._line(), completed=max(0.0, total - left))
        elif always or time.perf_counter() - self._printed > _QUIET_SECONDS:
            self._printed = time.perf_counter()
            print(self._line(), file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
