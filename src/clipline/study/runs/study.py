"""A study: ask for runs, get their records. What is there is read, what is missing is run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...engine.choose import SMALL_MODEL
from ...errors import CliplineError, check_whole, refuse
from ...tasks.settings import TrainSettings
from ...tasks.task import LoadedTask, Task
from .claims import Claims
from .data_checksum import data_checksum
from .directory import StudyDirectory
from .group import Failure, data_key, group_size, run_group, shape_key
from .record import RunRecord, RunSpec, identity_of
from .recording import PlannedRun

_POLL_SECONDS = 0.2  # how often to look for what another process makes


class FailedRunsError(CliplineError, RuntimeError):
    """Some runs of a study ended with an error; all others were made and are kept."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        named = "; ".join(
            f"run {failure.run.id} ({describe(failure.run.parts)}): {failure.error}" for failure in failures
        )
        super().__init__(f"{len(failures)} of the runs failed and the others are kept: {named}")


class Study:
    """Runs of one task, kept in a directory: an interrupted, extended or merged study repeats nothing.

    Several processes may work on one directory, each with a `Study` of its own: none makes a run that another has or
    is making. `side_by_side` limits how many runs train as one program; left out, what fits memory and gains speed.

        study = Study("studies/first", task_named("handwriting"))
        records = study.results([RunSpec(replace(base, seed=seed)) for seed in range(20)])
    """

    def __init__(
        self,
        directory: StudyDirectory | str | Path,
        task: Task,
        *,
        cluster: str | None = None,
        progress: Any = None,
        side_by_side: int | None = None,
    ) -> None:
        self.directory = directory if isinstance(directory, StudyDirectory) else StudyDirectory(directory)
        self.task = task
        self._side_by_side = side_by_side
        if side_by_side is not None:
            check_whole("side_by_side", side_by_side, at_least=1, way_out="1 makes one run after the other")
        self._loaded: tuple[Any, LoadedTask] | None = None
        self._checksums: dict[str | None, str] = {}

    def results(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order; those that are missing are made, or waited for if another makes them.

        If some fail, a `FailedRunsError` names them once all others have ended.
        """
        planned = [self.planned(spec) for spec in specs]
        wanted = {run.id: run for run in planned}
        self.directory.note_asked(wanted)
        failures: dict[str, Failure] = {}
        with self.directory.claims() as claims:
            while missing := [run for run in wanted.values() if run.id not in failures and not self._done(run)]:
                group = self._claimed_group(claims, missing)
                if not group:
                    time.sleep(_POLL_SECONDS)
                    continue
                for failure in self._make(group):
                    failures[failure.run.id] = failure
                    self.directory.note_failure(failure.run.id, describe(failure.run.parts), failure.trace)
                claims.release()
        if failures:
            raise FailedRunsError(list(failures.values()))
        records = [self.directory.record(run.id) for run in planned]
        return [record for record in records if record is not None]

    def planned(self, spec: RunSpec) -> PlannedRun:
        """The run with its identity; refused where it is one of another task."""
        if spec.settings.task != self.task.settings.task:
            raise refuse(
                "task", spec.settings.task, f"{self.task.settings.task!r}, the task of this study", "change it"
            )
        data = spec.settings.data
        if data not in self._checksums:
            self._checksums[data] = data_checksum(spec.settings)
        parts = spec.parts(self._checksums[data], self.task.code)
        return PlannedRun(spec, identity_of(parts), parts)

    def _done(self, run: PlannedRun) -> bool:
        return self.directory.record(run.id) is not None

    def _claimed_group(self, claims: Claims, missing: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Runs of one shape that are claimed now, as many as go side by side; none if others have claimed all."""
        group: list[PlannedRun] = []
        for run in missing:
            if group and shape_key(run.spec) != shape_key(group[0].spec):
                continue
            if not claims.take(run.id):
                continue
            if self._done(run):  # another has ended it since we looked
                claims.release([run.id])
                continue
            group.append(run)
            if len(group) >= self._most(group[0].spec.settings):
                break
        return group

    def _most(self, settings: TrainSettings) -> int:
        return self._side_by_side or group_size(settings, self._load(settings))

    def _make(self, group: Sequence[PlannedRun]) -> list[Failure]:
        loaded = self._load(group[0].spec.settings)
        with _threads_for(loaded, group[0].spec.settings):
            return run_group(self.task, loaded, group, self.directory.add)

    def _load(self, settings: TrainSettings) -> LoadedTask:
        """The task's data, loaded once for all runs that share them."""
        key = data_key(settings)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # before the next is loaded: memory for one is enough
            settings.compute().check_device()
            self._loaded = key, self.task.load(settings)
        return self._loaded[1]


def describe(parts: Mapping[str, Any]) -> str:
    """A run in a few words, for people."""
    settings = parts["settings"]
    clip = f"quantile {settings['quantile']:g}" if settings["clip"] == "quantile" else f"clip {settings['clip']}"
    noise = f"epsilon {settings['epsilon']:g}" if "epsilon" in settings else f"noise {settings['noise_multiplier']:g}"
    rates = f"rates {settings['client_lr']:.3g} and {settings['server_lr']:.3g}"
    return f"{parts['task']}, {clip}, {noise}, {rates}, seed {settings['seed']}"


@contextmanager
def _threads_for(loaded: LoadedTask, settings: TrainSettings) -> Iterator[None]:
    """One thread for a small model, whose operations are too short to share; as before on leaving."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in loaded.make(settings.seed).parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
