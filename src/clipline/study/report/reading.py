"""Reads the runs of a report: run directories, also of runs that go on or were killed, and studies."""

from __future__ import annotations

import ast
import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ...errors import CliplineError, RunError
from ...metric_direction import better_facts
from ...privacy.accountant import account
from ...privacy.events import FixedSizeSampling, GaussianEvent, GroupedPoissonSampling, PoissonSampling, sampling_named
from ...privacy.feasibility import noise_norm
from ...privacy.guarantee import Guarantee
from ...privacy.ledger import Ledger
from ...privacy.relations import Relation
from ...tasks import main_metric_of
from ...training.diagnosis import BestAndLast, Known, best_and_last, diagnose
from .tables import Figure, read_figures

# Columns that are not metrics. Others that start with `unprivate_` are not either.
RELEASED = ("clip", "fraction_within", "epsilon", "delta")
UNPRIVATE = "unprivate_"


@dataclass(frozen=True)
class Promise:
    """The guarantee of a run as far as it is known: `epsilon` is None where nothing is promised."""

    words: str
    epsilon: float | None
    delta: float | None
    relation: str | None
    sampling: str | None
    accountant: str | None
    rounds: int | None


@dataclass(frozen=True)
class ReportedRun:
    """One run: its rounds as columns, its settings, its promise and where it ran. Values are plain."""

    name: str
    path: str
    of_study: bool  # a record of a study, or else a run directory
    state: str  # "finished", "budget", "early", "interrupted", "diverged" or "not ended"
    round: Sequence[int] = ()  # rounds done, from 1 on
    columns: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # of the same length
    final: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # flat
    resolved: Mapping[str, Any] = field(default_factory=dict)  # what followed from the settings
    about: Mapping[str, Any] = field(default_factory=dict)  # task, data, whom the metrics are about
    circumstances: Mapping[str, Any] = field(default_factory=dict)
    promise: Promise | None = None
    planned: str | None = None  # the guarantee of all rounds asked for, in words
    noise_multiplier: float | None = None  # of a whole round
    problems: Sequence[str] = ()  # what could not be read
    findings: Sequence[str] = ()  # why the training failed, if it did
    best: BestAndLast | None = None  # of the main metric

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that were measured, the task's own first: as the run says, or as the paper has it."""
        names = [name for name in self.columns if name not in RELEASED and not name.startswith(UNPRIVATE)]
        main = self.about.get("metric") or self.resolved.get("metric") or main_metric_of(self.task)
        return sorted(names, key=lambda name: name != main)  # the others stay in order

    @property
    def planned_rounds(self) -> int | None:
        """How many rounds were asked for."""
        rounds = self.setting("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def task(self) -> str:
        """The name of the task, or nothing."""
        return str(self.about.get("task") or self.settings.get("task") or "")

    def setting(self, name: str) -> Any:
        """A setting by the name it has on the command line, also where the run was made by the library."""
        for known in (name, *_LIBRARY.get(name, ())):
            if self.settings.get(known) is not None:
                return self.settings[known]
        return None

    @property
    def clip(self) -> str:
        """How updates were clipped, in a few words."""
        kind = self.setting("clip")
        if self.unclipped:
            return "none"
        if kind in ("quantile", "QuantileClip"):
            return f"quantile {_number(self.target)}"
        if kind in ("fixed", "FixedClip"):
            return f"fixed {_number(self.setting('fixed_clip'))}"
        return f"fixed {_number(kind)}" if isinstance(kind, int | float) else str(kind or "unknown")

    @property
    def target(self) -> float | None:
        """The fraction of users that the clip aims to have within; None for a clip that does not adapt."""
        adapts = self.setting("clip") in ("quantile", "QuantileClip")
        return finite(self.setting("quantile")) if adapts else None

    @property
    def unclipped(self) -> bool:
        """Whether updates of any norm were taken as they are."""
        kind = self.setting("clip")
        endless = self.setting("fixed_clip") == float("inf") and kind in ("fixed", "FixedClip")
        return kind in ("none", float("inf")) or endless


# Names in a settings file that `RunDirectory` wrote itself: the attributes of the objects.
_LIBRARY = {
    "clip": ("clip.type",),
    "quantile": ("clip.quantile",),
    "fixed_clip": ("clip.clip", "clip.value"),
    "noise_source": ("privacy.noise_source",),
    "population_size": ("privacy.population_size",),
    "sampling": ("privacy.sampling",),
    "count_stddev": ("privacy.count_stddev",),
    "relation": ("privacy.relation",),
    "delta": ("privacy.delta",),
}


def finite(value: object) -> float | None:
    """A number, or None for what is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _number(value: Any) -> str:
    number = finite(value)
    return "?" if number is None else f"{number:g}"


_SAME = 1e-9  # relative: numbers that were copied from one file to another
_CLOSE = 0.01  # relative: an epsilon that another version's accountant may have computed


def read_card(model: Path) -> dict[str, Any]:
    """The card in the metadata of model.safetensors; empty where there is no model yet, or one without a card."""
    try:
        with safe_open(str(model), framework="numpy") as file:
            card = json.loads(file.metadata()["card"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return card if isinstance(card, dict) and isinstance(card.get("guarantee"), dict) else {}


def broken_terms(
    ledger: Ledger,
    settings: Mapping[str, Any],
    resolved: Mapping[str, Any],
    columns: Mapping[str, Sequence[float | None]],
    card: Mapping[str, Any],
) -> list[str]:
    """Where the files differ in what a guarantee is computed from: then none can be claimed.

    What a file does not have is not compared. Somebody who changes all files alike is not found out.
    """
    found = []
    events = [event for event in ledger.events if event.statistic is None]
    z = finite(resolved.get("noise_multiplier"))
    for event in events:
        if z is not None and not math.isclose(event.noise_multiplier, z, rel_tol=_SAME):
            found.append(
                f"ledger.jsonl charges a noise multiplier of {event.noise_multiplier:g}, settings.toml has {z:g}"
            )
    cohort = settings.get("cohort_size")
    users = settings.get("population_size") or settings.get("privacy.population_size") or resolved.get("users")
    if isinstance(cohort, int) and isinstance(users, int) and users > 0:
        of = f"settings.toml has {cohort:,} of {users:,} users"
        found += [
            f"ledger.jsonl charges {event.sampling}, {of}" for event in events if not _drawn(event, cohort, users)
        ]
    promised = card.get("guarantee", {})
    deltas = {"settings.toml": resolved.get("delta"), "metrics.jsonl": _last(columns.get("delta", ())),
              "the model's card": promised.get("delta")}  # fmt: skip
    found += _differing("delta", {name: number for name, value in deltas.items() if (number := finite(value))})
    relations = {"settings.toml": resolved.get("relation"), "the model's card": promised.get("relation")}
    if len({value for value in relations.values() if isinstance(value, str)}) > 1:
        found.append("relation is " + ", ".join(f"{value} in {name}" for name, value in relations.items()))
    source = settings.get("noise_source") or settings.get("privacy.noise_source")
    if source in ("seed", "system") and promised.get("from_seed") is (source == "system"):
        found.append(f"noise comes from the {source} by settings.toml, and not by the model's card")
    return list(dict.fromkeys(found))


def understated(promise: Promise, columns: Mapping[str, Sequence[float | None]], card: Mapping[str, Any]) -> list[str]:
    """Where metrics or card say more than the rounds charged come to: then the ledger lacks something."""
    said = {
        "metrics.jsonl": _last(columns.get("epsilon", ())),
        "the model's card": card.get("guarantee", {}).get("epsilon"),
    }
    return [
        f"ledger.jsonl comes to epsilon {promise.epsilon:.3g}, and {name} says {number:.3g}"
        for name, value in said.items()
        if promise.epsilon is not None and (number := finite(value)) and number > promise.epsilon * (1 + _CLOSE)
    ]


def oddities(
    promise: Promise,
    settings: Mapping[str, Any],
    columns: Mapping[str, Sequence[float | None]],
    card: Mapping[str, Any],
) -> list[str]:
    """What a reader should know of, and what leaves the guarantee as it is: numbers below what was charged."""
    found = list[str]()
    if promise.epsilon is None:
        return found
    asked = [
        finite(settings.get(name)) for name in ("epsilon", "max_epsilon", "privacy.epsilon", "privacy.max_epsilon")
    ]
    least = min((number for number in asked if number is not None), default=math.inf)
    if promise.epsilon > least * (1 + _CLOSE):
        found.append(f"settings.toml asks for epsilon {least:g}, and the rounds charged come to {promise.epsilon:.3g}")
    last, done = _last(columns.get("epsilon", ())), len(columns.get("epsilon", ()))
    whole = card.get("stopped") == "finished" and done == promise.rounds
    if whole and last is not None and last < promise.epsilon * (1 - _CLOSE):
        found.append(f"metrics.jsonl ends at epsilon {last:.3g}, and the rounds charged come to {promise.epsilon:.3g}")
    told = card.get("guarantee", {})
    stated = finite(told.get("epsilon"))
    if stated is not None and told.get("rounds") == promise.rounds and stated < promise.epsilon * (1 - _CLOSE):
        found.append(
            f"the model's card says epsilon {stated:.3g}, and the rounds charged come to {promise.epsilon:.3g}"
        )
    return found


def _drawn(event: GaussianEvent, cohort: int, users: int) -> bool:
    """Whether an event is of the sampling that settings tell of; of others than Poisson and fixed size, unknown."""
    if isinstance(event.sampling, FixedSizeSampling):
        return (event.sampling.cohort_size, event.sampling.population_size) == (cohort, users)
    groups = event.sampling.bands if isinstance(event.sampling, GroupedPoissonSampling) else 1
    is_poisson = isinstance(event.sampling, PoissonSampling | GroupedPoissonSampling)
    return not is_poisson or math.isclose(event.sampling.rate, groups * cohort / users, rel_tol=_SAME)


def _differing(name: str, values: Mapping[str, float]) -> list[str]:
    if len(values) < 2 or math.isclose(min(values.values()), max(values.values()), rel_tol=_SAME):
        return []
    return [f"{name} is " + ", ".join(f"{value:.4g} in {file}" for file, value in values.items())]


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


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
    return ledger.add(ledger.next_event, covered - ledger.rounds)


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


STUDY, RUNS = "study.json", "runs"
_ACCOUNTED = 8  # rounds in which epsilon is computed
_OF_DATA = ("data", "data_source", "measured_on")  # what circumstances say of the data
_RESOLVED = ("population_size", "cohort_size", "noise_multiplier", "delta_noise_multiplier", "count_stddev")


def is_study_directory(path: Path) -> bool:
    """Whether a folder holds a study."""
    return (path / STUDY).is_file() or ((path / RUNS).is_dir() and any((path / RUNS).glob("*.json")))


def read_records(path: Path) -> tuple[list[ReportedRun], list[str]]:
    """The runs of a study and what could not be read of it."""
    from ..record import RunRecord

    runs, problems = [], []
    facts = _facts_by_task(path / STUDY)
    for file in sorted((path / RUNS).glob("*.json")):
        try:
            text = file.read_text(encoding="utf-8")
            record = json.loads(text)
            run = _recorded_run(file, record)
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
    from ..directory import StudyDirectory, experiment_kinds

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


def _recorded_run(file: Path, record: Mapping[str, Any]) -> ReportedRun:
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
    promise = _recorded_promise(guarantee)
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
        if (
            recorded is None
            or not done
            or not math.isclose(_recorded_epsilon(event, rounds, *terms), recorded, rel_tol=1e-6)
        ):
            return {}
        places = {round(place * (len(done) - 1) / (_ACCOUNTED - 1)) for place in range(_ACCOUNTED)}
        return {"epsilon": [_recorded_epsilon(event, t, *terms) if i in places else None for i, t in enumerate(done)]}
    except (KeyError, TypeError, ValueError, ArithmeticError, CliplineError):
        return {}


@lru_cache(maxsize=4096)
def _recorded_epsilon(event: GaussianEvent, rounds: int, delta: float, relation: str) -> float:
    return account(Ledger().add(event, rounds), delta=delta, relation=Relation.named(relation)).epsilon


def _recorded_promise(guarantee: Mapping[str, Any]) -> Promise | None:
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


@dataclass(frozen=True)
class Collected:
    """All that one report is about."""

    paths: tuple[Path, ...]
    runs: tuple[ReportedRun, ...]
    figures: tuple[Figure, ...] = ()
    problems: tuple[str, ...] = ()
    findings: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of a study's experiments, in words


def collect(paths: Iterable[str | Path]) -> Collected:
    """Read run directories, study directories and folders of these; what is none is refused, with what was looked for.

    A run that was interrupted, or goes on, is read as far as it has come.
    """
    found = tuple(dict.fromkeys(Path(path) for path in paths))
    if not found:
        raise RunError("paths=() must name at least one run: give a run directory or a study directory")
    runs: list[ReportedRun] = []
    figures: list[Figure] = []
    problems: list[str] = []
    for path in found:
        read_runs, read_tables, read_problems = _read(path)
        runs += read_runs
        figures += read_tables
        problems += read_problems
    findings = [one for path in found if is_study_directory(path) for one in read_findings(path).items()]
    return Collected(found, tuple(_named_apart(runs)), tuple(figures), tuple(problems), tuple(findings))


def _read(path: Path) -> tuple[list[ReportedRun], list[Figure], list[str]]:
    if not path.exists():
        raise RunError(f"path={str(path)!r} does not exist: give a run directory or a study directory")
    if not path.is_dir():
        raise RunError(f"path={str(path)!r} must be a folder, and it is a file: give the folder that it is in")
    if is_run_directory(path):
        return [read_run_directory(path)], [], []
    if is_study_directory(path):
        runs, problems = read_records(path)
        metrics = {run.task: run.metrics[0] for run in reversed(runs) if run.metrics}
        figures, unread = read_figures(path, metrics, {run.task: run.about for run in runs})
        return runs, figures, [*problems, *unread]
    inside = [read_run_directory(folder) for folder in sorted(path.iterdir()) if is_run_directory(folder)]
    figures, unread = read_figures(path, {})
    if inside or figures:
        return inside, figures, unread
    raise RunError(
        f"path={str(path)!r} holds no run: it has neither metrics.jsonl, as clipline train writes it, nor study.json, "
        "as clipline reproduce does, nor folders with one: give a run directory or a study directory"
    )


def _named_apart(runs: list[ReportedRun]) -> list[ReportedRun]:
    """The runs with names that differ: those of two folders of one name have the folder above in front."""
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set()
    named: dict[str, int] = {}
    apart = []
    for run in runs:
        name = f"{Path(run.path).resolve().parent.name}/{run.name}" if run.name in twice else run.name
        named[name] = named.get(name, 0) + 1
        apart.append(replace(run, name=name if named[name] == 1 else f"{name} ({named[name]})"))
    return apart
