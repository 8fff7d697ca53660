"""What `clipline train` prints at the end: text, or JSON."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..tasks import is_task_file

if TYPE_CHECKING:
    from ..data.task_stores import DataUsed
    from ..privacy.guarantee import Guarantee
    from ..tasks.task import Task
    from ..tasks.train_settings import TrainSettings
    from ..training.result import TrainResult


def summary(
    settings: TrainSettings,
    used: DataUsed,
    result: TrainResult,
    metric_name: str,
    path: Path,
    report: Path | None = None,
    planned: Guarantee | None = None,
    flags: str = "",
) -> str:
    """A few lines to quote: metric, data, guarantee, clip, files, and last the path of the report.

    Of an interrupted run also what was `planned`, which holds whatever made somebody stop, and how to go on, with the
    `flags` that no file stores.
    """
    begin = settings.controller().init().clip
    clip = "none" if settings.clip == "none" else f"{begin:.3g} -> {_last_clip(result):.3g}"
    whole = settings.evaluate_on in (None, "original")  # all test users: there is no half to name
    part = "" if whole else f" ({settings.evaluate_on})"
    ends = result.best
    lines = [
        f"{metric_name} {result.metrics[metric_name]:.4f} on {used.measured_on}{part}",
        *(f"warning: {finding}" for finding in result.findings),
        str(result.guarantee),
        f"clip {clip}"
        + (f", tracking quantile {settings.quantile:g} of the update norms" if settings.clip == "quantile" else ""),
        f"files in {path}: " + ", ".join(sorted(file.name for file in path.iterdir())),
    ]
    at = 1 + len(result.findings)
    if used.kind == "stand-in":
        lines.insert(at, "data: a stand-in, generated; not comparable with results on the original data set")
    elif used.source is not None:
        alike = used.kind == "original" or is_task_file(settings.task)  # a task of one's own has no original
        other = "" if alike else "; not comparable with results on the original data set"
        lines.insert(at, f"data: {used.kind}, {used.source}{other}")
    beside = {name: value for name, value in result.metrics.items() if name not in (metric_name, "loss")}
    if beside:  # such as what would do without a model
        lines.insert(at, "beside it: " + ", ".join(f"{name} {value:.4f}" for name, value in beside.items()))
    if ends is not None and ends.best != ends.last:
        lines.insert(
            at,
            f"best {ends.metric} {ends.best:.4f} after {ends.best_rounds} rounds, last {ends.last:.4f} after "
            f"{ends.last_rounds}",
        )
    if result.stopped == "budget":
        lines.append(f"stopped after {result.guarantee.rounds} rounds: the next one would have passed the budget")
    if result.stopped == "early":
        lines.append(
            f"stopped early after {result.state.round_index} of {settings.rounds} rounds, all of which are charged; "
            f"the model is that after {result.model_rounds}"
        )
    if result.stopped == "interrupted":
        named = (
            f"{shlex.quote(settings.task)} " if is_task_file(settings.task) else ""
        )  # no code runs that is not named
        lines.append(
            f"interrupted: go on with  clipline train {named}--resume {path}{_moved_data(settings, path)}{flags}"
        )
        if planned is not None and result.guarantee.private and planned.epsilon > result.guarantee.epsilon:
            lines.append(f"if you stopped because of what you saw, quote what was planned: {planned}")
    if result.guarantee.private and _seed_guessable(settings):
        lines.append(
            f"not private: cohorts and noise come from seed {settings.seed}, which is easily guessed: leave it out, or "
            "train with --noise-source system"
        )
    elif result.guarantee.private and settings.noise_source == "seed":
        lines.append("cohorts and noise come from the seed: keep it secret, or train with --noise-source system")
    if report is not None:
        lines.append(f"report: {report}")
    return "\n".join(lines)


def _moved_data(settings: TrainSettings, path: Path) -> str:
    """The flag that names the data, where these lie elsewhere than the run directory says."""
    from ..tasks.train_settings import read_toml

    stored = read_toml(path / "settings.toml").get("data")
    return "" if settings.data is None or settings.data == stored else f" --data {shlex.quote(settings.data)}"


def _last_clip(result: TrainResult) -> float:
    """The clip of the last round, as metrics.jsonl and the report have it; before the first, that of the first."""
    return result.reports[-1].clip if result.reports else result.state.clip.clip


def summary_json(
    task: Task,
    settings: TrainSettings,
    used: DataUsed,
    result: TrainResult,
    metric_name: str,
    users: int | None,
    path: Path,
    report: Path | None = None,
) -> dict[str, Any]:
    """The same for programs; epsilon is null where there is no guarantee, `users` where their number is private.

    So is a seed that is a secret: what programs print is kept in logs. It stands in the run directory.
    """
    from ..training.result import finite_or_none

    guarantee = result.guarantee
    return {
        "task": task.name,
        "data": used.kind,
        "data_source": used.source,
        "measured_on": used.measured_on,
        "evaluate_on": settings.evaluate_on,
        "metric": result.metrics[metric_name],
        "metric_name": metric_name,
        "metrics": {name: finite_or_none(value) for name, value in result.metrics.items()},
        "epsilon": finite_or_none(guarantee.epsilon),
        "delta": guarantee.delta,
        "relation": str(guarantee.relation),
        "sampler": guarantee.sampler,
        "accountant": guarantee.accountant,
        "private": guarantee.private and not _seed_guessable(settings),
        "guarantee": str(guarantee),
        "rounds": guarantee.rounds,
        "clip": finite_or_none(_last_clip(result)),
        "stopped": result.stopped,
        "findings": [asdict(finding) for finding in result.findings],
        "best": None if result.best is None else asdict(result.best),
        "model_rounds": result.model_rounds,
        "users": users,
        "population_size": settings.population_size,
        "cohort_size": settings.cohort_size,
        "seed": settings.seed if settings.noise_source == "system" or _seed_guessable(settings) else None,
        "run_dir": str(path),
        "report": None if report is None else str(report),
    }


def _seed_guessable(settings: TrainSettings) -> bool:
    """Whether the noise comes from a seed that somebody may try."""
    from ..random.streams import GUESSABLE

    return settings.noise_source == "seed" and settings.seed < GUESSABLE
