"""Stop a run that does not get better any more."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

from ..errors import SettingError, check_choice, check_number, check_whole, nearest
from ..federated.round import TrainState
from ..metric_direction import lower_is_better
from .callbacks import Callback
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

    The result has the last model, not the best one, and `stopped` is "interrupted": a run directory can be resumed,
    and the count of measurements then begins again.

    THE GUARANTEE IS THAT OF ALL ROUNDS PLANNED. When to stop is decided by what the rounds released; the epsilon of the
    rounds that were run would hold only if their number had been fixed beforehand. To spend less, plan fewer rounds.
    """

    reads_guarantee = False
    waits_for_metrics = True

    def __init__(
        self, metric: str, *, mode: Literal["min", "max"] | None = None, patience: int = 5, min_delta: float = 0.0
    ) -> None:
        by_name = "min" if lower_is_better(metric) else "max"
        self.metric, self.mode = metric, by_name if mode is None else check_choice("mode", mode, ("min", "max"))
        self.patience = check_whole("patience", patience, at_least=1, way_out="count measurements, not rounds")
        self.min_delta = check_number("min_delta", min_delta, at_least=0, way_out="0 takes any improvement")
        self.stop_requested = False
        self.best: float | None = None
        self.best_round: int | None = None  # as reports count them, from 0
        self._since = 0

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin to count, and charge every round that may come."""
        self.stop_requested, self.best, self.best_round, self._since = False, None, None, 0
        planned = training.affordable(state.ledger, training.rounds - state.round_index)
        self.charged = state.ledger.add(training.algorithm.event, planned) if planned else state.ledger

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Compare with the best so far, if the round was measured."""
        if not report.metrics:
            return
        if self.metric not in report.metrics:
            known = ", ".join(report.metrics)
            raise SettingError(
                f"metric={self.metric!r} of EarlyStopping must be one that is measured, and those are {known}: "
                f"{nearest(self.metric, report.metrics)}"
            )
        value = report.metrics[self.metric]
        gain = 0.0 if self.best is None else (value - self.best) * (1 if self.mode == "max" else -1)
        if (self.best is None and value == value) or gain > self.min_delta:
            self.best, self.best_round, self._since = value, report.round_index, 0
            return
        self._since += 1
        self.stop_requested = self._since >= self.patience

    def on_end(self, result: TrainResult) -> None:
        """Tell of a run in which there was nothing to compare."""
        if result.reports and not any(report.metrics for report in result.reports):
            warnings.warn(
                f"EarlyStopping({self.metric!r}) had nothing to compare: add Evaluate(test, metric) to the callbacks",
                stacklevel=2,
            )
