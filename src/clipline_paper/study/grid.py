"""The runs that figures are made of: adaptive, fixed and unclipped, each with its row in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as Interface

from clipline.study import RunRecord, RunSpec
from clipline.tasks import TrainSettings

from .protocol import HIGHEST, LOWEST, Protocol
from .rules import ClipCurve, Row, best_of_server_rates, clip_range, log_spaced

OF_RUN = ("method", "quantile", "clip", "noise_at_100", "noise_multiplier", "client_lr", "server_lr")


class Results(Interface):
    """What makes runs, or looks them up: a `Study`."""

    def results(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order; those that are missing are made."""


@dataclass(frozen=True)
class GridRun:
    """One run of a grid: what to run, and what its row says of it."""

    spec: RunSpec
    labels: dict[str, Any]


@dataclass(frozen=True)
class Grid:
    """A study, the protocol, and the settings that all runs share. A row holds its run's `spec` beside its columns."""

    study: Results
    protocol: Protocol
    base: TrainSettings
    _kept: dict[RunSpec, RunRecord] = field(default_factory=dict)  # what was asked for before is not asked for again

    def records(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order."""
        missing = [spec for spec in dict.fromkeys(specs) if spec not in self._kept]
        if missing:
            self._kept.update(zip(missing, self.study.results(missing), strict=True))
        return [self._kept[spec] for spec in specs]

    def adaptive(self, quantiles: Sequence[float], noises: Sequence[float]) -> list[GridRun]:
        """A run for each quantile, noise and server rate."""
        return [
            self._cell(self.protocol.adaptive(self.base, q, z, f), method="adaptive", quantile=q, noise_at_100=z)
            for q in quantiles
            for z in noises
            for f in self.protocol.server_rates
        ]

    def fixed(self, clips: Sequence[float], noises: Sequence[float]) -> list[GridRun]:
        """A run for each clip, noise and server rate."""
        return [
            self._cell(self.protocol.fixed(self.base, c, z, f), method="fixed", clip=c, noise_at_100=z)
            for c in clips
            for z in noises
            for f in self.protocol.server_rates
        ]

    def unclipped(self, rates: Sequence[tuple[float, float]]) -> list[GridRun]:
        """A run for each pair of client and server rate, without clipping and noise."""
        runs = [self.protocol.unclipped(self.base, *pair) for pair in rates]
        return [self._cell(run, method="unclipped", noise_at_100=0.0) for run in runs]

    def rows(self, cells: Sequence[GridRun]) -> list[dict[str, Any]]:
        """A row for each run; the best server rate of each configuration is `chosen`."""
        protocol, rows = self.protocol, []
        for cell, record in zip(cells, self.records([cell.spec for cell in cells]), strict=True):
            value = record.average(protocol.metric, protocol.average_over)
            settings = cell.spec.settings
            rows.append(
                {
                    **dict.fromkeys(OF_RUN),
                    **cell.labels,
                    "noise_multiplier": settings.noise_multiplier,
                    "client_lr": settings.client_lr,
                    "server_lr": settings.server_lr,
                    "value": value if math.isfinite(value) else math.nan,
                    "outcome": record.outcome,
                    "chosen": False,
                    "runs": record.id,
                    "spec": cell.spec,
                }
            )
        by = ("method", "quantile", "clip", "noise_at_100")
        best = best_of_server_rates(rows, by, "value", lower_is_better=protocol.lower_is_better)
        return [{**row, "chosen": any(row is one for one in best)} for row in rows]

    def chosen(self, cells: Sequence[GridRun]) -> list[dict[str, Any]]:
        """The rows at their best server rate alone."""
        return chosen(self.rows(cells))

    def clips(self) -> tuple[list[float], dict[str, Any]]:
        """The five fixed clips, and C_min and C_max with the two runs that they come from."""
        rows = self.chosen(self.adaptive((LOWEST, HIGHEST), (0.0,)))
        low, high = clip_range(*(self._curve(row) for row in rows))
        clips = log_spaced(low, high)
        return clips, {"clip_min": low, "clip_max": high, "clips": clips, "runs": [row["runs"] for row in rows]}

    def tested(self, rows: Sequence[Row]) -> list[list[dict[str, Any]]]:
        """For each of these configurations a row for each seed: its final model, measured on the test users."""
        seeds = range(1, self.protocol.seeds + 1)
        asked = [(row, seed) for row in rows for seed in seeds]
        runs = [RunSpec(self.protocol.tested(row["spec"].settings, seed)) for row, seed in asked]
        found: list[list[dict[str, Any]]] = [[] for _ in rows]
        for number, ((row, seed), record) in enumerate(zip(asked, self.records(runs), strict=True)):
            value = None if record.outcome == "diverged" else record.final.get(self.protocol.metric)
            own: dict[str, Any] = {
                "seed": seed,
                "value": math.nan if value is None else float(value),
                "outcome": record.outcome,
            }
            own["clips"] = [float(clip) for clip in record.rounds["clip"] if clip is not None]
            found[number // len(seeds)].append({**{name: row[name] for name in OF_RUN}, **own, "runs": record.id})
        return found

    def _curve(self, row: Row) -> ClipCurve:
        (record,) = self.records([row["spec"]])
        clips = [math.nan if clip is None else float(clip) for clip in record.rounds["clip"]]
        return ClipCurve(row["quantile"], clips, record.rounds["fraction_within"])

    def _cell(self, settings: TrainSettings, **labels: Any) -> GridRun:
        """Runs without noise that follow a quantile also record the true quantiles, for Figure 4."""
        unprivate = settings.clip == "quantile" and settings.noise_multiplier == 0
        return GridRun(RunSpec(settings, unprivate, evaluate_last=self.protocol.evaluate_last), labels)


def chosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows at their best server rate."""
    return [row for row in rows if row["chosen"]]
