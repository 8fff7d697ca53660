"""Experiments in a study directory: run with what is missing, or made again from the records alone.

`study.json` holds the protocol and the settings of every experiment that was asked for. With these and the records an
experiment gives the same findings: `examine` compares them with the CSV files, studies/paper_results.py makes a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipline.data import DataUsed, find_store
from clipline.errors import CliplineError, RunError
from clipline.settings import STAND_IN
from clipline.study import Examined, RunRecord, RunSpec, Study, StudyDirectory, StudyProgress, data_checksum, replacing
from clipline.tasks import Task, TrainSettings, task_named

from .charts import report_figures
from .experiments import EXPERIMENTS, Findings, Grid, disagreements, run_experiment
from .figures import draw
from .protocol import Protocol

KIND = "paper"  # of an experiment in `study.json` that this room made


@dataclass(frozen=True)
class Recorded:
    """Looks runs up in a study directory, and refuses where one is missing."""

    directory: StudyDirectory
    data: str  # checksum of the data, a part of every run's identity
    code: str | None

    def results(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order."""
        found, missing = list[RunRecord](), list[str]()
        for spec in specs:
            run = spec.identity(self.data, self.code)
            record = self.directory.record(run)
            if record is None:
                missing.append(run)
            else:
                found.append(record)
        if missing:
            raise RunError(
                f"{len(missing)} of {len(specs)} runs that it asks for next are not made yet (the first is "
                f"{missing[0]}): give the same `clipline reproduce` again, which makes what is missing"
            )
        return found


def facts_of(
    what: str, protocol: Protocol, base: TrainSettings, checksum: str, data: str, code: str | None = None
) -> dict[str, Any]:
    """What `study.json` keeps of an experiment. Where the data lie is left out: the checksum says which they are."""
    settings = {name: value for name, value in asdict(base).items() if value is not None}
    if base.stored:
        settings["data"] = Path(str(base.data)).name
    return {
        "kind": KIND,
        "what": what,
        "protocol": asdict(protocol),
        "settings": settings,
        "data": data,
        "unprivate_data_checksum": checksum,
        **({"code": code} if code is not None else {}),
    }


def findings_of(directory: StudyDirectory, facts: Mapping[str, Any]) -> Findings:
    """The findings of an experiment that `study.json` holds; refused where a run is missing or it is not ours."""
    try:
        lists = {name: tuple(value) for name, value in facts["protocol"].items() if isinstance(value, list)}
        protocol = Protocol(**{**facts["protocol"], **lists})
        base = TrainSettings(**facts["settings"])
        recorded = Recorded(directory, facts["unprivate_data_checksum"], facts.get("code"))
        return run_experiment(facts["what"], Grid(recorded, protocol, base))
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        if isinstance(error, CliplineError):
            raise
        raise RunError(
            f"study.json of {str(directory.path)!r} has an experiment that cannot be read ({error!r}): ask for it again"
        ) from None


def paper_experiments(directory: StudyDirectory) -> dict[str, dict[str, Any]]:
    """The experiments of this room that were asked for, by name."""
    found = directory.experiments.items()
    return {name: facts for name, facts in found if isinstance(facts, dict) and facts.get("kind") == KIND}


def examine(directory: StudyDirectory) -> Examined:
    """The paper's experiments computed again: what they found, and where their CSV files say otherwise.

    An experiment that is not finished has no tables yet, and no problems. A table of a figure that no experiment makes
    is a problem.
    """
    found, problems, without_tables = dict[str, Findings](), list[str](), list[str]()
    tables = {path.name for what in EXPERIMENTS for path in directory.path.glob(f"{what}-*.csv")}
    for name, facts in paper_experiments(directory).items():
        mine = {table for table in tables if table == f"{name}.csv" or table.startswith(f"{name}-")}
        without_tables += [] if mine else [name]
        try:
            findings = found[name] = findings_of(directory, facts)
        except CliplineError as error:
            problems += [f"{name}: its tables cannot be made again: {error}"] if mine else []
            tables -= mine
            continue
        for table, content in findings.tables.items() if mine else ():
            problems += disagreements(content, directory.path / findings.csv_name(table))
            tables.discard(findings.csv_name(table))
    return Examined(
        findings={name: [line.strip() for line in one.summary] for name, one in found.items()},
        verdicts=[f"{name}: {one.numbers['verdict']}" for name, one in found.items() if "verdict" in one.numbers],
        figures=report_figures(list(found.values())),
        problems=[
            *problems,
            *(f"{table} is made by no experiment of study.json: delete it" for table in sorted(tables)),
        ],
        without_tables=without_tables,
    )


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
