"""Progress: a live line on a terminal, a bar in a notebook, a plain line now and then elsewhere."""

from __future__ import annotations

import html
import importlib
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol

import rich.progress
from rich.console import Console, Group
from rich.live import Live

from ..federated.round import TrainState
from .callbacks import Callback
from .result import Metrics, RoundReport

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training

_QUIET_SECONDS = 10.0  # without a terminal, a log has a line at least this often, if rounds are as fast
_TENTH_SECONDS = 1.0  # and where no round is evaluated, after each tenth of the rounds, but no more often than this
_REFRESH_SECONDS = 0.2  # between two updates of a notebook


class Progress(Callback):
    """Shows rounds on standard error: metrics, clip, fraction within, epsilon so far, speed and time left.

    On a terminal one line is updated in place. In a notebook a bar below the cell is; it needs no widgets, and when the
    run ends speed and time left are taken out of it, as notebooks are stored. Elsewhere, as in a log file, a line is
    printed for every round that was evaluated, or after each tenth of the rounds where none is (and a second at least);
    every ten seconds; and for the last round. `metric` names the one to show, from the first round on; left out, all
    metrics of the last evaluation are shown. While a program is compiled that is said instead of the speed, of which
    compiling is no part. When the run is over that is said, and a bar is green only if the run finished and looks well:
    see `TrainResult.findings`. Speed and time left depend on which users are drawn: the guarantee does not cover them.
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self._metrics: Metrics = {}
        self._spent: tuple[int, str] | None = None  # after so many rounds, and epsilon
        self._display: _Display | None = None

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin to count at the round that comes next."""
        self._rounds, self._first = training.rounds, state.round_index
        self._begun = time.perf_counter()
        self._waits_since: float | None = None
        self._metrics, self._spent = {}, None
        self._display = _display(self._first, self._rounds)

    def on_wait(self, reason: str | None) -> None:
        """Say that training waits; the time does not count when the speed is worked out."""
        now = time.perf_counter()
        if self._waits_since is not None:
            self._begun += now - self._waits_since
        self._waits_since = None if reason is None else now
        if self._display is not None:
            self._display.wait(reason)

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Show one finished round."""
        assert self._display is not None, "on_start comes first"
        self._metrics = report.metrics or self._metrics
        done = report.round_index + 1
        if report.accounted or self._spent is None:
            self._spent = done, report.guarantee.epsilon_text
        accounted, epsilon = self._spent
        rate = (done - self._first) / max(time.perf_counter() - self._begun, 1e-9)
        speed = f"{rate:.1f} rounds/s  {_clock((self._rounds - done) / rate)} left"
        shown = self._metrics if self.metric is None else {self.metric: self._metrics.get(self.metric)}
        numbers = "  ".join(
            (
                *(f"{name} {_short(value, '.3f')}" for name, value in shown.items()),
                f"clip {report.clip:.3g}",
                f"fraction within {_short(report.fraction_within, '.2f')}",
                f"epsilon so far {epsilon}" if accounted == done else f"epsilon {epsilon} after {accounted} rounds",
            )
        )
        self._display.show(done, numbers, speed, measured=bool(report.metrics))

    def on_end(self, result: TrainResult) -> None:
        """Say how the run ended."""
        assert self._display is not None, "on_start comes first"
        warned = len(result.findings)
        ended = {"budget": "stopped by its budget", "early": "stopped early"}.get(result.stopped, result.stopped)
        words = f"{ended}, with {warned} warning{'s' * (warned != 1)}" if warned else ended
        self._display.end(words, well=not warned and result.stopped != "interrupted")

    def close(self) -> None:
        """Leave the screen as it was, below the last line."""
        if self._display is not None:
            self._display.close()
            self._display = None


class _Display(Protocol):
    """Where progress is shown."""

    def show(self, done: int, numbers: str, speed: str, *, measured: bool) -> None:
        """So many rounds are done; `measured` is whether the last one was evaluated."""

    def wait(self, reason: str | None) -> None:
        """The next round waits for this; None: it goes on."""

    def end(self, words: str, *, well: bool) -> None:
        """The run is over, in these words; one that breaks off has no such end."""

    def close(self) -> None:
        """No more rounds come."""


def _display(done: int, rounds: int) -> _Display:
    """The display for where this process runs; `done` of the rounds have been run already."""
    if _in_notebook():
        return _Notebook(done, rounds)
    console = Console(stderr=True, highlight=False)
    return _Terminal(console, done, rounds) if console.is_terminal else _Lines(done, rounds)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: it has displays that can be updated."""
    ipython = sys.modules.get("IPython")  # whoever runs in a kernel has it
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


class _Terminal:
    """One line that is updated in place."""

    def __init__(self, console: Console, done: int, rounds: int) -> None:
        # Not green yet when all rounds are done: `end` tells whether the run is well.
        self._column = rich.progress.BarColumn(bar_width=None, finished_style="bar.complete")
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("round"),
            rich.progress.MofNCompleteColumn(),
            self._column,
            rich.progress.TextColumn("{task.fields[speed]}"),
            expand=True,
        )
        self._task = self._bar.add_task("train", total=rounds, completed=done, speed="")
        self._live = Live(self._bar, console=console, refresh_per_second=5)
        self._live.start()

    def show(self, done: int, numbers: str, speed: str, *, measured: bool) -> None:
        self._bar.update(self._task, completed=done, speed=speed)
        self._live.update(Group(self._bar, numbers))

    def wait(self, reason: str | None) -> None:
        self._bar.update(self._task, speed=reason or "")

    def end(self, words: str, *, well: bool) -> None:
        self._column.finished_style = self._column.complete_style = "bar.finished" if well else "red"
        self._bar.update(self._task, speed=words)

    def close(self) -> None:
        self._live.stop()


class _Notebook:
    """A bar below the cell, in HTML, with a line of text for where there is no HTML."""

    def __init__(self, done: int, rounds: int) -> None:
        display: Any = importlib.import_module("IPython.display").display  # without types of its own
        self._rounds, self._last, self._shown = rounds, (done, ""), time.perf_counter()
        self._words, self._colour = "", "grey"
        self._handle: Any = display(self._bundle(done, "", ""), raw=True, display_id=True)

    def show(self, done: int, numbers: str, speed: str, *, measured: bool) -> None:
        self._last = done, numbers
        if measured or time.perf_counter() - self._shown > _REFRESH_SECONDS:
            self._shown = time.perf_counter()
            self._handle.update(self._bundle(done, numbers, speed), raw=True)

    def wait(self, reason: str | None) -> None:
        self._handle.update(self._bundle(*self._last, reason or ""), raw=True)

    def end(self, words: str, *, well: bool) -> None:
        self._words, self._colour = words, "green" if well else "red"

    def close(self) -> None:
        """Without the speed: what is stored with the notebook tells nothing of how long rounds took."""
        self._handle.update(self._bundle(*self._last, self._words), raw=True)

    def _bundle(self, done: int, numbers: str, speed: str) -> dict[str, str]:
        count = f"round {done}/{self._rounds}"
        style = f"width: 40%; vertical-align: middle; accent-color: {self._colour}"
        top, below = (html.escape(text).replace("  ", " &nbsp; ") for text in (f"{count}  {speed}".strip(), numbers))
        bar = f'<progress value="{done}" max="{self._rounds}" style="{style}"></progress>'
        return {
            "text/plain": "  ".join(part for part in (count, numbers, speed) if part),
            "text/html": f"<div>{bar} {top}<br><code>{below}</code></div>",
        }


class _Lines:
    """Plain lines, for logs."""

    def __init__(self, done: int, rounds: int) -> None:
        self._rounds, self._printed, self._done = rounds, time.perf_counter(), done
        self._measures = False  # whether any round was evaluated so far
        self._pending = ""  # the last round, if it has no line yet

    def show(self, done: int, numbers: str, speed: str, *, measured: bool) -> None:
        self._done, self._measures = done, self._measures or measured
        self._pending = f"round {done}/{self._rounds}  {numbers}  {speed}"
        tenth = not self._measures and done * 10 // self._rounds > (done - 1) * 10 // self._rounds
        silent = time.perf_counter() - self._printed
        if measured or silent > _QUIET_SECONDS or (tenth and silent > _TENTH_SECONDS):
            self._print()

    def wait(self, reason: str | None) -> None:
        if reason is not None:
            print(f"round {self._done}/{self._rounds}  {reason}", file=sys.stderr, flush=True)

    def end(self, words: str, *, well: bool) -> None:
        if not well:
            self._pending = (
                f"{self._pending}  {words}".strip() if self._pending else f"round {self._done}/{self._rounds}  {words}"
            )

    def close(self) -> None:
        """The last round has a line, wherever the run ended."""
        if self._pending:
            self._print()

    def _print(self) -> None:
        self._printed = time.perf_counter()
        print(self._pending, file=sys.stderr, flush=True)
        self._pending = ""


def _short(number: float | None, digits: str) -> str:
    return "-" if number is None else format(number, digits)


def _clock(seconds: float) -> str:
    return f"{int(seconds // 3600)}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}"
