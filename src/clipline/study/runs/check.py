"""The audit of a study: does a record agree with itself, and has a table the runs that it names?"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Collection
from pathlib import Path

from .record import ID_DIGITS, RunRecord

_RUNS = "runs"  # the column of a table that names the runs behind each row
_ID = re.compile(rf"\b[0-9a-f]{{{ID_DIGITS}}}\b")


def contradictions(record: RunRecord) -> list[str]:
    """Where a record does not agree with itself: rounds, clips and metrics against settings and outcome."""
    found, settings, rounds = list[str](), record.settings, record.rounds
    count = len(rounds["round"])
    if list(rounds["round"]) != list(range(count)):
        found.append("its rounds are not numbered from 0 on without a gap")
    if record.outcome == "finished" and count != settings["rounds"]:
        found.append(f"it has {count} rounds but finished, and its settings say {settings['rounds']}")
    if count > settings["rounds"]:
        found.append(f"it has {count} rounds and its settings say at most {settings['rounds']}")
    clips = {clip for clip in rounds["clip"] if clip is not None}
    fixed = settings.get("fixed_clip") if settings["clip"] == "fixed" else settings["clip"]
    if isinstance(fixed, float | int) and any(not math.isclose(clip, fixed, rel_tol=1e-9) for clip in clips):
        found.append(f"its clip is fixed at {fixed}, and a round had another")
    for name, value in record.final.items():
        if name not in rounds or (count and rounds[name][-1] != value):
            found.append(f"{name} of the last model is not that of the last round")
    return found


def runs_without_record(table: Path, records: Collection[str]) -> list[str]:
    """Rows of a CSV file that name no run, or one that has no record. A table without the column `runs` has none."""
    try:
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        return [f"it cannot be read ({error})"]
    found = list[str]()
    for line, row in enumerate(rows, start=2):
        if _RUNS not in row:
            break
        named = _ID.findall(row[_RUNS] or "")
        found += [] if named else [f"line {line} names no run"]
        found += [f"line {line} names run {run}, which has no sound record" for run in named if run not in records]
    return found
