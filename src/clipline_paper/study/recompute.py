"""Experiments made again from the records of a study alone: nothing is trained, and every number is computed anew.

`study.json` holds the protocol and the settings of every experiment that was asked for. With these and the records an
experiment gives the same findings: `examine` compares them with the CSV files, studies/paper_results.py makes a page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clipline.errors import CliplineError, RunError
from clipline.study import Examined, RunRecord, RunSpec, StudyDirectory
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
