"""The folder of one run: what was asked, what happened round by round, what was charged, and the model."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ...errors import RunError, SettingError, check_whole, refuse
from ...federated.round import TrainState
from ...metric_direction import HIGHER, LOWER
from ...privacy.ledger import Ledger, ledger_line
from ..callbacks import Callback
from ..curves import draw_curves, quantile_of
from ..reports import RoundReport, round_json
from .checkpoint import CheckpointWriter, load_checkpoint, load_personal, partial_path, save_checkpoint, save_model
from .circumstances import Circumstances, describe, resolved, to_toml, where_it_ran
from .directory_lock import DirectoryLock
from .model_card import MODEL, card_metadata, card_of

if TYPE_CHECKING:
    from ..result import TrainResult
    from ..training import Training

SETTINGS, METRICS, LEDGER = "settings.toml", "metrics.jsonl", "ledger.jsonl"
CURVES = "curves.png"
CHECKPOINT = "checkpoint.safetensors"


class RunDirectory(Callback):
    """Writes one run into a folder as it happens, and lets it be resumed.

    Files: settings.toml (what the training was made with), ledger.jsonl and metrics.jsonl (a line a round), from time
    to time checkpoint.safetensors, and at the end model.safetensors and curves.png. They hold released numbers only,
    but for the seconds that `unprivate_timing` asks for and, in a checkpoint, the checksum of the data and users'
    personal parameters, where there are some: the checkpoint is deleted when the run has finished. The folder must
    be new or empty; for `Training.resume` it is that of the interrupted run. It is locked from the start of the run to
    `close`: no other process can use it meanwhile.

    A round's line of the ledger is written before anything else of it. To keep this true of other callbacks too,
    `Training.run` calls a run directory before them. A checkpoint comes after every round that was evaluated and every
    `checkpoint_every` rounds, and is written while the next rounds train; where they come so fast that writing would
    hold up the rounds, only the latest is, some seconds later. Where the noise comes from the system it is written
    with every round that is reported, before the next report, since such a round cannot be run again with the same
    result: one that was released and not stored yet is run again with other noise, and charged again.

    `facts` (name -> text) are stored with the model and in the title of the figure; one called `measured_on` says whom
    the metrics are about. `metric` is the one to draw, the first if left out. `same` (name -> value) is what else must
    be the same on a resume, such as a version of your loss, whose code cannot be compared. `settings` is TOML to store
    in the place of a description of the training, `task` says how `clipline.load` finds the model's code, and `lock` is
    a lock on the folder that the caller has taken.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        facts: Mapping[str, str] | None = None,
        metric: str | None = None,
        checkpoint_every: int = 10,
        unprivate_timing: bool = False,
        same: Mapping[str, object] | None = None,
        settings: str | None = None,
        task: Mapping[str, object] | None = None,
        lock: DirectoryLock | None = None,
    ) -> None:
        self.path = checked_path(path)
        self.facts = None if facts is None else {name: str(value) for name, value in facts.items()}
        self.metric, self.unprivate_timing, self.same, self.settings = metric, unprivate_timing, same, settings
        self.checkpoint_every = check_whole(
            "checkpoint_every", checkpoint_every, at_least=1, way_out="1 stores one after each round"
        )
        self.task = task
        self.charged = Ledger()  # everything that was ever written to ledger.jsonl
        self._lock = lock
        self._training: Training | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._reopened = False

    def on_start(self, training: Training, state: TrainState) -> None:
        """Make the folder, lock it and write the settings; after `reopen`, go on in the one that is open."""
        if self._reopened and self._training is training and state.round_index == self._next_round:
            self._reopened = False  # one run goes on in it, and no other
            return
        if self._training is not None:
            raise SettingError(
                f"RunDirectory({str(self.path)!r}) is open for another run or another state but serves one: make one "
                "for each run"
            )
        check_free(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as on_error:
            lock = on_error.enter_context(self._take_lock())
            check_free(self.path)  # again: another process may have written and ended meanwhile
            self._write_settings(training)
            (self.path / METRICS).touch()
            _rewrite(self.path / LEDGER, _ledger_lines(state.ledger))
            self._open(training, state, lock, state.ledger, Circumstances(training, self.same))
            on_error.pop_all()

    def reopen(self, training: Training) -> TrainState:
        """Open an interrupted run and give its last checkpoint; refused where the circumstances have changed.

        Rounds after the checkpoint are run again. From the same seed they release the same numbers: their lines in the
        ledger stay and count once. Noise and cohorts from the system differ: there a round that is run again is one
        more round. Either way nothing that was ever charged is forgotten.
        """
        with ExitStack() as on_error:
            lock = on_error.enter_context(self._take_lock())
            checkpoint = self.path / CHECKPOINT
            partial_path(checkpoint).unlink(missing_ok=True)  # of a write that was cut; it may hold personal parameters
            if not checkpoint.is_file():
                if (self.path / MODEL).is_file():
                    raise RunError(
                        f"resume={str(self.path)!r} is a finished run, with nothing to go on with: clipline.load reads "
                        "its model; start another to train again"
                    )
                raise RunError(
                    f"resume={str(self.path)!r} holds no {CHECKPOINT}, as its run never reached one: start again in "
                    "another folder" + _spent(self.path / LEDGER, training.privacy.noise_source)
                )
            circumstances = Circumstances(training, self.same)
            state = load_checkpoint(checkpoint, training.device, str(circumstances))
            if _shapes(state) != _shapes(training.init()):
                raise RunError(f"{str(checkpoint)!r} holds tensors of another model: start the run again")
            if training.personal is not None:
                load_personal(checkpoint, state.round_index, training.personal)
            _rewrite(self.path / LEDGER, _whole_lines(self.path / LEDGER))
            written = Ledger.read(self.path / LEDGER)
            if set(written.events) - {training.algorithm.event, *training.preprocessing.events}:
                raise RunError(
                    f"{str(self.path / LEDGER)!r} holds rounds of another run: restore it, or start a new run"
                )
            charged = max(state.ledger, written, key=lambda ledger: ledger.rounds)
            _rewrite(self.path / LEDGER, _ledger_lines(charged))
            _rewrite(self.path / METRICS, _metrics_before(self.path / METRICS, state.round_index))
            self.facts = _stored_facts(self.path / SETTINGS) if self.facts is None else self.facts
            self._open(training, state, lock, charged, circumstances)
            self._reopened = True
            on_error.pop_all()
        return replace(state, ledger=charged) if training.privacy.noise_source == "system" else state

    def on_release(self, state: TrainState) -> None:
        """A line of the ledger, before anything else is done with the round."""
        if state.ledger.rounds > self.charged.rounds:
            _append(self.path / LEDGER, ledger_line(state.ledger.releases - 1, state.ledger.entries[-1][0]))
            self.charged = state.ledger

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """A line of metrics, perhaps a checkpoint."""
        assert self._training is not None, "on_start comes first"
        _append(self.path / METRICS, json.dumps(round_json(report, self.unprivate_timing)))
        due = bool(report.metrics) or state.round_index % self.checkpoint_every == 0
        if due or self._training.privacy.noise_source == "system":
            assert self._checkpoints is not None
            self._checkpoints.write(state, str(self._circumstances), self._training.personal)
            if self._training.privacy.noise_source == "system":
                self._checkpoints.flush()

    def on_end(self, result: TrainResult) -> None:
        """The model and the curves; the checkpoint stays only where there are rounds to resume.

        Both are given the result's guarantee, which covers everything the ledger holds, perhaps more than this state
        has seen. The model's metadata have what `clipline.load` needs.
        """
        assert self._training is not None, "on_start comes first"
        assert self._checkpoints is not None
        self._checkpoints.flush()
        guarantee, facts = result.guarantee, self.facts or {}
        card = card_of(result, facts=facts, task=self.task)
        save_model(self.path / MODEL, result.model, {**facts, **card_metadata(card)})
        rounds = [json.loads(line) for line in (self.path / METRICS).read_text(encoding="utf-8").splitlines()]
        if result.reports and rounds:  # of a run that was stopped, the last round was measured and accounted after it
            last = round_json(result.reports[-1], self.unprivate_timing)
            if last != rounds[-1]:
                rounds[-1] = last
                _rewrite(self.path / METRICS, [json.dumps(line) + "\n" for line in rounds])
        if rounds:
            draw_curves(
                self.path / CURVES,
                rounds,
                guarantee,
                metric=self.metric,
                quantile=quantile_of(self._training),
                title=", ".join(
                    f"{name} {value}"
                    for name, value in facts.items()
                    if name not in ("measured_on", "metric", "baseline", LOWER, HIGHER)
                ),
                measured_on=facts.get("measured_on", ""),
            )
        if result.stopped == "interrupted":
            personal = self._training.personal
            save_checkpoint(self.path / CHECKPOINT, result.state, str(self._circumstances), personal)
        else:
            for left in (self.path / CHECKPOINT, partial_path(self.path / CHECKPOINT)):
                left.unlink(missing_ok=True)

    def close(self) -> None:
        """Let other processes use the folder, once the last checkpoint is written. Nothing is written afterwards."""
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._lock is not None:
            self._lock.close()
        self._lock = self._training = self._checkpoints = None

    def _take_lock(self) -> DirectoryLock:
        """The lock that was handed in, or a new one; not kept here, so that a refused run closes it for good."""
        lock, self._lock = self._lock or DirectoryLock(self.path), None
        return lock

    def _open(
        self, training: Training, state: TrainState, lock: DirectoryLock, charged: Ledger, circumstances: Circumstances
    ) -> None:
        self._training, self._next_round, self._circumstances = training, state.round_index, circumstances
        self._reopened = False
        self._lock, self.charged = lock, charged
        self._checkpoints = CheckpointWriter(self.path / CHECKPOINT)

    def _write_settings(self, training: Training) -> None:
        text = self.settings
        if text is None:
            tables = describe(training)
            tables["facts"] = self.facts or None
            text = to_toml(tables)
        else:  # settings of the caller's own have no place for facts
            facts = {f"facts.{' '.join(name.split())}": value for name, value in (self.facts or {}).items()}
            text += _comments("What it is about", facts)
        text += resolved_comments(training) + _comments("Where it ran", where_it_ran(training))
        (self.path / SETTINGS).touch(mode=0o600)  # it holds the seed, by which the noise can be subtracted
        (self.path / SETTINGS).write_text(text, encoding="utf-8")


def checked_path(path: str | Path, name: str = "path") -> Path:
    """The path of a folder; what is no path is refused, and so is the empty one, which would be the current folder."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise refuse(name, path, "the path of a folder", "give RunDirectory('runs/rides'), say")
    return Path(path)


def check_free(path: Path, name: str = "path") -> None:
    """Refuse a run directory that holds anything already or cannot be made; make nothing.

    `name` is what the caller calls it.
    """
    above = next(one for one in (path, *path.absolute().parents) if one.exists())
    if above != path and not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        way_out = "give a folder of your own"
        raise RunError(f"{name}={str(path)!r} cannot be made, as nothing can be written into {str(above)!r}: {way_out}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunError(
            f"{name}={str(path)!r} must be a folder that is new or empty, and it holds files: give another, or "
            "resume the run that is there"
        )


def directory_first(path: str | Path, callbacks: Iterable[Callback]) -> tuple[RunDirectory, list[Callback]]:
    """The run directory of this folder, from the callbacks or made now, and all callbacks with it as the first."""
    callbacks = list(callbacks)
    for callback in callbacks:
        if isinstance(callback, RunDirectory) and callback.path.resolve() == Path(path).resolve():
            return callback, [callback, *(other for other in callbacks if other is not callback)]
    directory = RunDirectory(path)
    return directory, [directory, *callbacks]


def resolved_comments(training: Training) -> str:
    """What followed from the settings, as TOML comments: for the reader, not to be set twice."""
    return _comments("Resolved when the run began", resolved(training))


def _comments(title: str, values: Mapping[str, object]) -> str:
    """Values as TOML comments, a line each; nothing if there are none."""
    lines = "".join(f"# {name} = {value!r}\n" for name, value in values.items())
    return f"\n# {title}:\n{lines}" if lines else ""


def _stored_facts(path: Path) -> dict[str, str]:
    """The facts that a run was started with, of a settings file that `RunDirectory` has written itself."""
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8")).get("facts", {}) if path.exists() else {}
    except (ValueError, RecursionError, OSError) as error:
        raise RunError(f"{str(path)!r} cannot be read as TOML ({error}): restore it, or give the facts again") from None
    return {name: str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}


def _shapes(state: TrainState) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = {"params": state.params, **{f"server.{name}": tensor for name, tensor in state.server.items()}}
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _ledger_lines(ledger: Ledger) -> list[str]:
    return [ledger_line(index, event) + "\n" for index, event in enumerate(ledger)]


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def _spent(ledger: Path, noise_source: str | None) -> str:
    """What to do about the rounds of a run that cannot be resumed: they were released, whoever starts again."""
    rounds = len(_whole_lines(ledger))
    if not rounds:
        return ""
    if noise_source == "seed":
        return (
            ", with the same seed and all else as it was, which releases the same; otherwise the "
            f"{rounds} rounds in its ledger add to the new run's"
        )
    return f"; the {rounds} rounds in its ledger were released and add to the new run's"


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
    """Write all of a file at once: a crash leaves the old one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text("".join(lines), encoding="utf-8")
    partial.replace(path)
