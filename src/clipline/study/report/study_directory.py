"""Reads the records of a study's runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import CliplineError, RunError
from ...metric_direction import better_facts
from ...privacy.accountant import account
from ...privacy.events import GaussianEvent, sampling_named
from ...privacy.ledger import Ledger
from ...privacy.relations import Relation
from .run import UNPRIVATE, Promise, ReportedRun, finite
from .run_directory import flat

STUDY, RUNS = "study.json", "runs"
_ACCOUNTED = 8  # rounds in which epsilon is computed
_OF_DATA = ("data", "data_source", "measured_on")  # what circumstances say of the data
_RESOLVED = ("population_size", "cohort_size", "noise_multiplier", "delta_noise_multiplier", "count_stddev")


def is_study_directory(path: Path) -> bool:
    """Whether a folder holds a study."""
    return (path / STUDY).is_file() or ((path / RUNS).is_dir() and any((path / RUNS).glob("*.json")))


def read_records(path: Path) -> tuple[list[ReportedRun], list[str]]:
    """The runs of a study and what could not be read of it."""
    from ..runs.record import RunRecord  # with torch, which a report of trainings can do without

    runs, problems = [], []
    facts = _facts_by_task(path / STUDY)
    for file in sorted((path / RUNS).glob("*.json")):
        try:
            text = file.read_text(encoding="utf-8")
            record = json.loads(text)
            run = _run(file, record)
            runs.append(replace(run, about={**facts.get(run.task, {}), **run.about}))
            if "checksum" not in record:
                problems.append(f"{RUNS}/{file.name} has no checksum: whether its numbers were changed cannot be told")
                continue
            RunRecord.from_json(text, f"{RUNS}/{file.name}")
        except RunError as error:
            problems.append(f"{error}; its numbers are shown and mean nothing")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            problems.append(f"{RUNS}/{file.name} cannot be read as a run ({error!r}): it is left out")
    return sorted(runs, key=_order), problems


def read_findings(path: Path) -> dict[str, tuple[str, ...]]:
    """What the experiments of a study have found, a sentence each, by name (fig7-emnist_cr): made anew from the runs.

    Those that are not finished, or of a kind that no package knows, are left out.
    """
    from ..kinds import experiment_kinds
    from ..runs.directory import StudyDirectory

    try:
        directory = StudyDirectory(path)
        found = [kind.summaries(directory) for kind in experiment_kinds().values()]
    except CliplineError:
        return {}
    return {name: tuple(lines) for one in found for name, lines in one.items()}


def _order(run: ReportedRun) -> tuple[Any, ...]:
    """By task, clip and noise: the ids that name the files are in no order."""
    rate, seed = finite(run.setting("server_lr")), finite(run.setting("seed"))
    clip = finite(run.setting("quantile")) if run.target is not None else finite(run.setting("clip"))
    kind = 0 if run.unclipped else 1 if run.target is not None else 2
    return run.task, kind, clip or 0.0, run.noise_multiplier or 0.0, rate or 0.0, seed or 0.0


def _facts_by_task(file: Path) -> dict[str, dict[str, str]]:
    """What each task was trained on, in words, and of a metric of one's own its name and which way it is better."""
    try:
        asked = json.loads(file.read_text(encoding="utf-8"))["experiments"].values()
        protocols = [(one["protocol"], str(one["data"])) for one in asked if "protocol" in one]  # not those of tune
        return {str(protocol["task"]): {"trained_on": data, **_better(protocol)} for protocol, data in protocols}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}  # a study of another kind


def _better(protocol: Mapping[str, Any]) -> dict[str, str]:
    metric, lower = protocol.get("own_metric"), protocol.get("own_lower")
    if metric is None:  # a task of the paper, whose metric is known
        return {}
    said = {} if lower is None else better_facts({str(metric): "lower" if lower else "higher"})
    return {"metric": str(metric), **said}


def _run(file: Path, record: Mapping[str, Any]) -> ReportedRun:
    """One record as a run."""
    identity, columns = record["identity"], dict(record["rounds"])
    done = [int(number) + 1 for number in columns.pop("round")]
    numbers = {str(name): [finite(value) for value in column] for name, column in columns.items()}
    if any(len(column) != len(done) for column in numbers.values()):
        raise ValueError("columns of different lengths")
    parts = {name: value for name, value in identity.items() if name != "settings"}
    settings = flat(identity.get("settings") or {})
    outcome = str(record["outcome"])
    guarantee = record.get("guarantee") or {}
    promise = _promise(guarantee)
    numbers |= _epsilon_column(guarantee, done)
    noise = finite(guarantee.get("noise_multiplier"))
    circumstances = flat(record.get("circumstances") or {})
    return ReportedRun(
        name=str(record.get("id") or file.stem)[:10],
        path=str(file),
        of_study=True,
        state=outcome if outcome in ("finished", "budget", "diverged") else "not ended",
        round=done,
        columns=numbers,
        final={str(name): finite(value) for name, value in (record.get("final") or {}).items()},
        settings=settings,
        about={
            **{name: value for name, value in flat(parts).items() if value is not None},
            **{name: circumstances[name] for name in _OF_DATA if name in circumstances},
        },
        resolved={name: guarantee[name] for name in _RESOLVED if guarantee.get(name) is not None},
        circumstances={
            name: value
            for name, value in circumstances.items()
            if not name.startswith(UNPRIVATE) and name not in _OF_DATA
        },
        promise=promise,
        noise_multiplier=finite(settings.get("noise_multiplier")) if noise is None else noise,
    )


def _epsilon_column(guarantee: Mapping[str, Any], done: Sequence[int]) -> dict[str, list[float | None]]:
    """Epsilon so far in a few of the rounds, which a record does not hold: accounted again from what it says.

    Left out where that does not arrive at the epsilon on record.
    """
    try:
        sampling = sampling_named(guarantee["sampling"], guarantee["cohort_size"], guarantee["population_size"])
        event = GaussianEvent(sampling, guarantee["noise_multiplier"])
        terms = guarantee["delta"], guarantee["relation"]
        recorded, rounds = guarantee["epsilon"], guarantee["rounds"]
        if recorded is None or not done or not math.isclose(_epsilon(event, rounds, *terms), recorded, rel_tol=1e-6):
            return {}
        places = {round(place * (len(done) - 1) / (_ACCOUNTED - 1)) for place in range(_ACCOUNTED)}
        return {"epsilon": [_epsilon(event, t, *terms) if i in places else None for i, t in enumerate(done)]}
    except (KeyError, TypeError, ValueError, ArithmeticError, CliplineError):
        return {}


@lru_cache(maxsize=4096)
def _epsilon(event: GaussianEvent, rounds: int, delta: float, relation: str) -> float:
    return account(Ledger().add(event, rounds), delta=delta, relation=Relation.named(relation)).epsilon


def _promise(guarantee: Mapping[str, Any]) -> Promise | None:
    """The guarantee as the record has it."""
    if not guarantee:
        return None
    rounds = finite(guarantee.get("rounds"))
    return Promise(
        words=str(guarantee.get("in_words") or ""),
        epsilon=finite(guarantee.get("epsilon")),
        delta=finite(guarantee.get("delta")),
        relation=_text(guarantee.get("relation")),
        sampling=_text(guarantee.get("sampling") or guarantee.get("sampler")),
        accountant=_text(guarantee.get("accountant")),
        rounds=None if rounds is None else int(rounds),
    )


def _text(value: object) -> str | None:
    return None if value is None else str(value)
