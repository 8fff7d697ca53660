"""Progress of a study on standard error: a live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..console import QUIET_SECONDS, Bar, clock, tell

_ENDED_SECONDS = 1.0  # without a terminal, between the lines for runs that end


@dataclass
class Tally:
    """Counts of runs, and how long the rest will take at the speed so far. Times are in seconds."""

    rounds: dict[str, int]  # of every run that is not done
    total: int
    running: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    elsewhere: int = 0  # runs that another process makes, while there is nothing to do here
    begun: float | None = None  # when the first round ended: what came before it, such as loading, comes once
    trained: int = 0  # rounds of runs, here, since then
    rounds_of: dict[str, int] = field(default_factory=dict)  # rounds here of each run that is not done

    @property
    def done(self) -> int:
        """Runs that have ended, here or elsewhere, before or now."""
        return self.total - len(self.rounds) - len(self.failed)

    def left(self, now: float) -> float | None:
        """Seconds until all are done; None as long as there is no speed to tell it from."""
        if self.begun is None or not self.trained or now - self.begun < 1.0:
            return None
        return self.rounds_left() * (now - self.begun) / self.trained

    def rounds_left(self) -> int:
        """Rounds to train, of all runs."""
        return sum(max(0, count - self.rounds_of.get(run, 0)) for run, count in self.rounds.items())

    def add_round(self, run: str, now: float) -> None:
        """One run has trained one round more."""
        if self.begun is None:
            self.begun = now
        else:
            self.trained += 1
        self.rounds_of[run] = self.rounds_of.get(run, 0) + 1

    def drop(self, run: str) -> None:
        """Nothing of this run is left to train."""
        self.rounds.pop(run, None)
        self.rounds_of.pop(run, None)
        self.running.discard(run)

    def text(self, now: float) -> str:
        """In a line."""
        parts = [f"runs {self.done}/{self.total} done", f"{len(self.running)} running"]
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"waiting for {self.elsewhere} of another process"] if self.elsewhere else []
        left = None if self.elsewhere else self.left(now)
        return "  ".join([*parts, "" if left is None else f"{clock(left)} left"]).rstrip()


class NoProgress:
    """Shows nothing."""

    def begin(self, rounds: Mapping[str, int], done: Iterable[str]) -> None:
        """These runs are asked for: id -> rounds. Some are `done` already."""

    def start(self, ids: Iterable[str]) -> None:
        """These begin to train."""

    def round(self, run: str) -> None:
        """One run has trained one round more."""

    def wait(self, count: int) -> None:
        """There is nothing to do here: another process makes the last `count` runs."""

    def end(self, ids: Iterable[str]) -> None:
        """These have ended, here or elsewhere."""

    def fail(self, what: str, run: str, error: str) -> None:
        """One run ended with an error."""

    def close(self) -> None:
        """All that was asked for is done, or an error ended it."""


class StudyProgress(NoProgress):
    """Shows on standard error how many runs are done, running and failed, and the time left.

    On a terminal one line is updated in place. Elsewhere, as in a log file, a line is printed when runs have ended, at
    most one a second, and every ten seconds otherwise. `label` says what is being done. How long runs take depends on
    which users are drawn: the guarantee does not cover it.
    """

    def __init__(self, label: str = "") -> None:
        self.label = label
        self._tally: Tally | None = None
        self._bar: Bar | None = None

    def begin(self, rounds: Mapping[str, int], done: Iterable[str]) -> None:
        """Show what was asked for and what of it is done already."""
        ended = set(done)
        left = {run: count for run, count in rounds.items() if run not in ended}
        self._tally = Tally(left, len(rounds))
        self._bar = Bar(max(1, sum(left.values())), transient=True)
        self._show(0.0)

    def start(self, ids: Iterable[str]) -> None:
        """Count these as running."""
        if self._tally is not None:
            self._tally.running |= set(ids)
            self._tally.elsewhere = 0
            self._show(QUIET_SECONDS)

    def round(self, run: str) -> None:
        """Count one round."""
        if self._tally is not None:
            self._tally.add_round(run, time.perf_counter())
            self._show(QUIET_SECONDS)

    def wait(self, count: int) -> None:
        """Say at once that others are waited for, then every ten seconds."""
        if self._tally is not None:
            first, self._tally.elsewhere = not self._tally.elsewhere, count
            self._show(0.0 if first else QUIET_SECONDS)

    def end(self, ids: Iterable[str]) -> None:
        """Count these as done."""
        tally = self._tally
        ended = [run for run in ids if tally is not None and run in tally.rounds]
        if tally is None or not ended:
            return
        for run in ended:
            tally.drop(run)
        tally.elsewhere = min(tally.elsewhere, len(tally.rounds))
        self._show(_ENDED_SECONDS if tally.rounds else 0.0)

    def fail(self, what: str, run: str, error: str) -> None:
        """Count this one as failed, and say why at once."""
        if self._tally is not None:
            self._tally.drop(run)
            self._tally.failed.add(run)
        tell(f"run {run} ({what}) failed: {error}")

    def close(self) -> None:
        """Leave the terminal as it was, below a last line."""
        if self._bar is not None:
            self._bar.close()
        self._tally = self._bar = None

    def _show(self, quiet: float) -> None:
        assert self._tally is not None, "begin comes first"
        assert self._bar is not None
        text = f"{self.label}  {self._tally.text(time.perf_counter())}".strip()
        self._bar.show(self._bar.total - self._tally.rounds_left(), text, quiet=quiet)
