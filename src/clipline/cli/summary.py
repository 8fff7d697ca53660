"""What `clipline train` says at the end, for people and for programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..data.task_stores import DataUsed
    from ..tasks.settings import TrainSettings
    from ..tasks.task import Task
    from ..training.training import TrainResult


def summary(task: Task, settings: TrainSettings, used: DataUsed, result: TrainResult, path: Path) -> str:
    """A few lines that a person can quote."""
    clip = (
        "none"
        if settings.clip == "none"
        else f"{settings.controller().init().clip:.3g} -> {result.state.clip.clip:.3g}"
    )
    part = "" if settings.evaluate_on is None else f" ({settings.evaluate_on})"
    lines = [
        f"{task.metric_name} {result.metrics[task.metric_name]:.4f} on {used.measured_on}{part}",
        str(result.guarantee),
        f"clip {clip}"
        + (f", tracking quantile {settings.quantile:g} of the update norms" if settings.clip == "quantile" else ""),
        f"files in {path}: " + ", ".join(sorted(file.name for file in path.iterdir())),
    ]
    if used.kind == "stand-in":
        lines.insert(1, "data: a stand-in, generated; not comparable with results on the original data set")
    elif used.source is not None:
        other = "" if used.kind == "original" else "; not comparable with results on the original data set"
        lines.insert(1, f"data: {used.kind}, {used.source}{other}")
    if result.stopped == "budget":
        lines.append(f"stopped after {result.guarantee.rounds} rounds: the next one would have passed the budget")
    if result.stopped == "interrupted":
        lines.append(f"interrupted: go on with  clipline train --resume {path}")
    if result.guarantee.private and settings.noise_source == "seed":
        lines.append("cohorts and noise come from the seed: keep it secret, or train with --noise-source system")
    return "\n".join(lines)


def summary_json(
    task: Task, settings: TrainSettings, used: DataUsed, result: TrainResult, path: Path
) -> dict[str, Any]:
    """The same for programs; epsilon is null where there is no guarantee."""
    from ..training.run_directory import finite_or_none

    guarantee = result.guarantee
    return {
        "task": task.name,
        "data": used.kind,
        "data_source": used.source,
        "measured_on": used.measured_on,
        "evaluate_on": settings.evaluate_on,
        "metric": result.metrics[task.metric_name],
        "metric_name": task.metric_name,
        "epsilon": finite_or_none(guarantee.epsilon),
        "delta": guarantee.delta,
        "relation": str(guarantee.relation),
        "sampler": guarantee.sampler,
        "accountant": guarantee.accountant,
        "private": guarantee.private,
        "guarantee": str(guarantee),
        "rounds": guarantee.rounds,
        "clip": finite_or_none(result.state.clip.clip),
        "stopped": result.stopped,
        "users": None if settings.users_private else settings.users,
        "population_size": settings.declared_size,
        "cohort": settings.cohort,
        "seed": settings.seed,
        "run_dir": str(path),
    }
