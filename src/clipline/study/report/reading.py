"""Reads the runs of a report: run directories, also of runs that go on or were killed, and studies.

Where the files of a run directory contradict each other, no epsilon is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import CliplineError, RunError
from ...metric_direction import better_facts
from ...privacy.feasibility import noise_norm
from ...tasks import main_metric_of
from ...training.diagnosis import BestAndLast, Known, best_and_last, diagnose
from ...training.run_files import MODEL, RunFiles, can_go_on, flat, is_run_directory
from ...trust.verify import Verified, verify

if TYPE_CHECKING:
    from ..directory import Figure
    from ..record import RunRecord

Columns = Mapping[str, Sequence[float | None]]

# Columns that are not metrics. Others that start with `unprivate_` are not either.
RELEASED = ("clip", "fraction_within", "epsilon", "delta")
UNPRIVATE = "unprivate_"
STUDY, RUNS = "study.json", "runs"
_CIRCUMSTANCES = ("clipline", "python", "torch", "numpy", "device", "engine", "machine")
_PROMISED = ("epsilon", "delta", "relation", "sampling", "accountant", "rounds")
_OF_DATA = ("data", "data_source", "measured_on")  # what circumstances say of the data
_RESOLVED = ("population_size", "cohort_size", "noise_multiplier", "delta_noise_multiplier", "count_stddev")
# Names in a settings file that `RunDirectory` wrote itself: the attributes of the objects.
_LIBRARY = {
    "clip": ("clip.type",),
    "quantile": ("clip.quantile",),
    "fixed_clip": ("clip.clip", "clip.value"),
    **{
        name: (f"privacy.{name}",)
        for name in ("noise_source", "population_size", "sampling", "count_stddev", "relation", "delta")
    },
}


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
    columns: Columns = field(default_factory=dict)  # of the same length
    final: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # flat
    resolved: Mapping[str, Any] = field(default_factory=dict)  # what followed from the settings
    about: Mapping[str, Any] = field(default_factory=dict)  # task, data, whom the metrics are about
    circumstances: Mapping[str, Any] = field(default_factory=dict)
    promise: Promise | None = None
    planned: str | None = None  # the guarantee of all rounds asked for, in words
    noise_multiplier: float | None = None  # of a whole round
    seal: str | None = None  # of a run directory whose run has ended
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
        return _setting(self.settings, name)

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
        return kind in ("none", math.inf) or (self.setting("fixed_clip") == math.inf and kind in ("fixed", "FixedClip"))


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
    runs, problems = list[ReportedRun](), list[str]()
    figures: list[Figure] = []
    findings = list[tuple[str, tuple[str, ...]]]()
    for path in found:
        read_runs, read_problems = _read(path)
        runs += read_runs
        problems += read_problems
        if is_study_directory(path):
            said, drawn = _experiments(path)
            findings += said.items()
            figures += drawn
    return Collected(found, tuple(_named_apart(runs)), tuple(figures), tuple(problems), tuple(findings))


def _read(path: Path) -> tuple[list[ReportedRun], list[str]]:
    if not path.exists():
        raise RunError(f"path={str(path)!r} does not exist: give a run directory or a study directory")
    if not path.is_dir():
        raise RunError(f"path={str(path)!r} must be a folder, and it is a file: give the folder that it is in")
    if is_run_directory(path):
        return [read_run_directory(path)], []
    if is_study_directory(path):
        return _read_study(path)
    if inside := [read_run_directory(folder) for folder in sorted(path.iterdir()) if is_run_directory(folder)]:
        return inside, []
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


# Run directories


def read_run_directory(path: Path) -> ReportedRun:
    """The run in a folder. What cannot be read is left out and named in `problems`.

    Without a ledger no epsilon is shown, nor where the files contradict each other, by `trust.verify`. A round that was
    charged counts, even if a crash lost its metrics.
    """
    found = verify(path)
    files = found.files
    rounds, notes = files.rounds, files.notes
    names = dict.fromkeys(name for line in rounds for name in line if name != "round")
    columns = {name: [finite(line.get(name)) for line in rounds] for name in names}
    noises = [event.noise_multiplier for event in files.ledger.events] if files.ledger is not None else []
    run = ReportedRun(
        name=path.resolve().name,
        path=str(path),
        of_study=False,
        state=_state(path, len(rounds), files),
        round=[int(line["round"]) + 1 for line in rounds],
        columns=columns,
        final={name: _last(columns[name]) for name in names if name not in RELEASED and not name.startswith(UNPRIVATE)},
        settings=files.settings,
        resolved={name: value for name, value in notes.items() if name not in (*_CIRCUMSTANCES, "planned")},
        about=files.facts,
        circumstances={name: notes[name] for name in _CIRCUMSTANCES if name in notes},
        promise=_promise(found),
        planned=str(notes["planned"]) if "planned" in notes else None,
        noise_multiplier=min(noises) if noises else finite(notes.get("noise_multiplier")),
        seal=None if can_go_on(path) or not (path / MODEL).is_file() else found.seal,
        problems=[*files.problems, *(f"{words}: no guarantee is shown" for words in found.contradictions)],
    )
    known = _known(run, files.card.get("model_rounds"))
    return replace(run, findings=[str(one) for one in diagnose(rounds, known)], best=best_and_last(rounds, known))


def _known(run: ReportedRun, kept: object) -> Known:
    """What the files tell of a run, to judge its rounds by; of the model in it `kept` rounds are left."""
    z = finite(run.resolved.get("delta_noise_multiplier"))
    cohort, parameters = (
        value if isinstance(value, int) and value > 0 else None
        for value in (run.setting("cohort_size"), run.resolved.get("parameters"))
    )
    lasting = finite(run.resolved.get("lasting_share", 1.0)) or 1.0
    return Known(
        target=run.target,
        cohort_size=cohort,
        count_stddev=finite(run.resolved.get("count_stddev")),
        noise_norm=noise_norm(z * lasting, cohort, parameters) if z is not None and cohort and parameters else None,
        metric=str(run.resolved["metric"]) if "metric" in run.resolved else None,
        facts={name: str(value) for name, value in run.about.items()},
        kept=kept if isinstance(kept, int) and 0 < kept < len(run.round) else None,
        ended=run.state not in ("interrupted", "not ended"),
    )


def _state(path: Path, done: int, files: RunFiles) -> str:
    """Whether the run has ended, by its files: a model is written at the end, a checkpoint stays to resume from."""
    planned = files.settings.get("rounds")
    if not (path / MODEL).exists():
        return "not ended"
    if can_go_on(path):
        return "interrupted"
    if files.card.get("stopped") == "early":
        return "early"
    return "budget" if isinstance(planned, int) and done < planned else "finished"


def _promise(found: Verified) -> Promise | None:
    """The guarantee of all rounds charged; None where its terms are not known or the files contradict each other."""
    guarantee = found.guarantee
    if guarantee is None or found.contradictions:
        return None
    return Promise(
        words=str(guarantee),
        epsilon=finite(guarantee.epsilon),
        delta=guarantee.delta,
        relation=str(guarantee.relation),
        sampling="; ".join(sorted({str(event.sampling) for event in found.ledger.events if event.statistic is None})),
        accountant=guarantee.accountant,
        rounds=guarantee.rounds,
    )


# Studies


def is_study_directory(path: Path) -> bool:
    """Whether a folder holds a study."""
    return (path / STUDY).is_file() or ((path / RUNS).is_dir() and any((path / RUNS).glob("*.json")))


def _read_study(path: Path) -> tuple[list[ReportedRun], list[str]]:
    """The runs of a study, by task, clip and noise, and what could not be read of it."""
    from ..directory import StudyDirectory  # with torch, which a report of trainings can do without

    runs, problems, directory = list[ReportedRun](), list[str](), StudyDirectory(path)
    facts = dict(map(_facts, filter(_of_protocol, directory.experiments.values())))
    for name in directory.ids():
        try:
            record = directory.record(name)
        except RunError as error:
            problems.append(f"{error}; it is left out")
        else:
            runs += [] if record is None else [_recorded_run(path / RUNS / f"{name}.json", record, facts)]
    return sorted(runs, key=_order), problems


def _experiments(path: Path) -> tuple[dict[str, tuple[str, ...]], list[Figure]]:
    """What the experiments of a study have found, made anew from the runs: sentences by name, and charts.

    Those that are not finished, or of a kind that no package knows, are left out.
    """
    from ..directory import StudyDirectory, experiment_kinds

    try:
        directory = StudyDirectory(path)
        examined = [kind.examine(directory) for kind in experiment_kinds().values()]
    except CliplineError:
        return {}, []
    said = {name: tuple(lines) for one in examined for name, lines in one.findings.items()}
    return said, [figure for one in examined for figure in one.figures]


def _order(run: ReportedRun) -> tuple[Any, ...]:
    """The ids that name the files are in no order."""
    rate, seed = finite(run.setting("server_lr")), finite(run.setting("seed"))
    clip = finite(run.setting("quantile")) if run.target is not None else finite(run.setting("clip"))
    kind = 0 if run.unclipped else 1 if run.target is not None else 2
    return run.task, kind, clip or 0.0, run.noise_multiplier or 0.0, rate or 0.0, seed or 0.0


def _of_protocol(asked: Any) -> bool:
    """Whether an experiment of a study has a protocol; those of tune have none."""
    return isinstance(asked, Mapping) and isinstance(asked.get("protocol"), Mapping)


def _facts(asked: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """A task, what it was trained on, and of a metric of one's own its name and which way it is better."""
    protocol, about = asked["protocol"], {"trained_on": str(asked.get("data"))}
    metric, lower = protocol.get("own_metric"), protocol.get("own_lower")
    if metric is not None:  # that of a task of the paper is known
        about |= {"metric": str(metric)}
        about |= {} if lower is None else better_facts({str(metric): "lower" if lower else "higher"})
    return str(protocol.get("task")), about


def _recorded_run(file: Path, record: RunRecord, facts: Mapping[str, Mapping[str, str]]) -> ReportedRun:
    """One record as a run."""
    columns, where, guarantee = dict(record.rounds), flat(record.circumstances), record.guarantee or {}
    of_run = {name: value for name, value in record.identity.items() if name != "settings"}
    of_run |= {name: where.pop(name) for name in _OF_DATA if name in where}
    noise = guarantee.get("noise_multiplier", record.settings.get("noise_multiplier"))
    return ReportedRun(
        name=record.id[:10],
        path=str(file),
        of_study=True,
        state=record.outcome,
        round=[number + 1 for number in columns.pop("round")],
        columns=columns,
        final=record.final,
        settings=flat(record.settings),
        about={**facts.get(str(of_run.get("task")), {}), **{n: v for n, v in of_run.items() if v is not None}},
        resolved={name: guarantee[name] for name in _RESOLVED if guarantee.get(name) is not None},
        circumstances={name: value for name, value in where.items() if not name.startswith(UNPRIVATE)},
        promise=Promise(guarantee.get("in_words", ""), *map(guarantee.get, _PROMISED)) if guarantee else None,
        noise_multiplier=finite(noise),
    )


def finite(value: object) -> float | None:
    """A number, or None for what is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _setting(settings: Mapping[str, Any], name: str) -> Any:
    known = (settings.get(key) for key in (name, *_LIBRARY.get(name, ())))
    return next((value for value in known if value is not None), None)


def _number(value: Any) -> str:
    number = finite(value)
    return "?" if number is None else f"{number:g}"


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)
