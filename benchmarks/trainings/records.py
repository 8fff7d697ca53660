"""Measurements as lines of JSON in benchmarks/results: what was measured where, when and on which commit."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
Record = dict[str, Any]

# What tells two measurements apart; a later record of the same replaces the earlier one.
TRAINING_KEY = ("machine", "task", "data", "system", "users", "rounds", "threads", "turn")
ROUND_KEY = ("machine", "task", "system")
FLOAT32 = "float32"  # by default everybody's arithmetic
_OURS = ("clipline", "second")


def key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """What was measured, whatever came of it."""
    names = TRAINING_KEY if record["kind"] == "training" else ROUND_KEY
    return (record["kind"], precision_of(record), *(record.get(name) for name in names))


def precision_of(record: Mapping[str, Any]) -> str:
    """The arithmetic of the system that was measured. Older records of our rounds have it in their command alone."""
    if record.get("precision"):
        return str(record["precision"])
    given = re.search(r"--options (?:\S+=\S+ )*precision=(\w+)", record.get("command", ""))
    return given[1] if given and record["system"] in _OURS else FLOAT32


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line at once, so that a run which is ended keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """All records, in the order of the files; a line that was cut off while it was written does not count."""
    found = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def newest(records: Iterable[Record]) -> dict[tuple[Any, ...], Record]:
    """The last record of each measurement; one that failed does not replace one that did not."""
    kept: dict[tuple[Any, ...], Record] = {}
    for record in records:
        before = kept.get(key(record))
        if before is None or "failed" not in record or "failed" in before:
            kept[key(record)] = record
    return kept
