"""Experiments made again from the records of a study alone: nothing is trained, and every number is computed anew.

`study.json` holds the protocol and the settings of every experiment that was asked for. With these and the records an
experiment gives the same findings: `table_problems` compares them with the CSV files, `results_page` makes a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipline.errors import CliplineError, RunError
from clipline.study import Figure, RunRecord, RunSpec, StudyDirectory
from clipline.tasks import TrainSettings

from .charts import report_figures
from .experiments import EXPERIMENTS, Findings, Grid, disagreements, run_experiment
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


def finished(directory: StudyDirectory) -> dict[str, Findings]:
    """What each finished experiment has found, by its name."""
    found = {}
    for name, facts in paper_experiments(directory).items():
        with suppress(CliplineError):
            found[name] = findings_of(directory, facts)
    return found


def summaries(directory: StudyDirectory) -> dict[str, list[str]]:
    """What each finished experiment has found, in sentences, by its name."""
    return {name: [line.strip() for line in found.summary] for name, found in finished(directory).items()}


def figures(directory: StudyDirectory) -> list[Figure]:
    """The charts and tables of the finished experiments."""
    return report_figures(list(finished(directory).values()))


def without_tables(directory: StudyDirectory) -> list[str]:
    """The experiments that have no CSV file here, so that there is nothing to compare: unfinished, or merged runs."""
    tables = [path.stem for path in directory.path.glob("*.csv")]
    names = paper_experiments(directory)
    return [name for name in names if not any(table == name or table.startswith(f"{name}-") for table in tables)]


def table_problems(directory: StudyDirectory) -> list[str]:
    """Where the CSV files of the paper's experiments are not what the records give, a sentence each.

    An experiment that is not finished has no tables yet, and no problems. A table of a figure that no experiment makes
    is a problem.
    """
    problems = []
    tables = {path.name for what in EXPERIMENTS for path in directory.path.glob(f"{what}-*.csv")}
    for name, facts in paper_experiments(directory).items():
        mine = {table for table in tables if table == f"{name}.csv" or table.startswith(f"{name}-")}
        if not mine:
            continue
        try:
            findings = findings_of(directory, facts)
        except CliplineError as error:
            problems.append(f"{name}: its tables cannot be made again: {error}")
            tables -= mine
            continue
        for table, content in findings.tables.items():
            problems += disagreements(content, directory.path / findings.csv_name(table))
            tables.discard(findings.csv_name(table))
    return [*problems, *(f"{table} is made by no experiment of study.json: delete it" for table in sorted(tables))]


def verdicts(directory: StudyDirectory) -> list[str]:
    """What Figures 3 and 7 say of the median, computed again from the records, where all of these are there."""
    numbers = {name: found.numbers for name, found in finished(directory).items()}
    return [f"{name}: {of_name['verdict']}" for name, of_name in numbers.items() if "verdict" in of_name]
