"""What an experiment found: tables, numbers and sentences. Rows of tables name the runs behind them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .protocol import Protocol


@dataclass(frozen=True)
class Table:
    """Rows of one CSV file. Every row has these columns; `runs` names the runs behind it, separated by spaces."""

    columns: tuple[str, ...]
    rows: list[dict[str, Any]]

    def to_csv(self) -> str:
        """The file's text. What is not there (a clip of a run without one, the metric of a diverged run) is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_cell(row[name]) for name in self.columns] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Findings:
    """Tables by the end of their file names ("" is the figure's own), numbers by name, and a few sentences."""

    what: str
    protocol: Protocol
    tables: Mapping[str, Table]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    summary: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Of the experiment on this task, as its files and `study.json` call it."""
        return f"{self.what}-{self.protocol.task}"

    def csv_name(self, table: str) -> str:
        """The file of a table."""
        return f"{self.name}{'-' + table if table else ''}.csv"


@dataclass(frozen=True)
class SummaryRow:
    """One row of the summary picture: differences in percent of the metric, positive where the median is better."""

    label: str
    low: float
    mean: float
    high: float
    verdict: str


def disagreements(table: Table, path: Path) -> list[str]:
    """Where a CSV file is not the table: a sentence for each kind of difference; none if all numbers agree."""
    try:
        found = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, csv.Error) as error:
        return [f"{path.name} cannot be read ({error})"]
    wanted = list(csv.reader(io.StringIO(table.to_csv())))
    if not found or found[0] != wanted[0]:
        return [f"{path.name} has other columns than its runs give"]
    if len(found) != len(wanted):
        return [f"{path.name} has {len(found) - 1} rows, and its runs give {len(wanted) - 1}"]
    return [
        f"{path.name}, line {line}: {name} is {mine!r}, and its runs give {right!r}"
        for line, (row, other) in enumerate(zip(found[1:], wanted[1:], strict=True), start=2)
        for name, mine, right in zip(wanted[0], row, other, strict=False)
        if not _same(mine, right)
    ]


def _same(mine: str, right: str) -> bool:
    """Equal as text, or as numbers up to the rounding of another machine."""
    if mine == right:
        return True
    try:
        return math.isclose(float(mine), float(right), rel_tol=1e-9)
    except ValueError:
        return False


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else str(value)
