"""`clipline study`: how far a study is, whether its numbers or those of a run stand, and bringing several together."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import fail, say, tell
from .parser import JSON, PATH, Argument, Command, Group, Option

if TYPE_CHECKING:
    from ..study.directory import StudyDirectory


def status(folder: Path, as_json: bool) -> None:
    """Say how many runs of a study are done, running, failed and missing.

    It may be asked while others work on the study. Running: a process on this machine, or one that shares the folder,
    has claimed the run.
    """
    from ..study.directory import StudyDirectory

    directory = StudyDirectory.existing(folder)
    done, asked, failures = set(directory.ids()), set(directory.entries()["asked"]), directory.failures()
    running = directory.claimed() - done
    failed = failures.keys() - running
    missing = asked - done - running - failed
    outcomes, damaged = _outcomes(directory)
    if as_json:
        answer = {
            "done": len(done), "running": len(running), "failed": sorted(failed), "missing": len(missing),
            "damaged": damaged, "outcomes": dict(outcomes), "experiments": directory.experiments,
        }  # fmt: skip
        print(json.dumps(answer))
        return
    say(f"{folder}: {len(done)} runs done, {len(running)} running, {len(failed)} failed, {len(missing)} missing")
    for outcome, count in outcomes.items():
        if outcome != "finished":
            say(f"  {outcome}: {count} of those done")
    if damaged:
        say(f"  damaged: {len(damaged)} of those done, which clipline study check names")
    for name in directory.experiments:
        say(f"  experiment  {name}")
    for run in sorted(failed):
        failure = failures[run]
        say(f"  failed      {run} ({failure['what']}): {_last_line(failure['error'])}")


def _outcomes(directory: StudyDirectory) -> tuple[Counter[str], list[str]]:
    """How often runs that are done ended in which way, and those whose record cannot be read."""
    from ..errors import RunError

    outcomes, damaged = Counter[str](), list[str]()
    for run in directory.ids():
        try:
            record = directory.record(run)
        except RunError:
            damaged.append(run)
        else:
            outcomes.update([] if record is None else [record.outcome])
    return outcomes, damaged


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def check(folder: Path) -> int:
    """Check a study, or the directory of one run.

    Of a study: every run against its identity, every table against the runs behind it; its verdicts on the median clip
    are computed again and printed. Of a run: epsilon is computed again from the ledger, and ledger, settings, metrics
    and the model's card must agree. Ends with exit code 1 if anything is wrong, and says what.
    """
    from ..errors import RunError
    from ..study.directory import StudyDirectory, experiment_kinds
    from ..training.run_files import is_run_directory

    if not folder.exists():
        raise RunError(f"path={str(folder)!r} does not exist: give a run directory or a study directory")
    if is_run_directory(folder):
        return _check_run(folder)
    directory = StudyDirectory.existing(folder)
    kinds, problems = experiment_kinds(), directory.check()
    examined = [kind.examine(directory) for kind in kinds.values()]
    problems += [problem for one in examined for problem in one.problems]
    for problem in problems:
        tell(problem)
    tables = len(list(directory.path.glob("*.csv")))
    say(f"{folder}: {len(directory.ids())} runs and {tables} tables, {_problems(len(problems))}")
    for verdict in (verdict for one in examined for verdict in one.verdicts):
        say(f"  {verdict}")
    if unchecked := [name for one in examined for name in one.without_tables]:
        say(f"  without a table, so that only their runs were checked: {', '.join(unchecked)}")
    asked = {name: facts.get("kind") for name, facts in directory.experiments.items() if isinstance(facts, dict)}
    if unknown := [name for name, kind in asked.items() if kind is not None and kind not in kinds]:
        say(f"  of no installed package, so that only their runs were checked: {', '.join(unknown)}")
    return 1 if problems else 0


def _check_run(folder: Path) -> int:
    """Whether the files of one run agree, and what they come to."""
    from ..study.report.content import basis, cautions, warnings, words
    from ..study.report.reading import read_run_directory

    run = read_run_directory(folder)
    promised = run.promise is not None and run.promise.epsilon is not None
    broken = [f"not private: {reason}" for reason in warnings(run)] if promised else []
    for problem in [*run.problems, *broken]:
        tell(problem)
    say(f"{folder}: {words(run)}")
    for problem in broken:  # also where the statement stands, which somebody may keep by itself
        say(f"  {problem}")
    for name, value in basis(run):
        say(f"  {name:33} {value}")
    if run.promise is not None:
        agree = _problems(len(run.problems)) if run.problems else "the other files agree with it"
        say(f"  computed again from ledger.jsonl; {agree}")
    if run.state in ("interrupted", "not ended"):
        say(f"  unfinished: {len(run.round)} of {run.planned_rounds} rounds")
    if run.state == "early":
        say(f"  stopped early: {len(run.round)} of {run.planned_rounds} rounds, of which all are charged")
    for finding in run.findings:
        say(f"  warning: {finding}")
    for caution in cautions(run)[len(run.problems) :]:
        say(f"  note: {caution}")
    return 1 if run.problems or broken or run.promise is None else 0


def _problems(count: int) -> str:
    return f"{count} problem{'s' * (count != 1)}"


def merge(sources: Sequence[Path], into: Path) -> int:
    """Take the runs of other study directories over into one; theirs stay as they are.

    A run that both have is kept as it is. A damaged one is named, left out, and makes the exit code 1.
    """
    from ..errors import RunError
    from ..study.directory import StudyDirectory

    others = [StudyDirectory.existing(source) for source in sources]
    directory, damaged = StudyDirectory(into), False
    for source, other in zip(sources, others, strict=True):
        differing = _asked_otherwise(directory, other)
        try:
            new = directory.merge(other)
        except RunError as error:
            fail(error)
            damaged = True
        else:
            say(f"{source}: {new} new runs of {len(other.ids())}")
        for name in differing:
            say(f"  {name} is asked for otherwise there, and stays here as it is: give its clipline reproduce again")
    say(f"{into}: {len(directory.ids())} runs")
    return 1 if damaged else 0


def _asked_otherwise(directory: StudyDirectory, other: StudyDirectory) -> list[str]:
    """Experiments that both have with other grids, seeds, splits or data."""
    here, there = directory.experiments, other.experiments
    parts = ("protocol", "unprivate_data_checksum")
    both = [name for name in there if isinstance(here.get(name), dict) and isinstance(there[name], dict)]
    return [name for name in both if any(here[name].get(part) != there[name].get(part) for part in parts)]


_folder = Argument(["folder"], type=PATH, metavar="DIR", help="The folder of the study.")
status_command = Command("status", status, [_folder, JSON])
_checked = Argument(["folder"], type=PATH, metavar="DIR", help="The folder of the study, or a run directory.")
check_command = Command("check", check, [_checked])
merge_command = Command(
    "merge",
    merge,
    [
        Argument(["sources"], type=PATH, nargs=-1, required=True, metavar="FROM...", help="Studies to take over."),
        Option(["--into"], type=PATH, required=True, metavar="DIR", help="The study to add to; may be new."),
    ],
)
command = Group(
    "study",
    help="Look at a study, check it or a single run, and merge studies.",
    modules={"status": ".study:status_command", "check": ".study:check_command", "merge": ".study:merge_command"},
)
