"""A study: ask for runs, get their records. What is there is read, what is missing is run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import QUIET_SECONDS, Bar, clock, tell
from ..errors import CliplineError, check_whole, refuse
from ..tasks.task import Task
from ..tasks.train_settings import TrainSettings
from .directory import Claims, StudyDirectory
from .execution import Failure, LocalExecutor, PlannedRun, shape_key
from .record import RunRecord, RunSpec, data_checksum, identity_of

if TYPE_CHECKING:
    from .cluster import ClusterExecutor

_POLL_SECONDS = 0.2  # how often to look for what another process makes
_ENDED_SECONDS = 1.0  # without a terminal, between the lines for runs that end
_WHOLE = 1000  # how long a stage is on the bar
_MOST_CLAIMED = 512  # runs at a time, on a large cluster: every claim is an open file


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
        progress: StudyProgress | None = None,
        side_by_side: int | None = None,
    ) -> None:
        self.directory = directory if isinstance(directory, StudyDirectory) else StudyDirectory(directory)
        self.task = task
        self.progress = StudyProgress(shown=False) if progress is None else progress
        self._side_by_side = side_by_side
        if side_by_side is not None:
            check_whole("side_by_side", side_by_side, at_least=1, way_out="1 makes one run after the other")
        self._checksums: dict[str | None, str] = {}
        self._executor: LocalExecutor | ClusterExecutor
        if cluster is None:
            self._executor = LocalExecutor(task, self._add, self.progress.round)
        else:
            from .cluster import ClusterExecutor

            self._executor = ClusterExecutor(task, self._add, self.progress.round, cluster)

    def results(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order; those that are missing are made, or waited for if another makes them.

        If some fail, a `FailedRunsError` names them once all others have ended. Ctrl-C raises KeyboardInterrupt, and
        what has ended is kept.
        """
        planned = [self.planned(spec) for spec in specs]
        wanted = {run.id: run for run in planned}
        self.directory.note_asked(wanted)
        done = [run.id for run in wanted.values() if self._done(run)]
        self.progress.begin({run.id: run.spec.settings.rounds for run in wanted.values()}, done)
        try:
            failures = self._make([run for run in wanted.values() if run.id not in done])
        finally:
            self.progress.close()
        if failures:
            raise FailedRunsError(failures)
        records = [self.directory.record(run.id) for run in planned]
        return [record for record in records if record is not None]

    def close(self) -> None:
        """Leave the cluster, if there is one."""
        self._executor.close()

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

    def _make(self, missing: list[PlannedRun]) -> list[Failure]:
        """Make all of these, or wait until another process has; give those that failed here."""
        failures: list[Failure] = []
        running: set[str] = set()
        with self.directory.claims() as claims:
            try:
                while missing or running:
                    while len(running) < min(len(missing), _MOST_CLAIMED) and self._executor.free_slots() > 0:
                        group = self._claimed_group(claims, [run for run in missing if run.id not in running])
                        if not group:
                            break
                        running |= {run.id for run in group}
                        self.progress.start(run.id for run in group)
                        self._executor.start(group)
                    if not running:
                        self.progress.wait(len(missing))
                        time.sleep(_POLL_SECONDS)
                    for made, failed in self._executor.wait() if running else ():
                        running -= {run.id for run in made}
                        for failure in failed:
                            self._note(failure)
                        failures += failed
                        claims.release(run.id for run in made)
                    lost = {failure.run.id for failure in failures}
                    ended = {run.id for run in missing if run.id not in running and self._done(run)}
                    self.progress.end(ended)
                    missing = [run for run in missing if run.id not in ended | lost]
            except BaseException:
                self._executor.close()
                raise
        return failures

    def _claimed_group(self, claims: Claims, missing: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Runs of one shape that are claimed now, as many as go side by side; none if others have claimed all."""
        group: list[PlannedRun] = []
        most = 1
        for run in missing:
            if group and shape_key(run.spec) != shape_key(group[0].spec):
                continue
            if not claims.take(run.id):
                continue
            if self._done(run):  # another has ended it since we looked
                claims.release([run.id])
                continue
            group.append(run)
            most = self._most(run.spec.settings, len(missing)) if len(group) == 1 else most
            if len(group) >= most:
                break
        return group

    def _most(self, settings: TrainSettings, left: int) -> int:
        """As many as asked for or as gain speed, but so that every free slot gets some."""
        most = self._side_by_side or self._executor.most(settings)
        return max(1, min(most, -(-left // max(1, self._executor.free_slots()))))

    def _done(self, run: PlannedRun) -> bool:
        return self.directory.record(run.id) is not None

    def _add(self, record: RunRecord) -> None:
        self.directory.add(record)
        self.progress.end([record.id])

    def _note(self, failure: Failure) -> None:
        what = describe(failure.run.parts)
        self.directory.note_failure(failure.run.id, what, failure.trace)
        self.progress.fail(what, failure.run.id, failure.error)


def describe(parts: Mapping[str, Any]) -> str:
    """A run in a few words, for people."""
    settings = parts["settings"]
    clip = f"quantile {settings['quantile']:g}" if settings["clip"] == "quantile" else f"clip {settings['clip']}"
    noise = f"epsilon {settings['epsilon']:g}" if "epsilon" in settings else f"noise {settings['noise_multiplier']:g}"
    server = f"{settings['server_lr']:.3g}" if "server_lr" in settings else "the server's own"
    rates = f"rates {settings['client_lr']:.3g} and {server}"
    return f"{parts['task']}, {clip}, {noise}, {rates}, seed {settings['seed']}"


class StudyProgress:
    """Shows on standard error how many runs are done, running and failed, and the time left.

    On a terminal one bar is updated in place. Elsewhere, as in a log file, a line is printed when runs have ended, at
    most one a second, and every ten seconds otherwise. `label` says what is being done. With `stages` the bar is that
    of all of them; they begin at `first`, and `by_call` each `Study.results` is one. How long runs take depends on
    which users are drawn: the guarantee does not cover it. One that is not `shown` prints nothing.
    """

    def __init__(
        self, label: str = "", stages: Sequence[str] = (), first: int = 0, *, by_call: bool = False, shown: bool = True
    ) -> None:
        self.label, self.shown, self.stages, self._stage, self._by_call = label, shown, stages, first - 1, by_call
        self._bar: Bar | None = None
        self._asked, self._share = 0, 0.0  # rounds to train in this stage, and the share of them that is done
        self.begin({}, ())

    def next_stage(self) -> None:
        """Go on to the next stage; after the last one it stays there."""
        self._stage = min(self._stage + 1, len(self.stages) - 1)
        self._asked, self._share = 0, 0.0

    def begin(self, rounds: Mapping[str, int], done: Iterable[str]) -> None:
        """These runs are asked for (id -> rounds), of which some are `done` already."""
        if rounds and self._by_call:
            self.next_stage()
        ended = set(done)
        self._left = {run: count for run, count in rounds.items() if run not in ended}  # rounds to train
        self._asked += sum(self._left.values())
        self._total, self._running, self._failed = len(rounds), set[str](), 0
        self._elsewhere = 0  # runs that another process makes, while there is nothing to do here
        self._begun: float | None = None  # when the first round ended: what came before, such as loading, comes once
        self._trained = 0  # rounds since then
        if self.shown and rounds:
            self._bar = Bar(_WHOLE * max(1, len(self.stages)), transient=True)
            self._show(0.0)

    def start(self, ids: Iterable[str]) -> None:
        """Count these as running."""
        self._running |= set(ids)
        self._elsewhere = 0
        self._show()

    def round(self, run: str) -> None:
        """Count one round."""
        if self._begun is None:
            self._begun = time.perf_counter()
        else:
            self._trained += 1
        self._left[run] = max(0, self._left.get(run, 0) - 1)
        self._show()

    def wait(self, count: int) -> None:
        """Another process makes the last `count` runs: said at once, then every ten seconds."""
        first, self._elsewhere = not self._elsewhere, count
        self._show(0.0 if first else QUIET_SECONDS)

    def end(self, ids: Iterable[str]) -> None:
        """Count these as done."""
        if ended := [run for run in ids if run in self._left]:
            for run in ended:
                self._drop(run)
            self._elsewhere = min(self._elsewhere, len(self._left))
            self._show(_ENDED_SECONDS if self._left else 0.0)

    def fail(self, what: str, run: str, error: str) -> None:
        """Count this one as failed, and say why at once."""
        self._drop(run)
        self._failed += 1
        if self.shown:
            tell(f"run {run} ({what}) failed: {error}")

    def close(self) -> None:
        """Leave the terminal as it was, below a last line."""
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def words(self, now: float) -> tuple[str, str, str]:
        """What stands before the bar, after it and below it. Time left is told once there is a speed to tell it by."""
        stage = f"{self._stage + 1} of {len(self.stages)}: {self.stages[self._stage]}" if self.stages else ""
        left, tail = sum(self._left.values()), ""
        if self._begun is not None and self._trained and now - self._begun >= 1.0 and not self._elsewhere:
            tail = f"{clock(left * (now - self._begun) / self._trained)} left" + " here" * (len(self.stages) > 1)
        runs = [f"runs {self._total - len(self._left) - self._failed}/{self._total} done"]
        runs += [f"{len(self._running)} running"]
        runs += [f"{self._failed} failed"] if self._failed else []
        runs += [f"waiting for {self._elsewhere} of another process"] if self._elsewhere else []
        return ", ".join(filter(None, (self.label, stage))), tail, "  ".join(runs)

    def _drop(self, run: str) -> None:
        self._left.pop(run, None)
        self._running.discard(run)

    def _show(self, quiet: float = QUIET_SECONDS) -> None:
        if self._bar is not None:
            self._share = max(self._share, 1 - sum(self._left.values()) / max(1, self._asked))
            done = round(_WHOLE * (max(0, self._stage) + self._share))
            self._bar.show(done, *self.words(time.perf_counter()), quiet=quiet)
