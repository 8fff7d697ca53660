"""The folder of a study: a record of every run that has ended, and claims on those that are being made."""

from __future__ import annotations

import csv
import json
import os
import re
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from .. import registry
from ..errors import RunError
from ..training import durable
from .record import ID_DIGITS, RunRecord

# How a point or line is drawn: its place among so many that have an order, the line that others are compared with, what
# is beside the point, or the number of a colour that has no order.
Look = tuple[int, int] | Literal["accent", "plain"] | int


@dataclass(frozen=True)
class Point:
    """One number of a figure, with an interval if there is one, and the runs behind it."""

    x: int  # place on the axis
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    runs: str = ""
    look: Look | None = None  # that of its line if None


@dataclass(frozen=True)
class Figure:
    """A chart with named places on the x axis; without lines it is a table only."""

    name: str
    task: str
    title: str
    metric: str
    x_label: str = ""
    ticks: tuple[str, ...] = ()
    lines: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    looks: tuple[Look, ...] = ()  # of the lines
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    rows_in_file: int = 0
    lower_is_better: bool = False


@dataclass(frozen=True)
class Examined:
    """What the experiments of one kind come to, computed again from the records of a study."""

    findings: Mapping[str, Sequence[str]] = field(default_factory=dict)  # of each that is finished, in sentences
    verdicts: Sequence[str] = ()  # what they conclude, a sentence each
    figures: Sequence[Figure] = ()  # for the report
    problems: Sequence[str] = ()  # where tables in the folder are not what the records give, a sentence each
    without_tables: Sequence[str] = ()  # experiments without one, so that only their runs can be checked


@runtime_checkable
class ExperimentKind(Protocol):
    """A kind of experiments, registered under the entry point group `clipline.experiments`. A module may be one.

    The name of the entry point is what `study.json` has as the `kind` of each experiment.
    """

    def examine(self, directory: StudyDirectory) -> Examined:
        """Compute the experiments of this kind again. An experiment that is not finished is no problem."""
        ...


def experiment_kinds() -> dict[str, ExperimentKind]:
    """All kinds by name. Warns of those that cannot be used, and leaves them out."""
    return registry.all_registered("experiments", ExperimentKind)  # type: ignore[type-abstract]


try:
    import fcntl
except ImportError:  # as on Windows
    fcntl = None  # type: ignore[assignment]


class UnclaimedWarning(UserWarning):
    """Runs cannot be claimed here: nothing keeps two processes from making the same run."""


class Claims:
    """Runs that this process alone is to make, until they are released.

    The system holds each claim as a lock on the file `<id>.lock`, and frees it when the process ends, however it ends.
    The file stays and means nothing by itself. Processes that multiprocessing forks, as workers are, drop the claims
    when they begin: else they would hold them after their parent was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}  # id -> descriptor
        register_after_fork(self, Claims.release)

    @property
    def ids(self) -> list[str]:
        """What is claimed now, in the order of claiming."""
        return list(self._held)

    def take(self, run: str) -> bool:
        """Claim this run; False if another process, or another object of this one, has it."""
        if run in self._held:
            return True
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / f"{run}.lock", os.O_RDWR | os.O_CREAT, 0o666)
        if not _lock(descriptor):
            os.close(descriptor)
            return False
        self._held[run] = descriptor
        return True

    def release(self, runs: Iterable[str] | None = None) -> None:
        """Let others have these runs, or all. In a forked copy the claims stay with the parent."""
        for run in self.ids if runs is None else list(runs):
            if run in self._held:
                os.close(self._held.pop(run))

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def claimed_elsewhere(folder: Path) -> set[str]:
    """The runs that some process has claimed now. Looking shares each free lock for a moment."""
    found = set()
    for path in folder.glob("*.lock"):
        with path.open("rb") as file:  # to read: the folder may be a colleague's
            if not _lock(file.fileno(), shared=True):
                found.add(path.stem)
    return found


def _lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether the file could be locked, which it is until it is closed. Without locks a warning says so."""
    try:
        if fcntl is None:
            raise OSError("the system has no such locks")
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        told = f"runs cannot be claimed here ({error}): start no second process in this study"
        warnings.warn(told, UnclaimedWarning, stacklevel=3)
    return True


_ID = re.compile(rf"\b[0-9a-f]{{{ID_DIGITS}}}\b")


def runs_without_record(table: Path, records: Collection[str]) -> list[str]:
    """Rows of a CSV file that name no run, or one that has no record. A table without the column `runs` has none."""
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = [row["runs"] or "" for row in csv.DictReader(file) if "runs" in row]
    except (OSError, ValueError, csv.Error) as error:
        return [f"it cannot be read ({error})"]
    found = list[str]()
    for line, runs in enumerate(rows, start=2):
        named = _ID.findall(runs)
        found += [] if named else [f"line {line} names no run"]
        found += [f"line {line} names run {run}, which has no sound record" for run in named if run not in records]
    return found


FORMAT = 1
STUDY, RUNS, CLAIMS, FAILURES = "study.json", "runs", "claims", "failures"


class StudyDirectory:
    """A folder of runs, each in one file that is written at once: a crash leaves the old file or none.

    `study.json` says which experiments were asked for and which runs they need; `runs/<id>.json` are the records;
    `failures/<id>.json` the last error of runs that failed, until they succeed; `claims/` the locks of processes at
    work. The folder may be copied and moved: nothing in it knows its own place.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"study directory {str(path)!r} must be a folder, and it is a file: give another path")
        self._cache: dict[str, RunRecord] = {}
        self.entries()  # refuses what is no study

    @classmethod
    def existing(cls, path: str | Path) -> StudyDirectory:
        """The study in this folder, which must be there."""
        if not (Path(path) / STUDY).is_file():
            raise RunError(f"{str(path)!r} holds no {STUDY} and so is no study: give the --out of a study")
        return cls(path)

    def entries(self) -> dict[str, Any]:
        """What `study.json` holds: `experiments` (name -> facts) and `asked` (ids of the runs they need)."""
        path = self.path / STUDY
        try:
            entries = json.loads(path.read_text(encoding="utf-8"))
            found = {
                name: kind(entries[name]) for name, kind in (("format", int), ("experiments", dict), ("asked", list))
            }
        except FileNotFoundError:
            return {"format": FORMAT, "experiments": {}, "asked": []}
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise RunError(f"{str(path)!r} is damaged ({error!r}): delete it, the runs are kept") from None
        if found["format"] != FORMAT:
            raise RunError(f"{str(path)!r} must have format {FORMAT}: use the clipline that wrote it")
        return found

    @property
    def experiments(self) -> dict[str, Any]:
        """The experiments that were asked for: name -> facts."""
        experiments: dict[str, Any] = self.entries()["experiments"]
        return experiments

    def note_experiment(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write down that this experiment was asked for, in the place of an earlier one of its name."""
        with self._changing() as entries:
            entries["experiments"][name] = dict(facts)

    def note_asked(self, ids: Iterable[str]) -> None:
        """Write down that these runs are needed, so that others can say how many are missing."""
        wanted = set(ids)
        if not (self.path / STUDY).is_file() or wanted - set(self.entries()["asked"]):
            with self._changing() as entries:
                entries["asked"] = sorted(wanted | set(entries["asked"]))

    def ids(self) -> list[str]:
        """The runs that have ended."""
        return sorted(path.stem for path in (self.path / RUNS).glob("*.json") if len(path.stem) == ID_DIGITS)

    def record(self, run: str) -> RunRecord | None:
        """The record of this run, None if it has not ended; refused where the file is damaged or cannot be read."""
        if run not in self._cache:
            path = self.path / RUNS / f"{run}.json"
            try:
                text = path.read_text(encoding="utf-8", errors="replace")
            except FileNotFoundError:
                return None
            except OSError as error:
                way_out = "mend its place, or delete it, and the run is made again"
                raise RunError(f"{str(path)!r} cannot be read ({error.strerror or error}): {way_out}") from None
            record = RunRecord.from_json(text, repr(str(path)))
            if record.id != run:
                raise RunError(f"{str(path)!r} holds the run {record.id}: rename it to {record.id}.json")
            self._cache[run] = record
        return self._cache[run]

    def records(self) -> list[RunRecord]:
        """All records, by id."""
        found = (self.record(run) for run in self.ids())
        return [record for record in found if record is not None]

    def add(self, record: RunRecord) -> None:
        """Write a record. One that is there already stays: the same run gives the same numbers."""
        if self.record(record.id) is None:
            self._write(self.path / RUNS / f"{record.id}.json", record.to_json())
        (self.path / FAILURES / f"{record.id}.json").unlink(missing_ok=True)

    def note_failure(self, run: str, what: str, error: str) -> None:
        """Write down that a run failed. It counts as missing all the same."""
        self._write(self.path / FAILURES / f"{run}.json", json.dumps({"id": run, "what": what, "error": error}) + "\n")

    def failures(self) -> dict[str, dict[str, str]]:
        """The last error of every run that failed and has no record: id -> what, error."""
        found = {}
        for path in sorted((self.path / FAILURES).glob("*.json")):
            try:
                failure = json.loads(path.read_text(encoding="utf-8"))
                found[path.stem] = {"what": str(failure["what"]), "error": str(failure["error"])}
            except (OSError, ValueError, TypeError, KeyError, RecursionError):  # gone or damaged: only a message
                continue
        return {run: failure for run, failure in found.items() if not (self.path / RUNS / f"{run}.json").exists()}

    def claims(self) -> Claims:
        """An object that claims runs of this study, as a context: leaving it releases all."""
        return Claims(self.path / CLAIMS)

    def claimed(self) -> set[str]:
        """The runs that some process is making now."""
        return {run for run in claimed_elsewhere(self.path / CLAIMS) if len(run) == ID_DIGITS}

    def merge(self, other: StudyDirectory) -> int:
        """Take over the records and experiments of another study; gives how many records are new here.

        A damaged record of the other is refused, after all others were taken. Nothing of the other is changed.
        """
        before, damaged = set(self.ids()), list[str]()
        for run in other.ids():
            try:
                record = other.record(run)
            except RunError as error:
                damaged.append(str(error))
                continue
            if record is not None and run not in before:
                self.add(record)
        theirs = other.entries()
        with self._changing() as entries:
            entries["experiments"] = {**theirs["experiments"], **entries["experiments"]}
            entries["asked"] = sorted({*theirs["asked"], *entries["asked"]})
        if damaged:
            raise RunError("; ".join(damaged))
        return len(set(self.ids()) - before)

    def check(self) -> list[str]:
        """What is wrong with the runs of this study, a sentence each.

        Every record must be what its identity says, and every run that a table names must be there.
        """
        problems, good = list[str](), set[str]()
        self._cache.clear()  # files are read again, whatever was read before
        for run in self.ids():
            try:
                record = self.record(run)
            except RunError as error:
                problems.append(str(error))
                continue
            good |= set() if record is None else {run}
        for table in sorted(self.path.glob("*.csv")):
            problems += [f"{table.name}: {one}" for one in runs_without_record(table, good)]
        return problems

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Any]]:
        """The entries of `study.json`, written back on leaving; other processes wait."""
        self.path.mkdir(parents=True, exist_ok=True)
        with self.claims() as claims:
            while not claims.take("study"):
                time.sleep(0.02)
            entries = self.entries()
            yield entries
            self._write(self.path / STUDY, json.dumps(entries, indent=1) + "\n")

    def _write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, text)
