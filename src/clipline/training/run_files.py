"""Reads the files of a run directory, also of a run that is at work, was interrupted or was killed. Needs no torch."""

from __future__ import annotations

import ast
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import CliplineError, RunError, regular
from ..privacy.guarantee import Guarantee
from ..privacy.ledger import Ledger

SETTINGS, METRICS, LEDGER, CURVES = "settings.toml", "metrics.jsonl", "ledger.jsonl", "curves.png"
MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
KEY = "resume.key"  # of an unfinished run whose cohorts and noise come from the system
OLDER = "checkpoint.older.safetensors"  # the one before, for a run whose last is damaged
GUARANTEES = "guarantees.txt"  # of a federation: for outsiders, and against its server
PARTICIPATIONS = "unprivate_participations.json"  # of a federation: which nodes were asked, how often
CARD_KEY = "card"  # of the metadata in the model's file
_UNREADABLE = (OSError, ValueError, RecursionError)


@dataclass(frozen=True)
class RunFiles:
    """What the files of a run say. What cannot be read is empty, or None, and named in `problems`."""

    settings: dict[str, Any]  # by name, those of tables as `table.name`
    notes: dict[str, Any]  # what followed from the settings and where it ran, which settings.toml has as comments
    facts: dict[str, str]
    rounds: list[dict[str, Any]]  # lines of metrics.jsonl, one a round and in order
    ledger: Ledger | None
    card: dict[str, Any]  # of the model; empty before the end
    problems: list[str]


def is_run_directory(path: Path) -> bool:
    """Whether a folder holds the files that a training begins with."""
    return (path / METRICS).is_file() or ((path / SETTINGS).is_file() and (path / LEDGER).is_file())


def can_go_on(path: Path) -> bool:
    """Whether a run directory holds a checkpoint: a run that has ended has none."""
    return any(os.path.isfile(path / name) for name in (CHECKPOINT, OLDER))  # noqa: PTH113 (names may be too long)


def read_run(path: Path) -> RunFiles:
    """The run in a folder. The last line of a file may be cut short: it belongs to a round that was never released."""
    problems: list[str] = []
    settings, notes, facts, ledger = dict[str, Any](), dict[str, Any](), dict[str, str](), None
    try:
        settings, notes, facts = _read_settings(path / SETTINGS)
    except _UNREADABLE as error:
        problems.append(f"{SETTINGS} cannot be read ({error}): settings are not shown")
    try:
        ledger = Ledger.read(path / LEDGER, unfinished=True)
    except CliplineError as error:
        problems.append(f"{LEDGER} cannot be read ({error}): no guarantee is shown")
    return RunFiles(
        settings, notes, facts, read_rounds(path / METRICS, problems), ledger, read_card(path / MODEL), problems
    )


def read_rounds(path: Path, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """One mapping a round, in order; a round that comes twice, as after a resume, counts as it came last."""
    problems = [] if problems is None else problems
    try:
        lines = regular(path).read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error}): there are no curves")
        return []
    rounds: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in lines:
        try:
            entries = json.loads(line)
        except (ValueError, RecursionError):
            entries = None
        if _is_round(entries):
            rounds[entries["round"]] = entries
        else:
            damaged += 1
    if damaged:
        problems.append(f"{damaged} of {len(lines)} lines of {path.name} are damaged and left out")
    return [rounds[number] for number in sorted(rounds)]


def _is_round(entries: Any) -> bool:
    """Whether it has what every round has, and nothing but numbers that can be drawn."""
    if not isinstance(entries, dict) or not {"round", "clip", "fraction_within"} <= entries.keys():
        return False
    numbers = [one for one in entries.values() if one is not None]
    if not all(isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < 1e300 for one in numbers):
        return False
    return isinstance(entries["round"], int) and 0 <= entries["round"] < 1 << 53


def read_card(model: Path) -> dict[str, Any]:
    """The card in the metadata of a model's file; empty where there is no model yet, or one without a card."""
    try:
        with safe_open(str(regular(model)), framework="numpy") as file:
            card = json.loads(file.metadata()[CARD_KEY])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return card if isinstance(card, dict) and isinstance(card.get("guarantee"), dict) else {}


def finite_or_none(number: float) -> float | None:
    """JSON has no infinity and no NaN: null stands for both."""
    return number if math.isfinite(number) else None


def guarantee_json(guarantee: Guarantee) -> dict[str, Any]:
    """The fields of a guarantee; an infinite epsilon is null."""
    values = {field.name: getattr(guarantee, field.name) for field in fields(guarantee)}
    return {**values, "epsilon": finite_or_none(guarantee.epsilon), "relation": str(guarantee.relation)}


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables as `table.name`."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def read_facts(path: Path) -> dict[str, str]:
    """The facts that the run in a folder was started with."""
    try:
        return _read_settings(path / SETTINGS)[2]
    except FileNotFoundError:
        return {}
    except _UNREADABLE as error:
        way_out = "restore it, or give the facts again"
        raise RunError(f"{str(path / SETTINGS)!r} cannot be read ({error}): {way_out}") from None


def _read_settings(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The settings, flat, the values in the comments below them, and the facts that stand in either."""
    text = regular(path).read_text(encoding="utf-8")
    settings = flat(tomllib.loads(text))
    notes: dict[str, Any] = {}
    for name, value in re.findall(r"^# ([\w. -]+?) = (.+)$", text, re.MULTILINE):
        try:
            notes[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            notes[name] = value
    facts = {
        name.removeprefix("facts."): str(values.pop(name))
        for values in (notes, settings)
        for name in [*values]
        if name.startswith("facts.")
    }
    return settings, notes, facts
