"""The folder of one run: what was asked, what happened round by round, what was charged, and the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..federated.checkpoint import load_checkpoint, save_checkpoint, save_model
from ..federated.round import TrainState
from ..federated.training import RoundReport, TrainResult
from ..plotting import new_figure, save_figure
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import ledger_line
from ..tasks.settings import TrainSettings

SETTINGS, METRICS, LEDGER, MODEL, CURVES = (
    "settings.toml",
    "metrics.jsonl",
    "ledger.jsonl",
    "model.safetensors",
    "curves.png",
)
CHECKPOINT = "checkpoint.safetensors"


def check_free(path: Path) -> None:
    """Refuse a run directory that holds anything already; make nothing."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"out={str(path)!r} must be a folder that is new or empty, and it is in use: give another --out")


class RunDirectory:
    """Writes one run as it happens. Every line holds released numbers only."""

    def __init__(self, path: Path, settings: TrainSettings) -> None:
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.settings = settings
        (path / SETTINGS).write_text(settings.to_toml())
        (path / METRICS).touch()
        (path / LEDGER).touch()

    @classmethod
    def reopen(cls, path: Path, settings: TrainSettings) -> tuple[RunDirectory, TrainState]:
        """An interrupted run and its last checkpoint; lines of later rounds are dropped, they will be written again."""
        if not (path / CHECKPOINT).is_file():
            raise RunError(f"resume={str(path)!r} holds no {CHECKPOINT}: it is finished, or never reached a checkpoint")
        directory = cls.__new__(cls)
        directory.path, directory.settings = path, settings
        state = load_checkpoint(path / CHECKPOINT)
        for name in (METRICS, LEDGER):
            lines = (path / name).read_text().splitlines(keepends=True)[: state.round_index]
            if len(lines) < state.round_index:
                raise RunError(f"{str(path / name)!r} has {len(lines)} rounds but the checkpoint {state.round_index}")
            (path / name).write_text("".join(lines))
        return directory, state

    def write_round(self, report: RoundReport, state: TrainState) -> None:
        """One line of metrics, one of the ledger, and a checkpoint when the round was evaluated.

        Where the noise comes from the system a round cannot be replayed, so that every round is a checkpoint.
        """
        event = state.ledger.runs[-1][0]
        _append(self.path / LEDGER, ledger_line(report.round_index, event))
        _append(self.path / METRICS, json.dumps(round_json(report)))
        if report.metrics or self.settings.noise_source == "system":
            save_checkpoint(self.path / CHECKPOINT, state)

    def finish(self, result: TrainResult, metric_name: str) -> None:
        """The model and the curves; the checkpoint stays only where there are rounds left to resume."""
        save_model(self.path / MODEL, result.model, {"guarantee": str(result.guarantee), "task": self.settings.task})
        rounds = [json.loads(line) for line in (self.path / METRICS).read_text().splitlines()]
        if rounds:
            draw_curves(self.path / CURVES, rounds, metric_name, self.settings, result.guarantee)
        if result.stopped == "interrupted":
            save_checkpoint(self.path / CHECKPOINT, result.state)
        else:
            (self.path / CHECKPOINT).unlink(missing_ok=True)


def round_json(report: RoundReport) -> dict[str, Any]:
    """One line of metrics.jsonl; epsilon is null where there is no guarantee."""
    return {
        "round": report.round_index,
        "clip": report.clip,
        "fraction_within": report.fraction_within,
        "epsilon": finite_or_none(report.guarantee.epsilon),
        "delta": report.guarantee.delta,
        "seconds": round(report.seconds, 6),
        **report.metrics,
    }


def finite_or_none(number: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return number if math.isfinite(number) else None


def draw_curves(
    path: Path, rounds: list[Mapping[str, Any]], metric_name: str, settings: TrainSettings, guarantee: Guarantee
) -> None:
    """Metric, clip with fraction within, and epsilon over the rounds."""
    figure, (metric, clip, epsilon) = new_figure(1, 3, width=13, height=3.9)
    measured = [(r["round"] + 1, r[metric_name]) for r in rounds if metric_name in r]
    metric.plot(*zip(*measured, strict=True), marker="o", ms=3) if measured else None
    metric.set(title=f"{metric_name} on held-out users", xlabel="round")
    number = [r["round"] + 1 for r in rounds]
    clip.plot(number, [r["clip"] for r in rounds if r["clip"] is not None] or [math.nan] * len(number))
    clip.set(title="clip (line) and fraction within (dots, noisy)", xlabel="round", yscale="log")
    if any(r["fraction_within"] is not None for r in rounds):
        fraction = clip.twinx()
        fraction.plot(number, [r["fraction_within"] for r in rounds], ".", ms=3, color="#e07a1f", alpha=0.6)
        fraction.axhline(settings.quantile, color="#e07a1f", lw=0.9, ls="--")
        fraction.set_ylim(-0.35, 1.35)
        fraction.set_ylabel(f"fraction within (dashed: wanted, {settings.quantile:g})", color="#e07a1f")
        fraction.spines["top"].set_visible(False)
    if guarantee.private:
        epsilon.plot(number, [r["epsilon"] for r in rounds])
        epsilon.set_ylim(0, None)
        epsilon.set(title=f"epsilon at delta {guarantee.delta:.2g}", xlabel="round")
    else:
        epsilon.set(title="epsilon", xticks=[], yticks=[])
        epsilon.text(0.5, 0.5, "NOT PRIVATE\nno noise was added", ha="center", va="center", transform=epsilon.transAxes)
    figure.suptitle(f"{settings.task}: {guarantee}", fontsize=10)
    save_figure(figure, path)


def _append(path: Path, line: str) -> None:
    with path.open("a") as file:
        file.write(line + "\n")
