"""What looks on while a run of a study trains: it measures, notices divergence, and makes the record."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import __version__
from ...federated.round import TrainState
from ...settings import LARGEST_CLIP
from ...tasks.task import LoadedTask
from ...training.callbacks import Measuring
from ...training.evaluation import Evaluate
from ...training.model_card import device_name
from ...training.result import Metrics, RoundReport, finite_or_none
from .record import QUANTILES, Outcome, RunRecord, RunSpec

if TYPE_CHECKING:
    from ...training.result import TrainResult
    from ...training.training import Training

_NOT_FINITE = "clipline_not_finite"  # a metric of ours while a run is on its way; it is in no record


@dataclass(frozen=True)
class PlannedRun:
    """A run to make, with its identity."""

    spec: RunSpec
    id: str
    parts: Mapping[str, Any]


class Recorder(Measuring):
    """Measures one run and hands its record to `add` when it has ended.

    Rounds are measured as the spec says, and the last one always. A model with a number that is not finite, a metric
    that is not, or a clip that has run away to its limit ends the run as diverged. Epsilon is computed once, at the
    end.
    """

    reads_guarantee = False

    def __init__(
        self,
        planned: PlannedRun,
        loaded: LoadedTask,
        add: Callable[[RunRecord], None],
        *,
        facts: Mapping[str, Any],
        on_round: Callable[[str], None] = lambda run: None,
        unprivate_quantiles: Callable[[], Mapping[int, list[float | None]]] | None = None,
    ) -> None:
        self.stop_requested = False
        self._planned, self._add, self._facts, self._after_round = planned, add, facts, on_round
        self._unprivate_quantiles = unprivate_quantiles
        self._evaluate = Evaluate(_finite_too(loaded), every=1)
        self._diverged = False

    def on_start(self, training: Training, state: TrainState) -> None:
        """Get ready to measure."""
        self._training, self._begun = training, time.perf_counter()
        self._evaluate.on_start(training, state)

    def measure(self, state: TrainState, *, last: bool) -> Future[Metrics] | None:
        """Metrics of this state, if it is the turn of this round."""
        spec = self._planned.spec
        in_window = state.round_index > spec.settings.rounds - spec.evaluate_last
        due = last or in_window or state.round_index % spec.settings.measured_every == 0
        return self._evaluate.measure(state, last=True) if due else None

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Notice a run that has diverged: no later round can mend it."""
        # An infinite clip is none at all; one at the limit has been driven there.
        lost_clip = math.isnan(report.clip) or LARGEST_CLIP <= report.clip < math.inf
        if lost_clip or any(not math.isfinite(value) for value in report.metrics.values()):
            self._diverged = self.stop_requested = True
        self._after_round(self._planned.id)

    def on_end(self, result: TrainResult) -> None:
        """Hand the record on; nothing of a run that was interrupted."""
        if any(not math.isfinite(value) for value in result.metrics.values()):
            self._diverged = True
        if result.stopped == "interrupted" and not self._diverged:
            return
        outcome: Outcome = "diverged" if self._diverged else "budget" if result.stopped == "budget" else "finished"
        self._add(
            RunRecord(
                id=self._planned.id,
                identity=self._planned.parts,
                outcome=outcome,
                rounds=self._columns(result),
                final={name: _number(result.metrics.get(name)) for name in self._measured(result)},
                guarantee=self._guarantee(result),
                circumstances={**circumstances(self._training), **self._facts, **self._seconds()},
            )
        )

    def close(self) -> None:
        """End the measuring."""
        self._evaluate.close()

    def _guarantee(self, result: TrainResult) -> dict[str, Any]:
        """Epsilon and delta of the model with all that they rest on, and in words."""
        guarantee, training, in_words = result.guarantee, self._training, str(result.guarantee)
        open_quantiles = self._unprivate_quantiles is not None
        if open_quantiles:
            in_words = f"not private: true quantiles of the update norms are recorded (the model alone: {in_words})"
        mechanism = training.algorithm.mechanism
        return {
            "in_words": in_words,
            "private": guarantee.private and not open_quantiles,
            "sound": guarantee.sound,
            "epsilon": finite_or_none(guarantee.epsilon),
            "delta": guarantee.delta,
            "sampling": guarantee.sampler,
            "relation": str(guarantee.relation),
            "accountant": guarantee.accountant,
            "rounds": guarantee.rounds,
            "population_size": training.privacy.population_size or len(training.population),
            "cohort_size": training.cohort_size,
            "noise_multiplier": float(training.noise_multiplier),
            "delta_noise_multiplier": finite_or_none(float(mechanism.delta_noise_multiplier)),
            "count_stddev": mechanism.count_stddev,
        }

    def _measured(self, result: TrainResult) -> list[str]:
        """The names of the metrics, in order. A model that is not finite was not measured by the task."""
        names = dict.fromkeys(name for report in result.reports for name in report.metrics)
        return [name for name in {**names, **dict.fromkeys(result.metrics)} if name != _NOT_FINITE]

    def _seconds(self) -> dict[str, float]:
        return {"unprivate_seconds": round(time.perf_counter() - self._begun, 3)}

    def _columns(self, result: TrainResult) -> dict[str, list[Any]]:
        reports = result.reports
        columns: dict[str, list[Any]] = {
            "round": [report.round_index for report in reports],
            "clip": [finite_or_none(report.clip) for report in reports],
            "fraction_within": [report.fraction_within for report in reports],
        }
        for name in self._measured(result):
            columns[name] = [_number(report.metrics.get(name)) for report in reports]
            if reports:  # a run that stops early is measured once more at its end
                columns[name][-1] = _number(result.metrics.get(name))
        if self._unprivate_quantiles is not None:
            of_rounds, nobody = self._unprivate_quantiles(), [None] * len(QUANTILES)
            for place, quantile in enumerate(QUANTILES):
                name = f"unprivate_quantile_{quantile:g}"
                columns[name] = [of_rounds.get(report.round_index, nobody)[place] for report in reports]
        return columns


def circumstances(training: Training) -> dict[str, Any]:
    """Where and by what a run was made: machine, device, versions, date. None of it should decide a number."""
    return {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "device": device_name(training.device),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "clipline": __version__,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _finite_too(loaded: LoadedTask) -> Callable[[torch.nn.Module], Metrics]:
    """The task's metrics; NaN and nothing else if a parameter is not finite, which a task need not put up with."""

    def evaluate(model: torch.nn.Module) -> Metrics:
        finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        return {**loaded.evaluate(model), _NOT_FINITE: 0.0} if finite else {_NOT_FINITE: math.nan}

    return evaluate


def _number(value: float | None) -> float | None:
    return None if value is None else finite_or_none(value)
