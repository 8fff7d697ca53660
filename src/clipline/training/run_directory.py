"""The folder of one run: what was asked, what happened round by round, what was charged, and the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RunError, SettingError, check_whole, refuse, regular
from ..federated.mechanism import BandedMechanism
from ..federated.round import TrainState
from ..metric_direction import HIGHER, LOWER
from ..privacy.ledger import Ledger, ledger_line
from ..settings import toml_text
from . import durable
from .callbacks import Callback
from .checkpoint import CheckpointWriter, Circumstances, code_fingerprint, load_last, load_personal, save_checkpoint
from .curves import draw_curves
from .durable import DirectoryLock
from .model_card import card_metadata, card_of, describe, resolved, save_model, where_it_ran
from .result import RoundReport, round_json
from .run_files import (
    CHECKPOINT,
    CURVES,
    KEY,
    LEDGER,
    METRICS,
    MODEL,
    OLDER,
    SETTINGS,
    can_go_on,
    read_facts,
    read_rounds,
)

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training

# Rounds of a small model take milliseconds, and a sync would be some percent of one: these are charged ahead. How many
# follows from the settings alone, never from a clock, as times tell of users.
_AHEAD, _SHARE = 64, 20  # so many rounds at most, and no more than this part of the run
_KEY_BYTES = 32
_SHORT = 1 << 21  # users of a round times parameters, below which a round may be that short


class RunDirectory(Callback):
    """Writes one run into a folder as it happens, and lets it be resumed.

    A round's line of the ledger is on disk before anything else of it is written, shown or measured: a power cut
    forgets no release. So `Training.run` calls a run directory before other callbacks. Small models, whose rounds are
    short, are charged ahead with one sync: 64 rounds or a twentieth of the run, whichever is less. Lines of rounds that
    never came are taken out when the run ends; after a kill they stay. What cannot be synced ends the run with a
    `RunError`.

    Files hold released numbers only, but for what `unprivate_timing` adds and what a checkpoint needs until the run has
    finished. The folder is locked while the run is at work. Of an unfinished folder and its copy resume one only.

    Args:
      path: A folder that is new or empty; for `Training.resume` that of the interrupted run.
      facts: Name to text, stored with the model and shown in the title of the figure. `measured_on` says whom the
        metrics are about.
      metric: The one to draw, and the first of a report. Left out, it is the first that was measured.
      checkpoint_every: Rounds between two checkpoints. Every round that was evaluated has one too.
      unprivate_timing: Store how long rounds took, which the guarantee does not cover.
      same: Name to value: what else must be the same on a resume, such as a version of your loss.
      settings: TOML to store in the place of a description of the training.
      task: How `clipline.load` finds the model's code.
      lock: A lock on the folder that the caller has taken.

    Raises:
      SettingError: If `path` is not a path.
      RunError: At the start, if the folder has something in it or is in use.

    Example:
      >>> training.run([cl.RunDirectory("runs/rides"), cl.StopOnInterrupt()])
    """

    _training: Training  # from `_open` to `close`, and the next two
    _checkpoints: CheckpointWriter
    _circumstances: Circumstances

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
        self.rounds_before: list[dict[str, Any]] = []  # lines of metrics.jsonl before a resume
        self.charged = Ledger()  # everything that was ever written to ledger.jsonl
        self._lock = lock
        self._is_open = False
        self._stored: TrainState | None = None  # the last that the folder goes on from or to
        self._reopened = False
        self._resumable = False  # whether a checkpoint of this run is on disk
        self._written, self._block, self._until = 0, 1, 0  # releases in the file; rounds a sync; rounds of the budget
        self._bytes = 0  # of the ledger's file

    def on_start(self, training: Training, state: TrainState) -> None:
        """Make the folder, lock it and write the settings; after `reopen`, go on in the one that is open."""
        if self._is_open and self._reopened and self._training is training and state.round_index == self._next_round:
            self._reopened = False  # one run goes on in it, and no other
            return
        if self._is_open:
            raise SettingError(
                f"RunDirectory({str(self.path)!r}) is open for another run or another state but serves one: make one "
                "for each run"
            )
        check_free(self.path)
        durable.make_folder(self.path)
        with ExitStack() as on_error:
            lock = on_error.enter_context(self._take_lock())
            check_free(self.path)  # again: another process may have written and ended meanwhile
            durable.write(self.path / SETTINGS, self._settings_text(training), mode=0o600)  # it holds the seed
            durable.write(self.path / METRICS, "")
            self._write_ledger(state.ledger)
            self._write_key(training, state.ledger)
            self._open(training, state, lock, state.ledger, Circumstances(training, self.same))
            self._begin_to_store(state)  # so that every run can be resumed
            on_error.pop_all()

    def reopen(self, training: Training) -> TrainState:
        """Open an interrupted run and give its last checkpoint; refused where the circumstances have changed.

        Rounds after the checkpoint are run again. From the same seed or key they release the same numbers: their lines
        in the ledger stay and count once. Without the key, and on a GPU without a seed, noise and cohorts differ: there
        a round that is run again is one more round. Either way nothing that was ever charged is forgotten.
        """
        with ExitStack() as on_error:
            lock = on_error.enter_context(self._take_lock())
            checkpoint = self.path / CHECKPOINT
            self._remove_cut_writes()
            if not can_go_on(self.path):
                if (self.path / MODEL).is_file():
                    raise RunError(
                        f"resume={str(self.path)!r} is a finished run, with nothing to go on with: clipline.load reads "
                        "its model; start another to train again"
                    )
                raise RunError(
                    f"resume={str(self.path)!r} holds no {CHECKPOINT}",
                    f"start again in another folder, and add the rounds in {LEDGER}, if any: they were released",
                )
            circumstances = Circumstances(training, self.same)
            state = load_last(checkpoint, training.device, str(circumstances))
            if state.noise is not None:  # the circumstances are the same, and so are rounds, bands and groups
                state.noise.made_by = training.algorithm.mechanism
            if _shapes(state) != _shapes(training.init()):
                raise RunError(f"{str(checkpoint)!r} holds tensors of another model: start the run again")
            if training.personal is not None:
                load_personal(checkpoint, state.round_index, training.personal)
            file = self.path / LEDGER
            written = Ledger.read(file, unfinished=True) if file.exists() else Ledger()
            if set(written.events) - {training.algorithm.event, *training.preprocessing.events}:
                raise RunError(f"{str(file)!r} holds rounds of another run: restore it, or start a new run")
            known = [one for one in read_rounds(self.path / METRICS) if one["round"] < training.rounds]
            after = max([0, *(one["round"] + 1 - state.round_index for one in known)])  # rounds after the checkpoint
            seen = state.ledger.add(training.algorithm.next_event(state), after)
            charged = max(seen, written, key=lambda ledger: ledger.rounds)
            charged = charged.with_statistics(training.preprocessing.events)
            self._write_ledger(charged)
            self.rounds_before = [one for one in known if one["round"] < state.round_index]
            durable.write(self.path / METRICS, _json_lines(self.rounds_before))
            if self.facts is None:
                self.facts = read_facts(self.path)
            banded = isinstance(training.algorithm.mechanism, BandedMechanism)
            lost = banded and state.noise is None and training.privacy.noise_source == "system"  # its key is of no use
            same = not lost and self._same_draws(training, state.ledger)
            if not same:
                # Other noise after rounds that were released already must not share earlier noise with them.
                noise = None if charged.rounds > state.ledger.rounds else state.noise
                state = replace(state, ledger=charged, noise=noise)
                training.key.renew()
                self._write_key(training, charged)
            self._open(training, state, lock, charged, circumstances)
            if not same:
                self._begin_to_store(state)
            self._reopened, self._stored = True, state
            on_error.pop_all()
        return state

    def _write_key(self, training: Training, charged: Ledger) -> None:
        """Store the key of a run from the system, with the number of rounds that were charged when it was drawn."""
        if training.privacy.noise_source == "system" and training.replays:
            text = f"{training.key.unprivate_bytes.hex()} {charged.rounds} {_rounding(training)}\n"
            durable.write(self.path / KEY, text, mode=0o600)

    def _same_draws(self, training: Training, ledger: Ledger) -> bool:
        """Whether rounds after a state with this ledger draw what they drew before; if by a key, it is put in place.

        A state that was stored before the key was drawn belongs to an earlier key, and has fewer rounds charged. Other
        numbers of workers and threads round otherwise, other code computes something else, and the same noise twice
        would show the difference.
        """
        if training.privacy.noise_source == "seed" or not training.replays:
            return training.privacy.noise_source == "seed"
        try:
            digits, rounds, rounding = regular(self.path / KEY).read_text(encoding="ascii").split()
            key, drawn_at = bytes.fromhex(digits), int(rounds)
        except (OSError, ValueError):
            return False
        if len(key) != _KEY_BYTES or ledger.rounds < drawn_at or rounding != _rounding(training):
            return False
        training.key.restore(key)
        return True

    def on_release(self, state: TrainState) -> None:
        """A line of the ledger on disk, before anything else is done with the round; perhaps some of the next too."""
        if self._training.replays:
            self._stored = state  # the file goes on to it, by the same noise
        if not self._resumable:  # nothing is released before the first checkpoint is on disk
            self._checkpoints.flush()
            self._resumable = True
        if state.ledger.rounds <= self.charged.rounds:
            return
        releases, after = state.ledger.releases, state.ledger.next_event
        if releases > self._written:
            ahead = releases + max(0, min(self._block - 1, self._until - state.round_index))
            events = [(index, after.at(after.index + index - releases)) for index in range(releases - 1, ahead)]
            lines = "".join(ledger_line(index, event) + "\n" for index, event in events)
            self._check_ledger()
            durable.append(self.path / LEDGER, lines)
            self._bytes += len(lines.encode())
            self._written = ahead
        self.charged = state.ledger

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """A line of metrics, perhaps a checkpoint."""
        with (self.path / METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(round_json(report, self.unprivate_timing)) + "\n")
        lost = not self._training.replays  # what is run again is charged again
        if lost or report.metrics or state.round_index % self.checkpoint_every == 0:
            self._begin_to_store(state)
        if lost and state.round_index % self._block == 0:
            self._checkpoints.flush()

    def store(self, state: TrainState) -> None:
        """Have this state on disk now, for whoever must not send anything that follows from it before."""
        self._begin_to_store(state)
        self._checkpoints.flush()

    def _begin_to_store(self, state: TrainState) -> None:
        self._checkpoints.write(state, self._circumstances, self._training.personal)
        if not self._training.replays:
            self._stored = state

    def on_end(self, result: TrainResult) -> None:
        """The model and the curves; the checkpoint stays only where there are rounds to resume.

        Both are given the result's guarantee, which covers everything the ledger holds, perhaps more than this state
        has seen. The model's metadata have what `clipline.load` needs.
        """
        self._checkpoints.flush()
        self._check_ledger()
        self._take_back()
        guarantee, facts = result.guarantee, self.facts or {}
        card = card_of(result, facts=facts, task=self.task)
        save_model(self.path / MODEL, result.model, {**facts, **card_metadata(card)})
        rounds = read_rounds(self.path / METRICS)
        if result.reports and rounds:  # of a run that was stopped, the last round was measured and accounted after it
            last = round_json(result.reports[-1], self.unprivate_timing)
            if last != rounds[-1]:
                rounds[-1] = last
                durable.write(self.path / METRICS, _json_lines(rounds))
        if rounds:
            shown = {**facts, "run": "/".join(self.path.resolve().parts[-2:])}
            hidden = ("measured_on", "metric", "baseline", LOWER, HIGHER)
            title = ", ".join(f"{name} {value}" for name, value in shown.items() if name not in hidden)
            path, about = self.path / CURVES, facts.get("measured_on", "")
            draw_curves(path, rounds, guarantee, self._training, metric=self.metric, title=title, measured_on=about)
        durable.sync_file(self.path / METRICS)  # with the model, before the checkpoint goes
        if result.stopped == "interrupted":
            personal = self._training.personal
            save_checkpoint(self.path / CHECKPOINT, result.state, str(self._circumstances), personal)
            self._stored = result.state
        else:
            for name in (KEY, CHECKPOINT, OLDER):
                (self.path / name).unlink(missing_ok=True)
            self._remove_cut_writes()
            durable.sync_folder(self.path)

    def close(self) -> None:
        """Let other processes use the folder, once the last checkpoint is written. Nothing is written afterwards."""
        if self._is_open:
            self._checkpoints.close()
            with suppress(OSError, RunError):  # of a disk that fails: too much is charged, never too little
                self._take_back()
        if self._stored is not None and self._stored.noise is not None:  # it goes on from the file, and there alone
            self._stored.noise.spent = True
        if self._lock is not None:
            self._lock.close()
        if self._is_open:
            del self._training, self._checkpoints, self._circumstances
        self._is_open, self._lock, self._stored = False, None, None

    def _remove_cut_writes(self) -> None:
        """Delete what writes left that a kill cut short: of a checkpoint it is as private as the data."""
        for left in [*self.path.glob("*.partial"), *self.path.glob(".tmp??????")]:  # the latter are safetensors' own
            left.unlink(missing_ok=True)

    def _write_ledger(self, ledger: Ledger) -> None:
        text = "".join(ledger_line(index, event) + "\n" for index, event in enumerate(ledger))
        durable.write(self.path / LEDGER, text)
        self._bytes = len(text.encode())

    def _check_ledger(self) -> None:
        """Refuse to go on where somebody else has written into the ledger, or taken it away."""
        file = self.path / LEDGER
        size = file.stat().st_size if file.is_file() else None
        if size != self._bytes:
            what = "is gone" if size is None else f"has {size:,} bytes, and this run has written {self._bytes:,}"
            raise RunError(
                f"{str(file)!r} was changed under the run: it {what}. {self.charged.rounds} rounds were charged so far",
                "find out what else works in the folder and restore the file, then resume the run",
            )

    def _take_back(self) -> None:
        """Take rounds that were charged ahead and never released out of the ledger."""
        if self._written > self.charged.releases:
            self._check_ledger()
            self._write_ledger(self.charged)
            self._written = self.charged.releases

    def _take_lock(self) -> DirectoryLock:
        """The lock that was handed in, or a new one; not kept here, so that a refused run closes it for good."""
        lock, self._lock = self._lock or DirectoryLock(self.path), None
        return lock

    def _open(
        self, training: Training, state: TrainState, lock: DirectoryLock, charged: Ledger, circumstances: Circumstances
    ) -> None:
        self._training, self._next_round, self._circumstances = training, state.round_index, circumstances
        self._reopened = self._resumable = False
        self._lock, self.charged, self._written = lock, charged, charged.releases
        short = training.cohort_size * training.dim < _SHORT
        self._block = max(1, min(_AHEAD, training.rounds // _SHARE)) if short else 1  # rounds charged with one sync
        left = training.affordable(state) if self._block > 1 else training.rounds - state.round_index
        self._until = state.round_index + left
        self._checkpoints = CheckpointWriter(self.path / CHECKPOINT)
        self._is_open = True

    def _settings_text(self, training: Training) -> str:
        text = self.settings
        if text is None:
            tables = describe(training)
            tables["facts"] = self.facts or None
            text = toml_text(tables)
        else:  # settings of the caller's own have no place for facts
            facts = {f"facts.{' '.join(name.split())}": value for name, value in (self.facts or {}).items()}
            text += _comments("What it is about", facts)
        text += _comments("What its report leads with", {"metric": self.metric} if self.metric else {})
        return text + resolved_comments(training) + _comments("Where it ran", where_it_ran(training))


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
            f"{name}={str(path)!r} must be a folder that is new or empty, and it holds files: give another"
            + (", or resume the run that is there" if can_go_on(path) else "")
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


def _shapes(state: TrainState) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = {"params": state.params, **{f"server.{name}": tensor for name, tensor in state.server.items()}}
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _rounding(training: Training) -> str:
    """What may change a sum without changing anything that a resume is refused for: rounding, and the code."""
    parts = [training.problem.loss, training.algorithm.controller, training.server]
    code = code_fingerprint(*parts, *training.problem.model.module.modules())
    kernels = "with" if torch.backends.mkldnn.enabled else "without"
    return f"{training.workers}-workers-{torch.get_num_threads()}-threads-{kernels}-mkldnn-code-{code}"


def _json_lines(rounds: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(one) + "\n" for one in rounds)
