"""The folder of one run: what was asked, what happened round by round, what was charged, and the model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RunError
from ..federated.round import TrainState
from ..plotting import new_figure, save_figure
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger, ledger_line
from ..tasks.settings import TrainSettings
from ..tasks.stores import OUTSIDERS
from .checkpoint import load_checkpoint, save_checkpoint, save_model
from .circumstances import Circumstances
from .directory_lock import DirectoryLock
from .reports import RoundReport
from .training import Training, TrainResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTINGS, METRICS, LEDGER = "settings.toml", "metrics.jsonl", "ledger.jsonl"
MODEL, CURVES = "model.safetensors", "curves.png"
CHECKPOINT = "checkpoint.safetensors"


def check_free(path: Path) -> None:
    """Refuse a run directory that holds anything already; make nothing."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(f"out={str(path)!r} must be a folder that is new or empty, and it is in use: give another --out")


class RunDirectory:
    """Writes one run as it happens. Every line holds released numbers only, but for seconds that the settings ask for.

    The folder is locked until `close`, `finish` or the end of a `with` block: no other process can open it meanwhile.
    """

    def __init__(self, path: Path, settings: TrainSettings, training: Training) -> None:
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as on_error:
            lock = on_error.enter_context(DirectoryLock(path))
            check_free(path)  # again: another process may have written and ended meanwhile
            self._open(path, settings, training, lock)
            (path / SETTINGS).write_text(settings.to_toml() + resolved_comments(training), encoding="utf-8")
            (path / METRICS).touch()
            (path / LEDGER).touch()
            on_error.pop_all()

    def _open(self, path: Path, settings: TrainSettings, training: Training, lock: DirectoryLock) -> None:
        self.path, self.settings, self.written, self._lock = path, settings, Ledger(), lock
        self.circumstances = Circumstances(settings, training)

    @classmethod
    def reopen(
        cls, path: Path, settings: TrainSettings, training: Training, lock: DirectoryLock | None = None
    ) -> tuple[RunDirectory, TrainState]:
        """An interrupted run and its last checkpoint; refused where its circumstances, such as the data, have changed.

        Rounds after the checkpoint are run again. From the same seed they release the same numbers: their lines in the
        ledger stay and count once. Noise and cohorts from the system differ: there a round that is run again is one
        more round. Either way nothing that was ever charged is forgotten.

        Whoever has read the settings from the folder has locked it before, and hands in the `lock`.
        """
        with ExitStack() as on_error:
            lock = on_error.enter_context(DirectoryLock(path) if lock is None else lock)
            if not (path / CHECKPOINT).is_file():
                raise RunError(
                    f"resume={str(path)!r} holds no {CHECKPOINT}: it is finished, or never reached a checkpoint"
                )
            directory = cls.__new__(cls)
            directory._open(path, settings, training, lock)
            device = training.algorithm.clients.flat.vector.device
            state = load_checkpoint(path / CHECKPOINT, device, str(directory.circumstances))
            if _shapes(state) != _shapes(training.algorithm.init()):
                raise RunError(f"{str(path / CHECKPOINT)!r} holds tensors of another model: start the run again")
            _rewrite(path / LEDGER, _whole_lines(path / LEDGER))
            written = Ledger.read(path / LEDGER)
            if set(written.events) - {training.algorithm.event}:
                raise RunError(f"{str(path / LEDGER)!r} holds rounds of another run: restore it, or start a new run")
            charged = max(state.ledger, written, key=lambda ledger: ledger.rounds)
            _rewrite(path / LEDGER, [ledger_line(index, event) + "\n" for index, event in enumerate(charged)])
            _rewrite(path / METRICS, _metrics_before(path / METRICS, state.round_index))
            directory.written = charged
            on_error.pop_all()
        return directory, replace(state, ledger=charged) if settings.noise_source == "system" else state

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other processes open the folder. Nothing may be written afterwards."""
        self._lock.close()

    def write_round(self, report: RoundReport, state: TrainState) -> None:
        """A line of the ledger before anything else of the round is let out, a line of metrics, perhaps a checkpoint.

        A checkpoint comes when the round was evaluated; and always where the noise comes from the system, since such a
        round cannot be replayed.
        """
        if state.ledger.rounds > self.written.rounds:
            _append(self.path / LEDGER, ledger_line(state.ledger.rounds - 1, state.ledger.entries[-1][0]))
            self.written = state.ledger
        _append(self.path / METRICS, json.dumps(round_json(report, self.settings.unprivate_timing)))
        if report.metrics or self.settings.noise_source == "system":
            save_checkpoint(self.path / CHECKPOINT, state, str(self.circumstances))

    def charged(self, result: TrainResult, training: Training) -> TrainResult:
        """The result with the guarantee of everything the ledger holds, which may be more than this state has seen."""
        return replace(result, guarantee=training.guarantee_of(self.written)) if self.written.rounds else result

    def finish(self, result: TrainResult, metric_name: str, data: str, measured_on: str = OUTSIDERS) -> None:
        """The model and the curves, then the folder is free; the checkpoint stays where there are rounds to resume.

        `data` says what the model was trained on, such as "stand-in", and `measured_on` whom the metrics look at: both
        are written beside every result.
        """
        facts = {"guarantee": str(result.guarantee), "task": self.settings.task, "data": data}
        facts["measured_on"] = measured_on
        save_model(self.path / MODEL, result.model, facts)
        rounds = [json.loads(line) for line in (self.path / METRICS).read_text(encoding="utf-8").splitlines()]
        if rounds:
            draw_curves(self.path / CURVES, rounds, metric_name, self.settings, result.guarantee, data, measured_on)
        if result.stopped == "interrupted":
            save_checkpoint(self.path / CHECKPOINT, result.state, str(self.circumstances))
        else:
            (self.path / CHECKPOINT).unlink(missing_ok=True)
        self.close()


def resolved_comments(training: Training) -> str:
    """What followed from the settings, as TOML comments: for the reader, not to be set twice."""
    mechanism = training.algorithm.mechanism
    values = {
        "noise_multiplier": training.noise_multiplier,
        "delta_noise_multiplier": float(mechanism.delta_noise_multiplier),
        "count_stddev": mechanism.count_stddev,
        "delta": training.delta,
        "relation": str(training.relation),
        **({} if training.declared else {"users": len(training.population)}),  # declared: how many came is private
        "parameters": training.algorithm.clients.flat.dim,
        "planned": str(training.planned),
    }
    return "\n# Resolved when the run began:\n" + "".join(f"# {name} = {value!r}\n" for name, value in values.items())


def round_json(report: RoundReport, unprivate_timing: bool = False) -> dict[str, Any]:
    """One line of metrics.jsonl; epsilon is null where there is no guarantee.

    How long the round took is left out unless asked for: it tells whether a user with much to train took part.
    """
    seconds = {"unprivate_seconds": round(report.unprivate_seconds, 6)} if unprivate_timing else {}
    return {
        "round": report.round_index,
        "clip": finite_or_none(report.clip),
        "fraction_within": report.fraction_within,
        "epsilon": finite_or_none(report.guarantee.epsilon),
        "delta": report.guarantee.delta,
        **seconds,
        **report.metrics,
    }


def finite_or_none(number: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return number if math.isfinite(number) else None


def draw_curves(
    path: Path,
    rounds: list[Mapping[str, Any]],
    metric_name: str,
    settings: TrainSettings,
    guarantee: Guarantee,
    data: str,
    measured_on: str = OUTSIDERS,
) -> None:
    """Metric, clip, epsilon and fraction within over the rounds."""
    figure, (metric, clip, epsilon, within) = new_figure(2, 2, width=11, height=6.4)
    number = [r["round"] + 1 for r in rounds]
    measured = [(r["round"] + 1, r[metric_name]) for r in rounds if metric_name in r]
    metric.plot([n for n, _ in measured], [value for _, value in measured], marker="o", ms=3.5)
    metric.set_title(f"{metric_name} on {measured_on.split(',')[0]}")
    if rounds[-1]["clip"] is None:
        _say(clip, "clip", "no clip")
    else:
        clip.plot(number, [r["clip"] for r in rounds])
        clip.set(title="clip (log scale)", yscale="log")
    if guarantee.private:
        epsilon.plot(number, [r["epsilon"] for r in rounds])
        epsilon.set(title=f"epsilon spent so far, at delta {guarantee.delta_text}", ylim=(0, None))
    else:
        _say(epsilon, "epsilon", "NOT PRIVATE\nno noise was added")
    if rounds[-1]["fraction_within"] is None:
        _say(within, "fraction of updates within the clip", "not released:\na clip that does not adapt needs no count")
    else:
        within.plot(number, [r["fraction_within"] for r in rounds], ".", ms=4, alpha=0.7)
        within.axhline(settings.quantile, color="0.4", lw=1, ls="--")
        within.set_title(f"noisy fraction within the clip (dashed: target {settings.quantile:g})")
    for axis in (metric, clip, epsilon, within):
        axis.set_xlim(0, number[-1] + 1)
        axis.set_xlabel("round")
    figure.suptitle(f"{settings.task} ({data} data): {guarantee}", fontsize=10)
    save_figure(figure, path)


def _say(axis: Axes, title: str, text: str) -> None:
    axis.set(title=title, yticks=[])
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)


def _shapes(state: TrainState) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = {"params": state.params, **{f"server.{name}": tensor for name, tensor in state.server.items()}}
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, less a last one that a crash cut short; none if there is no file."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if line.endswith("\n")]


def _metrics_before(path: Path, round_index: int) -> list[str]:
    """The lines of the rounds before this one; damaged ones are left out, as nothing is computed from them."""
    kept = []
    for line in _whole_lines(path):
        try:
            if json.loads(line)["round"] < round_index:
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return kept


def _rewrite(path: Path, lines: list[str]) -> None:
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
