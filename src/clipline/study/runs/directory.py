"""The folder of a study: a record of every run that has ended, and claims on those that are being made."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import RunError
from ...training import durable
from .check import contradictions, runs_without_record
from .claims import Claims, claimed_elsewhere
from .record import ID_DIGITS, RunRecord

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
        try:
            entries = json.loads((self.path / STUDY).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {"format": FORMAT, "experiments": {}, "asked": []}
        except (ValueError, RecursionError) as error:
            raise RunError(f"{str(self.path / STUDY)!r} is damaged ({error}): delete it, the runs are kept") from None
        if not isinstance(entries, dict) or entries.get("format") != FORMAT:
            raise RunError(f"{str(self.path / STUDY)!r} must have format {FORMAT}: use the clipline that wrote it")
        experiments, asked = entries.get("experiments"), entries.get("asked")
        if not isinstance(experiments, dict) or not isinstance(asked, list) or not all(map(_is_id, asked)):
            what = "it must hold experiments by name and ids of runs"
            raise RunError(f"{str(self.path / STUDY)!r} is damaged ({what}): delete it, the runs are kept")
        return entries

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

    def check(self, tables: Iterable[Callable[[StudyDirectory], list[str]]] = ()) -> list[str]:
        """What is wrong with this study, a sentence each; nothing if every number in it stands.

        Every record must be what its identity says, and every run that a table names must be there. `tables` compute
        tables anew from the records and say where the files differ.
        """
        problems, fresh = list[str](), StudyDirectory(self.path)  # files are read again, whatever was read before
        good = set[str]()
        for run in fresh.ids():
            try:
                record = fresh.record(run)
            except RunError as error:
                problems.append(str(error))
                continue
            if record is not None:
                problems += [f"run {run}: {one}" for one in contradictions(record)]
                good.add(run)
        for table in sorted(self.path.glob("*.csv")):
            problems += [f"{table.name}: {one}" for one in runs_without_record(table, good)]
        for table_problems in tables:
            problems += table_problems(fresh)
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
        """Write all of a file at once, and have it on the disk before it gets its name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(prefix=".", suffix=".partial", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                durable.sync(file, path)
            Path(partial).chmod(0o644)
            durable.put(Path(partial), path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise


def _is_id(run: object) -> bool:
    return isinstance(run, str) and len(run) == ID_DIGITS
