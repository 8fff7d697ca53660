"""Reads the directory of one training, also of one that goes on, was interrupted or was killed."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import CliplineError
from ...privacy.accountant import account
from ...privacy.events import GaussianEvent
from ...privacy.feasibility import noise_norm
from ...privacy.guarantee import Guarantee
from ...privacy.ledger import Ledger
from ...privacy.relations import Relation
from ...training.diagnosis import Known, best_and_last, diagnose
from .agreement import broken_terms, oddities, read_card, understated
from .run import Promise, ReportedRun, finite

SETTINGS, METRICS, LEDGER = "settings.toml", "metrics.jsonl", "ledger.jsonl"
MODEL, CHECKPOINT = "model.safetensors", "checkpoint.safetensors"
_CIRCUMSTANCES = ("clipline", "python", "torch", "numpy", "device", "engine", "machine")


def is_run_directory(path: Path) -> bool:
    """Whether a folder holds the files that a training begins with."""
    return (path / METRICS).is_file() or ((path / SETTINGS).is_file() and (path / LEDGER).is_file())


def read_run_directory(path: Path) -> ReportedRun:
    """The run in a folder. What cannot be read is left out and named in `problems`.

    Without a ledger no epsilon is shown, nor where the files contradict each other. The guarantee is computed from the
    ledger: a round that was charged counts, even if a crash lost its metrics.
    """
    problems: list[str] = []
    settings, comments = _read_settings(path / SETTINGS, problems)
    rounds = _read_metrics(path / METRICS, problems)
    names = dict.fromkeys(name for line in rounds for name in line if name != "round")
    columns = {name: [finite(line.get(name)) for line in rounds] for name in names}
    facts = {name.removeprefix("facts."): value for name, value in comments.items() if name.startswith("facts.")}
    facts |= {name.removeprefix("facts."): value for name, value in settings.items() if name.startswith("facts.")}
    ledger = _read_ledger(path / LEDGER, problems)
    card = read_card(path / MODEL)
    promise = None if ledger is None else _promise(ledger, settings, comments, columns, card, problems)
    measured = [name for name in names if name not in ("clip", "fraction_within", "epsilon", "delta")]
    final = {name: next((v for v in reversed(columns[name]) if v is not None), None) for name in measured}
    noises = [event.noise_multiplier for event in ledger.events] if ledger is not None else []
    done = [int(line["round"]) + 1 for line in rounds]
    run = ReportedRun(
        name=path.resolve().name,
        path=str(path),
        of_study=False,
        state=_state(path, len(done), settings.get("rounds"), card),
        round=done,
        columns=columns,
        final={name: value for name, value in final.items() if not name.startswith("unprivate_")},
        settings={name: value for name, value in settings.items() if not name.startswith("facts.")},
        resolved={k: v for k, v in comments.items() if k not in (*_CIRCUMSTANCES, "planned") and k[:6] != "facts."},
        about=facts,
        circumstances={name: comments[name] for name in _CIRCUMSTANCES if name in comments},
        promise=promise,
        planned=str(comments["planned"]) if "planned" in comments else None,
        noise_multiplier=min(noises) if noises else finite(comments.get("noise_multiplier")),
        problems=problems,
    )
    kept = card.get("model_rounds")
    known = _known(run, kept if isinstance(kept, int) and 0 < kept < len(done) else None)
    return replace(run, findings=[str(one) for one in diagnose(rounds, known)], best=best_and_last(rounds, known))


def _known(run: ReportedRun, kept: int | None) -> Known:
    """What the files tell of a run, to judge its rounds by."""
    z = finite(run.resolved.get("delta_noise_multiplier"))
    cohort, parameters = (
        value if isinstance(value, int) and value > 0 else None
        for value in (run.setting("cohort_size"), run.resolved.get("parameters"))
    )
    return Known(
        target=run.target,
        cohort_size=cohort,
        count_stddev=finite(run.resolved.get("count_stddev")),
        noise_norm=noise_norm(z, cohort, parameters) if z is not None and cohort and parameters else None,
        metric=str(run.resolved["metric"]) if "metric" in run.resolved else None,
        facts={name: str(value) for name, value in run.about.items()},
        kept=kept,
        ended=run.state not in ("interrupted", "not ended"),
    )


def flat(tables: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested tables as `table.name`."""
    found: dict[str, Any] = {}
    for name, value in tables.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _read_settings(path: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings, flat, and the values in the comments below them."""
    try:
        text = path.read_text(encoding="utf-8")
        settings = flat(tomllib.loads(text))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read ({error}): settings are not shown")
        return {}, {}
    comments: dict[str, Any] = {}
    for name, value in re.findall(r"^# ([\w. -]+?) = (.+)$", text, re.MULTILINE):
        try:
            comments[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            comments[name] = value
    return settings, comments


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file, less a last one that is being written or was cut short."""
    return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]


def _read_metrics(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """One mapping a round, in order; a round that comes twice, as after a resume, counts as it came last."""
    try:
        lines = _whole_lines(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error}): there are no curves")
        return []
    rounds: dict[int, dict[str, Any]] = {}
    damaged = 0
    for line in lines:
        try:
            fields = json.loads(line)
            number = fields["round"]
        except (ValueError, KeyError, TypeError, RecursionError):
            damaged += 1
            continue
        if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 1 << 53:
            rounds[number] = fields
        else:
            damaged += 1
    if damaged:
        problems.append(f"{damaged} of {len(lines)} lines of {path.name} are damaged and left out")
    return [rounds[number] for number in sorted(rounds)]


def _read_ledger(path: Path, problems: list[str]) -> Ledger | None:
    """What was charged, or None with a problem. A last line that was cut short belongs to a round never released."""
    try:
        ledger = Ledger()
        for index, line in enumerate(_whole_lines(path)):
            fields = json.loads(line)
            if (fields.pop("version"), fields.pop("round")) != (1, index):
                raise ValueError(f"line {index + 1} is of another version or out of order")
            ledger = ledger.add(GaussianEvent.from_json(fields))
        return ledger
    except (OSError, CliplineError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read ({error}): no guarantee is shown")
        return None


def _with_planned(ledger: Ledger, card: Mapping[str, Any]) -> Ledger:
    """The ledger with as many rounds as the guarantee in the model's card covers.

    These are more where the run was stopped by what it measured (`EarlyStopping`): then all planned rounds count.
    """
    covered = card.get("guarantee", {}).get("rounds")
    events = [event for event in ledger.events if event.statistic is None]
    if not isinstance(covered, int) or len(events) != 1 or not ledger.rounds < covered < 1 << 40:
        return ledger
    return ledger.add(events[0], covered - ledger.rounds)


@lru_cache(maxsize=512)
def _account(events: tuple[tuple[GaussianEvent, int], ...], delta: float, relation: str) -> Guarantee:
    return account(Ledger(events), delta=delta, relation=Relation.named(relation))


def _promise(
    ledger: Ledger,
    settings: Mapping[str, Any],
    comments: Mapping[str, Any],
    columns: Mapping[str, list[float | None]],
    card: Mapping[str, Any],
    problems: list[str],
) -> Promise | None:
    """The guarantee of all rounds charged; None, perhaps with a problem, where its terms are not known or differ."""
    lost = len(next(iter(columns.values()), [])) - ledger.rounds
    if lost > 0:  # a round is charged before it is released
        problems.append(f"{LEDGER} lacks {lost} of the rounds in {METRICS}: no guarantee is shown")
        return None
    if not ledger.rounds:
        return None
    if broken := broken_terms(ledger, settings, comments, columns, card):
        problems += [f"{words}: the files contradict each other, and no guarantee is shown" for words in broken]
        return None
    if card.get("stopped") == "finished" and (short := card["guarantee"].get("rounds", 0) - ledger.rounds) > 0:
        problems.append(f"{LEDGER} lacks {short} of the rounds that the model's card covers: no guarantee is shown")
        return None
    ledger = _with_planned(ledger, card)
    stored = [value for value in columns.get("delta", []) if value is not None]
    delta = finite(comments.get("delta")) or finite(settings.get("delta")) or (stored[-1] if stored else None)
    relation = comments.get("relation") or settings.get("relation") or settings.get("privacy.relation")
    if delta is None or not isinstance(relation, str):
        problems.append("delta or the neighbouring relation is not on record: no guarantee is shown")
        return None
    try:
        guarantee = replace(
            _account(ledger.entries, delta, relation),
            from_seed=(settings.get("noise_source") or settings.get("privacy.noise_source")) == "seed",
            example_level=comments.get("example_level") is True,
            shows_errors=comments.get("shows_errors") is True,
        )
    except CliplineError as error:
        problems.append(f"the rounds cannot be accounted ({error}): no guarantee is shown")
        return None
    samplings = {str(event.sampling) for event in ledger.events if event.statistic is None}
    promise = Promise(
        words=str(guarantee),
        epsilon=finite(guarantee.epsilon),
        delta=guarantee.delta,
        relation=str(guarantee.relation),
        sampling="; ".join(sorted(samplings)),
        accountant=guarantee.accountant,
        rounds=guarantee.rounds,
    )
    if missing := understated(promise, columns, card):
        problems += [f"{words}: the files contradict each other, and no guarantee is shown" for words in missing]
        return None
    problems += oddities(promise, settings, columns, card)
    return promise


def _state(path: Path, done: int, planned: object, card: Mapping[str, Any]) -> str:
    """Whether the run has ended, by its files: a model is written at the end, a checkpoint stays to resume from."""
    if not (path / MODEL).exists():
        return "not ended"
    if (path / CHECKPOINT).exists():
        return "interrupted"
    if card.get("stopped") == "early":
        return "early"
    return "budget" if isinstance(planned, int) and done < planned else "finished"
