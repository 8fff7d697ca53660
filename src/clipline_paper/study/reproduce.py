"""One experiment of the paper on one task, in a study directory: run what is missing, write tables and picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipline.data import DataUsed, find_store
from clipline.errors import RunError
from clipline.settings import STAND_IN
from clipline.study import Study, StudyDirectory, StudyProgress, data_checksum, replacing
from clipline.tasks import Task, task_named

from .experiments import Findings, Grid, run_experiment
from .figures import draw
from .protocol import Protocol
from .recompute import facts_of


@dataclass(frozen=True)
class Reproduced:
    """An experiment that has ended, and its files: tables first, then the picture."""

    findings: Findings
    files: list[Path]


def reproduce(
    what: str,
    protocol: Protocol,
    out: Path,
    *,
    task: Task | None = None,
    changes: Mapping[str, Any] | None = None,
    cluster: str | None = None,
    progress: StudyProgress | None = None,
) -> Reproduced:
    """Run what is missing of an experiment in the study directory `out`, and write its tables and picture there.

    `task` is left out for a task of clipline. `changes` are settings of all runs: data, device, precision. Called again
    it goes on where it ended, and with other seeds, quantiles or rates it adds the runs that are new.
    """
    task = task_named(protocol.task) if task is None else task
    base = protocol.base(task.settings, changes)
    used = task.data_used(base)  # a store that cannot be used is refused before anything is written
    base.compute().check_device()
    directory = StudyDirectory(out)
    facts = facts_of(what, protocol, base, data_checksum(base), data_words(task, used), task.code)
    _check_same(directory, f"{what}-{task.name}", facts)
    directory.note_experiment(f"{what}-{task.name}", facts)
    study = Study(directory, task, cluster=cluster, progress=progress)
    try:
        findings = run_experiment(what, Grid(study, protocol, base))
    finally:
        study.close()
    return Reproduced(findings, write_files(findings, directory, facts["data"]))


def _check_same(directory: StudyDirectory, name: str, facts: Mapping[str, Any]) -> None:
    """Refuse to put another scale or other data in the place of an experiment that is there."""
    earlier = directory.experiments.get(name)
    if not isinstance(earlier, dict) or "protocol" not in earlier:
        return
    path, scale = str(directory.path), facts["protocol"]["scale"]
    if earlier["protocol"]["scale"] != scale:
        raise RunError(
            f"{path!r} holds {name} at scale {earlier['protocol']['scale']}, not {scale}: give another --out"
        )
    if earlier.get("code") != facts.get("code"):
        raise RunError(f"{path!r} holds {name} of a file that has changed since: give another --out")
    if earlier["unprivate_data_checksum"] != facts["unprivate_data_checksum"]:
        raise RunError(f"{path!r} holds {name} on other data ({earlier['data']}): give another --out, or those data")


def write_files(findings: Findings, directory: StudyDirectory, data: str) -> list[Path]:
    """Write the tables and the picture, in the place of earlier ones of the same experiment."""
    files = []
    for name, table in findings.tables.items():
        files.append(directory.path / findings.csv_name(name))
        with replacing(files[-1]) as partial:
            partial.write_text(table.to_csv(), encoding="utf-8")
    files.append(directory.path / f"{findings.name}.png")
    with replacing(files[-1]) as partial:
        draw(findings, partial, data)
    return files


def data_for(task: str, given: str | None) -> str | None:
    """The setting `data` that a flag means: a store, or that of the task in a folder of stores.

    Without a flag it is what is at the default place; None where the task generates its users.
    """
    if given is None:
        found = find_store(task)
        return None if found is None else str(found)
    if given == STAND_IN:
        return given
    inside = find_store(task, Path(given))
    return given if inside is None else str(inside)


def data_words(task: Task, used: DataUsed) -> str:
    """What was trained on, in a few words."""
    title = used.title.removeprefix(f"{task.name} on ")
    return title if used.kind in ("embedded", "stand-in") else f"{title}, measured on {used.measured_on}"
