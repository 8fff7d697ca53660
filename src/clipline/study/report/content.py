"""Everything that the page shows, as plain JSON: the same for a file and for the page of a running training."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import __version__
from ...metric_direction import lower_is_better
from ...plotting import ACCENT, ORDERED, ORDERED_DARK, PALETTE, PALETTE_DARK
from ...privacy.guarantee import delta_rounded_up, rounded_up
from ...privacy.relations import Relation
from ...random.streams import GUESSABLE
from ...tasks import is_task_file
from .reading import UNPRIVATE, Collected, ReportedRun

if TYPE_CHECKING:
    from ..directory import Figure

MUCH = 10.0  # an epsilon above which little is promised
_HIDDEN = {  # what a report says in the place of a seed, by where the noise came from
    "seed": "not shown: whoever knows it can subtract the noise",
    "none": "not shown: another run may draw its noise from it",
    "system": "not shown: cohorts and noise came from the operating system, not from it",
}
_INSIDERS = "other examples of the training users"


def words(run: ReportedRun) -> str:
    """The statement to quote."""
    if run.promise is not None and run.promise.words:
        return run.promise.words
    if not run.round and not run.of_study:
        return "Nothing was released yet."
    return "No guarantee is on record: claim none."


def basis(run: ReportedRun) -> list[tuple[str, str]]:
    """Everything that the statement rests on, as names and values; what is not known is left out."""
    promise, resolved = run.promise, {**run.settings, **run.resolved}
    relation = None if promise is None else promise.relation
    users = run.setting("population_size") or run.resolved.get("population_size")
    counted = resolved.get("users")
    epsilon = None if promise is None else promise.epsilon
    adapts = run.target is not None
    meanings = {one.value: one.meaning for one in Relation}
    rows: list[tuple[str, Any]] = [
        ("epsilon", None if promise is None else
         "infinite: nothing is promised" if epsilon is None else rounded_up(epsilon, 3)),
        ("delta", None if promise is None or promise.delta is None else delta_rounded_up(promise.delta)),
        ("sampler", None if promise is None else promise.sampling),
        ("neighbouring relation", None if relation is None else f"{relation}: {meanings.get(relation, 'unknown')}"),
        ("accountant", None if promise is None else promise.accountant),
        ("rounds charged", None if promise is None else promise.rounds),
        ("population", f"{users:,} users, declared beforehand" if isinstance(users, int) else
         f"{counted:,} users, counted in the data: their number is public" if isinstance(counted, int) else None),
        ("users a round", run.setting("cohort_size")),
        ("noise of a round, z", _plain(run.noise_multiplier)),
        ("of it on the updates, z_delta", _plain(resolved.get("delta_noise_multiplier"))),
        ("and on the count within the clip", f"{_plain(resolved['count_stddev'])} users" if adapts and
         resolved.get("count_stddev") is not None else None if adapts else "no count is released"),
        ("clip", run.clip),
        ("source of noise", _source(run)),
        ("seal", run.seal),
    ]  # fmt: skip
    return [(name, str(value)) for name, value in rows if value is not None and value != ""]


def warnings(run: ReportedRun) -> list[str]:
    """What makes a run, or a part of its record, not private: for the red banner."""
    found = []
    promise = run.promise
    if run.noise_multiplier == 0:
        found.append("no noise was added")
    elif promise is not None and promise.epsilon is None:
        found.append("no finite epsilon")
    elif promise is None and run.round:
        found.append("no guarantee is on record")
    if run.unclipped:
        found.append("updates were not clipped")
    if run.resolved.get("shows_errors") is True:
        found.append("errors of users are shown (on_error='raise'), which no guarantee covers")
    relation = promise.relation if promise is not None else run.resolved.get("relation") or run.setting("relation")
    if relation == Relation.PAPER.value:
        found.append("accounted in the paper's convention, which is not a guarantee")
    private_noise = run.noise_multiplier is None or run.noise_multiplier > 0
    if private_noise and run.setting("noise_source") == "seed" and _seed_known(run):
        found.append("the seed of its noise is known or easily guessed: whoever has it can subtract the noise")
    unprivate = [name for name in run.columns if name.startswith(UNPRIVATE)]
    if unprivate:
        shown = ", ".join(unprivate[:6]) + (" and more" if len(unprivate) > 6 else "")
        found.append(f"its record holds numbers that no guarantee covers ({shown})")
    if str(run.about.get("measured_on", "")).startswith(_INSIDERS):
        found.append("metrics were measured on other examples of the training users, which no guarantee covers")
    return found


def cautions(run: ReportedRun) -> list[str]:
    """What a reader should know and that does not break the promise."""
    found = list(run.problems)
    promise = run.promise
    if promise is not None and promise.epsilon is not None and promise.epsilon > MUCH:
        found.append(f"an epsilon above {MUCH:g} promises little")
    if run.state == "interrupted" and promise is not None and run.planned and promise.words != run.planned:
        found.append(f"it was interrupted: if because of what was seen, quote what was planned: {run.planned}")
    if run.setting("noise_source") == "seed" and (not warnings(run) or (promise is None and not _seed_known(run))):
        found.append("cohorts and noise come from the seed in settings.toml: keep that file secret")
    if run.about.get("data") == "stand-in":
        found.append("trained on a stand-in, generated: not comparable with results on the original data")
    checksum = run.about.get("unprivate_data_checksum")
    if checksum not in (None, "generated"):
        found.append("the checksum of the data is shown: where the data are private, it tells who has the same")
    return found


def shown_settings(run: ReportedRun) -> dict[str, str]:
    """The settings as text, less the seed: a report is made to be given away, also beside a run of the same seed.

    A study's record tells it anyway, and its runs are told apart by it.
    """
    shown = {name: _plain(value) for name, value in run.settings.items()}
    if "seed" in shown and not run.of_study:
        source = "none" if run.noise_multiplier == 0 else str(run.setting("noise_source"))
        shown["seed"] = _HIDDEN.get(source, "not shown")
    return shown


def _seed_known(run: ReportedRun) -> bool:
    """A study's record tells the seed of every run; that of a training is a secret if it is hard to guess."""
    seed = run.setting("seed")
    return run.of_study or (isinstance(seed, int) and seed < GUESSABLE)


def _source(run: ReportedRun) -> str | None:
    source = run.setting("noise_source")
    if source == "system":
        return "the operating system's generator"
    return "a seed, which must be kept secret" if source == "seed" else None


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


POINTS = 240  # rounds of a curve that are drawn; a chart is a few hundred pixels wide
_DIGITS = 5
_NOT_TOLD_APART = (  # settings that decide no number, or by chance alone
    "seed", "data", "device", "workers", "engine", "compiled_steps", "unprivate_timing",
    "fixed_clip", "clip", "quantile", "epsilon", "noise_multiplier", "task", "evaluate_every",
)  # fmt: skip

_OWN = ("clip", "seal")  # what a statement rests on that differs between runs and changes no promise
_VERDICTS = ("the median clip is", "clipping to the median without noise")  # of Figures 7 and 3
_SPOKEN = {"evaluate_on": "on", "server_lr": "server rate", "client_lr": "client rate"}


def content(collected: Collected) -> dict[str, Any]:
    """The whole page as JSON. Text is as it was found: whoever puts it into HTML has to escape it."""
    runs = collected.runs
    shared = _shared([shown_settings(run) for run in runs])
    where = _shared([_texts(run.circumstances) for run in runs])
    labels, differing = _labels(runs)
    return {
        "title": _title(collected),
        "scale": _scale(runs),
        "command": _command(collected),
        "use": _use(runs),
        "made": f"{time.strftime('%Y-%m-%d %H:%M')} by clipline {__version__}",
        "points": POINTS,
        "colours": {
            "light": {"runs": PALETTE, "ordered": ORDERED, "accent": ACCENT},
            "dark": {"runs": PALETTE_DARK, "ordered": ORDERED_DARK, "accent": ACCENT},
        },
        "runs": [
            {**_run(run, shared, where), "label": label, "differs": differs}
            for run, label, differs in zip(runs, labels, differing, strict=True)
        ],
        "shared_settings": list(shared.items()),
        "shared_circumstances": list(where.items()),
        "failures": _by_text((run.name, run.findings) for run in runs),
        "warnings": _by_text((run.name, warnings(run)) for run in runs),
        "cautions": [*({"text": text, "runs": []} for text in collected.problems),
                     *_by_text((run.name, cautions(run)) for run in runs)],
        "unprivate_runs": sum(bool(warnings(run)) for run in runs),
        "statements": _statements(runs),
        "findings": [_found(name, lines) for name, lines in sorted(collected.findings, reverse=True)],
        "figures": [_figure(figure) for figure in collected.figures],
    }  # fmt: skip


def _title(collected: Collected) -> str:
    if len(collected.runs) == 1 and not collected.runs[0].of_study:
        (run,) = collected.runs
        data = run.about.get("data_source") or run.about.get("data")
        named = "/".join(Path(run.path).resolve().parts[-2:])  # many are called run
        return ", ".join([*([run.task] if run.task else []), *([f"data {data}"] if data else []), f"run {named}"])
    names = [path.resolve().name or str(path) for path in collected.paths]
    if len(set(names)) < len(names):  # runs of one name in several folders
        names = [f"{path.resolve().parent.name}/{name}" for path, name in zip(collected.paths, names, strict=True)]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _scale(runs: Sequence[ReportedRun]) -> str:
    """What the title leaves out: of one run rounds, cohort and model, of several task, data and how many they are."""
    if len(runs) != 1:
        of_each = [(run.task, str(run.about.get("data_source") or run.about.get("data") or "")) for run in runs]
        shared = _shared([{"task": task, "data": data} for task, data in of_each])
        return ", ".join([*(f"{what} {name}" for what, name in shared.items() if name), f"{len(runs)} runs"])
    (run,) = runs
    users = run.setting("population_size") or run.resolved.get("users") or run.resolved.get("population_size")
    parts = [
        (run.setting("rounds"), "rounds"), (run.setting("cohort_size"), "users a round"), (users, "users"),
        (run.resolved.get("parameters"), "parameters"),
    ]  # fmt: skip
    return ", ".join(f"{number:,} {word}" for number, word in parts if isinstance(number, int))


def _command(collected: Collected) -> str:
    """What to type for the same again, or to go on where a run was interrupted."""
    run = collected.runs[0] if len(collected.runs) == 1 else None
    if run is None or run.of_study or "task" not in run.settings:
        return shlex.join(["clipline", "report", *map(str, collected.paths)])
    named = [task] if is_task_file(task := str(run.settings["task"])) else []
    again = ["--resume", run.path] if run.state == "interrupted" else ["--config", f"{run.path}/settings.toml"]
    return shlex.join(["clipline", "train", *named, *again])


def _use(runs: Sequence[ReportedRun]) -> list[str]:
    """Three lines of Python that load the model of the only run and predict with it; none where there is none."""
    if len(runs) != 1 or runs[0].of_study or runs[0].state in ("not ended", "interrupted"):
        return []
    task = str(runs[0].settings.get("task", ""))
    model = f", {task!r})" if is_task_file(task) else ")" if task else ", model)  # an untrained one of its class"
    return [
        "import clipline",
        f"saved = clipline.load({runs[0].path!r}{model}",
        'print(saved.predict("table.parquet"))',
    ]


def _run(run: ReportedRun, shared: Mapping[str, str], where: Mapping[str, str]) -> dict[str, Any]:
    settings = {name: value for name, value in shown_settings(run).items() if name not in shared}
    epsilon = None if run.promise is None else run.promise.epsilon
    delta = None if run.promise is None else run.promise.delta
    metrics = {name: _measured(run, name) for name in run.metrics}
    best = {name: (min if lower_is_better(name, run.about) else max)(m["y"]) for name, m in metrics.items() if m["y"]}
    return {
        "name": run.name,
        "path": run.path,
        "task": run.task,
        "state": run.state,
        "rounds": run.round[-1] if run.round else 0,
        "planned": run.planned_rounds,
        "clip_kind": run.clip,
        "clip_end": _last(run.columns.get("clip", ())),
        "noise": run.noise_multiplier,
        "epsilon": epsilon,
        "epsilon_text": None if epsilon is None else rounded_up(epsilon, 3),
        "delta_text": None if delta is None else delta_rounded_up(delta),
        "private": not warnings(run),
        "reasons": warnings(run),
        "on_record": run.promise is not None,
        "target": run.target,
        "final": {
            name: _short(run.final[name]) for name in dict.fromkeys([*run.metrics, *run.final]) if name in run.final
        },
        "best": {name: _short(value) for name, value in best.items()},
        "lower": [name for name in metrics if lower_is_better(name, run.about)],
        "best_and_last": None if run.best is None else asdict(run.best),
        "released": _released(run),
        "metrics": metrics,
        "settings": list(settings.items()),
        "about": list(_texts(run.about).items()),
        "circumstances": [(name, value) for name, value in _texts(run.circumstances).items() if name not in where],
        "resolved": list(_texts(run.resolved).items()),
    }


def _released(run: ReportedRun) -> dict[str, Any]:
    """Clip, fraction within and epsilon in the rounds that are drawn; true quantiles too, where they are on record.

    A curve cannot be struck through, so a run that is not private has no epsilon here.
    """
    holds = run.promise is not None and not warnings(run)
    known = ("clip", "fraction_within", "epsilon") if holds else ("clip", "fraction_within")
    names = [name for name in known if _has_numbers(run.columns.get(name))]
    of_target = f"{UNPRIVATE}quantile_{run.target:g}" if run.target is not None else ""
    names += [of_target] if _has_numbers(run.columns.get(of_target)) else []
    kept = drawn(len(run.round), [run.columns[name] for name in names])
    columns = {name: [_short(run.columns[name][i]) for i in kept] for name in names}
    if of_target in columns:
        columns["unprivate_quantile"] = columns.pop(of_target)
    return {"x": [run.round[i] for i in kept], **columns}


def _measured(run: ReportedRun, name: str) -> dict[str, Any]:
    """A metric in the rounds in which it was measured, as far as they are drawn."""
    places = [i for i, value in enumerate(run.columns[name]) if value is not None]
    values = [run.columns[name][i] for i in places]
    kept = drawn(len(places), [values])
    return {"x": [run.round[places[i]] for i in kept], "y": [_short(values[i]) for i in kept]}


def drawn(length: int, columns: Iterable[Sequence[float | None]], points: int = POINTS) -> list[int]:
    """Which of `length` rounds to draw: all if they are few, else evenly spaced ones and each column's extremes.

    First and last are always among them. Runs of one length keep the same rounds but for the extremes.
    """
    if length <= points:
        return list(range(length))
    kept = {round(place * (length - 1) / (points - 1)) for place in range(points)}
    for column in columns:
        known = [i for i, value in enumerate(column) if value is not None]
        if known:
            kept.add(min(known, key=lambda i, column=column: column[i]))  # type: ignore[misc]
            kept.add(max(known, key=lambda i, column=column: column[i]))  # type: ignore[misc]
    return sorted(kept)


def _labels(runs: Sequence[ReportedRun]) -> tuple[list[str], list[str]]:
    """What the legend calls each run, and of this what clip and noise do not say.

    A run directory goes by its name, a run of a study by what tells it from others of its task, seeds aside.
    """
    of_study = [run for run in runs if run.of_study]
    tasks, clips = {run.task for run in of_study}, {run.clip for run in of_study}
    noises = {run.noise_multiplier for run in of_study}
    named = {
        task: _not_shared([_texts(run.settings) for run in runs if run.task == task]) for task in {r.task for r in runs}
    }
    labels, differing = [], []
    for run in runs:
        texts = _texts(run.settings)
        told = named.get(run.task, ())
        rest = ", ".join(f"{_SPOKEN.get(name, name)} {_brief(texts[name])}" for name in told if name in texts)
        parts = [run.task] if len(tasks) > 1 else []
        parts += [f"clip {run.clip}"] if len(clips) > 1 else []
        parts += [f"z {run.noise_multiplier:g}"] if len(noises) > 1 and run.noise_multiplier is not None else []
        parts += [rest] if rest else []
        labels.append((", ".join(parts) or "all runs") if run.of_study else run.name)
        differing.append(rest)
    return labels, differing


def _not_shared(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that tell these runs from each other."""
    shared = _shared(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if name not in shared and name not in _NOT_TOLD_APART]


def _statements(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Each different statement once, with the runs that it is about. `void` says why its epsilon does not hold."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        rows, reasons = basis(run), tuple(warnings(run))
        same = tuple(row for row in rows if row[0] not in _OWN)
        void = list(reasons) if run.promise is not None and run.promise.epsilon is not None else []
        first = {"words": words(run), "basis": rows, "own": [], "runs": [], "private": not reasons, "void": void}
        statement = found.setdefault((words(run), same, reasons), first)
        statement["runs"].append(run.name)
        statement["own"].append(dict(rows))
    for statement in found.values():
        own = statement.pop("own")
        values = {name: ", ".join(dict.fromkeys(one[name] for one in own if name in one)) for name in _OWN}
        statement["basis"] = [(name, values.get(name, value)) for name, value in statement["basis"]]
    return list(found.values())


def _by_text(found: Iterable[tuple[str, Iterable[str]]]) -> list[dict[str, Any]]:
    """Each text once, with the names of the runs that it is about."""
    by_text: dict[str, list[str]] = {}
    for name, texts in found:
        for text in texts:
            by_text.setdefault(text, []).append(name)
    return [{"text": text, "runs": names} for text, names in by_text.items()]


def _found(name: str, lines: Sequence[str]) -> dict[str, Any]:
    """What an experiment has found, and of this the sentence that compares the median, if there is one."""
    what, _, task = name.partition("-")
    title = f"Figure {what.removeprefix('fig')}, {task}" if what.startswith("fig") else name
    verdict = next((line for line in lines if line.startswith(_VERDICTS)), None)
    return {"title": title, "verdict": verdict, "lines": list(lines)}


def _figure(figure: Figure) -> dict[str, Any]:
    made = asdict(figure)
    made["lines"] = [{"label": label, "points": [asdict(p) for p in points]} for label, points in figure.lines]
    return made


def _shared(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """What all rows have in common."""
    if not rows:
        return {}
    return {name: value for name, value in rows[0].items() if all(row.get(name) == value for row in rows[1:])}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    known = {str(name): value for name, value in values.items() if value is not None}
    return {name: f"{value:.6g}" if isinstance(value, float) else str(value) for name, value in known.items()}


def _brief(text: str) -> str:
    try:
        return f"{float(text):.4g}"
    except ValueError:
        return text


def _has_numbers(column: Sequence[float | None] | None) -> bool:
    return column is not None and any(value is not None for value in column)


def _last(column: Sequence[float | None]) -> float | None:
    return next((_short(value) for value in reversed(column) if value is not None), None)


def _short(value: float | None) -> float | None:
    """A number in the digits that a chart can show, which makes the file half as long."""
    return None if value is None else float(f"{value:.{_DIGITS}g}")
