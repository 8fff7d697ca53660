"""Stop a run that does not get better any more."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from ..errors import check_choice, check_number, check_whole, refuse
from ..federated.round import TrainState
from ..metric_direction import lower_is_better
from .best import Best, Kept, check_measured
from .callbacks import Callback, Measuring
from .diagnosis import Known
from .reports import RoundReport

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training


class EarlyStopping(Callback):
    """Stops the run when a metric has not got better in `patience` measurements one after the other.

    `metric` is the name of one that an `Evaluate` of the same run measures, on users outside the training. Better is
    lower (`mode="min"`) or higher ("max") than the best so far by more than `min_delta`; NaN never is. Left out, `mode`
    is "min" for a loss, an error or a perplexity by the metric's name (loss, mse, err; docs/callbacks.md has the rule)
    and "max" for everything else. Training waits for each measurement, so that the same run always stops after the same
    round.

    The result has the last model, or with `restore_best` the best one that was measured, and its metrics. `stopped` is
    "early": the run has ended, and a run directory of it is not resumed. Where a run is interrupted and resumed, the
    count of measurements and the search for the best begin again.

    THE GUARANTEE IS THAT OF ALL ROUNDS PLANNED. When to stop is decided by what the rounds released; the epsilon of the
    rounds that were run would hold only if their number had been fixed beforehand. To spend less, plan fewer rounds.

    Args:
      metric: Name of the metric to follow.
      mode: Whether it is better lower ("min") or higher ("max").
      patience: How many measurements in a row may bring nothing better.
      min_delta: By how much a value must be better to count.
      restore_best: Give the best model that was measured instead of the last. It was released like any other, so this
        costs no privacy.

    Raises:
      SettingError: If `mode`, `patience`, `min_delta` or `restore_best` is not allowed, or if nothing measures
        `metric`: before the first round where a metric is given to `Evaluate`, or else when it has measured.

    Example:
      >>> training.run([cl.Evaluate(test, accuracy), cl.EarlyStopping("accuracy", restore_best=True)])
    """

    reads_guarantee = False
    waits_for_metrics = True
    stop_reason = "early"

    def __init__(
        self,
        metric: str,
        *,
        mode: Literal["min", "max"] | None = None,
        patience: int = 5,
        min_delta: float = 0.0,
        restore_best: bool = False,
    ) -> None:
        by_name: Literal["min", "max"] = "min" if lower_is_better(metric) else "max"
        self.metric, self.mode = metric, by_name if mode is None else mode
        check_choice("mode", self.mode, ("min", "max"))
        self.patience = check_whole("patience", patience, at_least=1, way_out="count measurements, not rounds")
        self.min_delta = check_number("min_delta", min_delta, at_least=0, way_out="0 takes any improvement")
        if not isinstance(restore_best, bool):
            raise refuse("restore_best", restore_best, "True or False", "True gives the best model")
        self.restore_best = restore_best
        self.stop_requested, self._since, self._best = False, 0, self._nothing_yet()

    @property
    def best(self) -> float | None:
        """The best value so far."""
        return self._best.value

    @property
    def best_round(self) -> int | None:
        """The round that had it, as reports count them, from 0."""
        return self._best.round_index

    @property
    def kept(self) -> Kept | None:
        """What the result is made of, where that is not the last round."""
        return self._best.kept

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin to count, and charge every round that may come."""
        self.stop_requested, self._since, self._best = False, 0, self._nothing_yet()
        planned = training.affordable(state.ledger, training.rounds - state.round_index)
        self.charged = state.ledger.add(training.algorithm.event, planned) if planned else state.ledger

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Compare with the best so far, if the round was measured."""
        if not report.metrics:
            return
        if self.metric not in report.metrics:  # measured by another `Evaluate`, perhaps, and more rarely
            self._check(self._measuring)
            return
        self._since = 0 if self._best.take(report, state) else self._since + 1
        self.stop_requested = self._since >= self.patience

    def on_end(self, result: TrainResult) -> None:
        """Tell of a run in which there was nothing to compare."""
        if result.reports and not any(self.metric in report.metrics for report in result.reports):
            warnings.warn(
                f"EarlyStopping({self.metric!r}) had nothing to compare: give Evaluate a metric of that name",
                stacklevel=2,
            )

    def check_metrics(self, measuring: Sequence[Measuring], known: Known) -> None:
        """Refuse a metric of which it is known before the first round that nothing measures it."""
        self._measuring = measuring
        self._check(measuring)

    def _check(self, measuring: Sequence[Measuring]) -> None:
        check_measured(self.metric, f"metric={self.metric!r} of EarlyStopping", measuring)

    def _nothing_yet(self) -> Best:
        return Best(self.metric, self.mode, min_delta=self.min_delta, keeps=self.restore_best)
