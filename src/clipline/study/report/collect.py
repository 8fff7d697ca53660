"""Finds the runs and tables in the paths that a report is asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import RunError
from .figures import Figure, read_figures
from .run import ReportedRun
from .run_directory import is_run_directory, read_run_directory
from .study_directory import is_study_directory, read_findings, read_records


@dataclass(frozen=True)
class Collected:
    """All that one report is about."""

    paths: tuple[Path, ...]
    runs: tuple[ReportedRun, ...]
    figures: tuple[Figure, ...] = ()
    problems: tuple[str, ...] = ()
    findings: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of a study's experiments, in words


def collect(paths: Iterable[str | Path]) -> Collected:
    """Read run directories, study directories and folders of these; what is none is refused, with what was looked for.

    A run that was interrupted, or goes on, is read as far as it has come.
    """
    found = tuple(dict.fromkeys(Path(path) for path in paths))
    if not found:
        raise RunError("paths=() must name at least one run: give a run directory or a study directory")
    runs: list[ReportedRun] = []
    figures: list[Figure] = []
    problems: list[str] = []
    for path in found:
        read_runs, read_tables, read_problems = _read(path)
        runs += read_runs
        figures += read_tables
        problems += read_problems
    findings = [one for path in found if is_study_directory(path) for one in read_findings(path).items()]
    return Collected(found, tuple(_named_apart(runs)), tuple(figures), tuple(problems), tuple(findings))


def _read(path: Path) -> tuple[list[ReportedRun], list[Figure], list[str]]:
    if not path.exists():
        raise RunError(f"path={str(path)!r} does not exist: give a run directory or a study directory")
    if not path.is_dir():
        raise RunError(f"path={str(path)!r} must be a folder, and it is a file: give the folder that it is in")
    if is_run_directory(path):
        return [read_run_directory(path)], [], []
    if is_study_directory(path):
        runs, problems = read_records(path)
        metrics = {run.task: run.metrics[0] for run in reversed(runs) if run.metrics}
        figures, unread = read_figures(path, metrics, {run.task: run.about for run in runs})
        return runs, figures, [*problems, *unread]
    inside = [read_run_directory(folder) for folder in sorted(path.iterdir()) if is_run_directory(folder)]
    figures, unread = read_figures(path, {})
    if inside or figures:
        return inside, figures, unread
    raise RunError(
        f"path={str(path)!r} holds no run: it has neither metrics.jsonl, as clipline train writes it, nor study.json, "
        "as clipline reproduce does, nor folders with one: give a run directory or a study directory"
    )


def _named_apart(runs: list[ReportedRun]) -> list[ReportedRun]:
    """The runs with names that differ: those of two folders of one name have the folder above in front."""
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    named: dict[str, int] = {}
    apart = []
    for run in runs:
        name = f"{Path(run.path).resolve().parent.name}/{run.name}" if run.name in twice else run.name
        named[name] = named.get(name, 0) + 1
        apart.append(replace(run, name=name if named[name] == 1 else f"{name} ({named[name]})"))
    return apart
