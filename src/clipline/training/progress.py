"""Progress: a live line on a terminal, a bar in a notebook, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..console import QUIET_SECONDS, Bar, clock, tell
from ..federated.round import TrainState
from ..privacy.feasibility import Verdict, rate_warning, verdict, verdict_text
from .callbacks import Callback
from .result import Metrics, RoundReport

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training

_TENTH_SECONDS = 1.0  # in a log, where no round is evaluated: between the lines after each tenth of the rounds


class Progress(Callback):
    """Shows rounds on standard error: metrics, clip, fraction within, epsilon so far, speed and time left.

    A terminal has one line that is updated in place, and a notebook a bar below the cell. Elsewhere, as in a log file,
    a line is printed for every evaluated round, every ten seconds and for the last round. Without evaluation it is each
    tenth of the rounds. A bar is green at the end only if the run finished and looks well: see `TrainResult.findings`.
    If the noise is not comfortably small, the planner's line on it comes first.

    Speed and time left depend on which users are drawn. The guarantee does not cover them.

    Args:
      metric: Name of the one to show. Left out, all metrics of the last evaluation are shown.

    Example:
      >>> training.run([cl.Progress(), cl.Evaluate(test, accuracy)])
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric
        self._metrics: Metrics = {}
        self._spent: tuple[int, str] | None = None  # the number of rounds, and epsilon after them
        self._bar: Bar | None = None

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin to count at the round that comes next."""
        self._rounds, self._first = training.rounds, state.round_index
        if verdict(ratio := training.noise_norm) in (Verdict.FEASIBLE, Verdict.DOUBTFUL):  # of worse a warning tells
            tell(f"can it train?  {verdict_text(ratio)}")
            if (said := rate_warning(ratio, training.sgd_lr)) is not None:
                tell(said)
        self._begun = time.perf_counter()
        self._waits_since: float | None = None
        self._metrics, self._spent = {}, None
        self._bar = Bar(self._rounds, self._first, f"round {self._first}/{self._rounds}")

    def on_wait(self, reason: str | None) -> None:
        """Say that training waits; the time does not count when the speed is worked out."""
        now = time.perf_counter()
        if self._waits_since is not None:
            self._begun += now - self._waits_since
        self._waits_since = None if reason is None else now
        if self._bar is not None:
            self._bar.wait(reason)

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Show one finished round."""
        assert self._bar is not None, "on_start comes first"
        self._metrics = report.metrics or self._metrics
        done = report.round_index + 1
        if report.accounted or self._spent is None:
            self._spent = done, report.guarantee.epsilon_text
        accounted, epsilon = self._spent
        rate = (done - self._first) / max(time.perf_counter() - self._begun, 1e-9)
        speed = f"{rate:.1f} rounds/s  {clock((self._rounds - done) / rate)} left"
        shown = self._metrics if self.metric is None else {self.metric: self._metrics.get(self.metric)}
        numbers = "  ".join(
            (
                *(f"{name} {_short(value, '.3f')}" for name, value in shown.items()),
                f"clip {report.clip:.3g}",
                f"fraction within {_fraction(report.fraction_within)}",
                f"epsilon so far {epsilon}" if accounted == done else f"epsilon {epsilon} after {accounted} rounds",
            )
        )
        tenth = not self._metrics and done * 10 // self._rounds > (done - 1) * 10 // self._rounds
        quiet = 0.0 if report.metrics else _TENTH_SECONDS if tenth else QUIET_SECONDS
        self._bar.show(done, f"round {done}/{self._rounds}", speed, numbers, quiet=quiet)

    def on_end(self, result: TrainResult) -> None:
        """Say how the run ended."""
        assert self._bar is not None, "on_start comes first"
        warned = len(result.findings)
        ended = {"budget": "stopped by its budget", "early": "stopped early"}.get(result.stopped, result.stopped)
        words = f"{ended}, with {warned} warning{'s' * (warned != 1)}" if warned else ended
        self._bar.end(words, well=not warned and result.stopped != "interrupted")

    def close(self) -> None:
        """Leave the screen as it was, below the last line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _fraction(noisy: float | None) -> str:
    """A noisy fraction; outside [0, 1] the word is beside it."""
    return _short(noisy, ".2f") + " (noisy)" * (noisy is not None and not 0 <= noisy <= 1)


def _short(number: float | None, digits: str) -> str:
    return "-" if number is None else format(number, digits)
