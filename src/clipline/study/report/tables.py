"""The paper's figures of a study, from their CSV tables, as charts: what stands on the x axis, and the lines."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...metric_direction import lower_is_better
from ...tasks import main_metric_of

ROWS = 200  # of a longer table that is no chart, the report shows the first
_TITLES = {
    "fig3": "Figure 3: what clipping does without noise",
    "fig5": "Figure 5: clips that follow a quantile, at each noise",
    "fig6": "Figure 6: fixed clips, at each noise",
    "fig7": "Figure 7: median clip against the best fixed clip",
}
_SUFFIXES = ("choice", "seeds", "clips")  # of a figure's further tables: figN-TASK-choice.csv
_VALUES = ("value", "mean")
# How a point or line is drawn: its place among so many that have an order, the line that others are compared with, what
# is beside the point, or the number of a colour that has no order.
Look = tuple[int, int] | Literal["accent", "plain"] | int


@dataclass(frozen=True)
class Point:
    """One number of a figure, with an interval if there is one, and the runs behind it."""

    x: int  # place on the axis
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    runs: str = ""
    look: Look | None = None  # that of its line if None


@dataclass(frozen=True)
class Figure:
    """A chart with named places on the x axis; without lines it is a table only."""

    name: str
    task: str
    title: str
    metric: str
    x_label: str = ""
    ticks: tuple[str, ...] = ()
    lines: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    looks: tuple[Look, ...] = ()  # of the lines
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    rows_in_file: int = 0
    lower_is_better: bool = False


def read_figures(
    path: Path, metrics: Mapping[str, str], said: Mapping[str, Mapping[str, str]] | None = None
) -> tuple[list[Figure], list[str]]:
    """The tables `figN-TASK.csv` of a folder as figures, fixed against adaptive first; and what could not be read.

    `metrics` has the name of each task's metric, which says whether more is better unless the facts of the task in
    `said` do. Columns that are not known are left to the table behind a figure.
    """
    tables: dict[str, dict[str, list[dict[str, str]]]] = {}  # task -> name -> rows
    problems = []
    for file in sorted([*path.glob("fig[0-9]*.csv"), *path.glob("learning-rates*.csv")]):
        name, task = _name_and_task(file.stem)
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                rows = [{k: v for k, v in row.items() if k and isinstance(v, str)} for row in csv.DictReader(lines)]
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"{file.name} cannot be read ({error}): it is left out")
            continue
        if rows:
            tables.setdefault(task, {})[name] = rows
    figures = []
    for task, of_task in tables.items():
        metric = metrics.get(task) or _metric(task, of_task)
        compared = [*of_task.get("fig5", ()), *of_task.get("fig6", ())] or of_task.get("fig7 choice", [])
        lower = lower_is_better(metric, (said or {}).get(task))
        made = _fixed_against_adaptive(task, metric, compared, lower)
        tried = {_clip(row) for row in of_task.get("fig6") or of_task.get("fig7 choice", [])} - {""}
        clips = sorted(tried, key=_order)
        made += [_figure(name, task, metric, rows, lower, clips) for name, rows in of_task.items()]
        figures += [replace(figure, lower_is_better=lower) for figure in made]
    return figures, problems


def _name_and_task(stem: str) -> tuple[str, str]:
    """Of `fig7-emnist_cr-choice`: fig7 choice, emnist_cr."""
    name, _, task = stem.removeprefix("learning-").partition("-")
    name = "learning rates" if stem.startswith("learning-") else name
    for suffix in _SUFFIXES:
        if task.endswith(f"-{suffix}"):
            return f"{name} {suffix}", task.removesuffix(f"-{suffix}")
    return name, task


def _figure(
    name: str, task: str, metric: str, rows: Sequence[Mapping[str, str]], lower: bool, clips: Sequence[str]
) -> Figure:
    """One table as a chart where its columns are known, else as a table. `clips` are the fixed ones, in order."""
    title = _TITLES.get(name, f"Table of {name}")
    columns = tuple(rows[0])
    shown = tuple(tuple(row.get(column, "") for column in columns) for row in rows[:ROWS])
    if name not in _TITLES or not any(column in columns for column in _VALUES):
        return Figure(name, task, title, metric, columns=columns, rows=shown, rows_in_file=len(rows))
    noisy = name in ("fig5", "fig6")
    x_label, x_of = (_noise_label(rows), _noise) if noisy else _axis(name)
    line_of = _line if noisy else (lambda row: metric)
    ticks = tuple(sorted(dict.fromkeys(x_of(row) for row in rows), key=_order))
    best: dict[tuple[str, str], Mapping[str, str]] = {}
    for row in rows:  # several server rates: the best one counts, as in the paper
        key = line_of(row), x_of(row)
        if key not in best or _better(row, best[key], lower):
            best[key] = row
    named = sorted({line for line, _ in best}, key=_order)
    quantiles = [tick for tick in ticks if tick != _UNCLIPPED]
    lines: dict[str, list[Point]] = {}
    for (line, x), row in sorted(best.items(), key=lambda item: (_order(item[0][0]), ticks.index(item[0][1]))):
        if (value := _value(row)) is not None:
            ends = number_in(row.get("low")), number_in(row.get("high"))
            look = None if noisy else _look(row, quantiles if name == "fig3" else [], clips)
            point = Point(ticks.index(x), value, *ends, _rate(row), row.get("runs", ""), look)
            lines.setdefault(line, []).append(point)
    made = tuple((line, tuple(points)) for line, points in lines.items())
    looks: tuple[Look, ...] = tuple((named.index(line), len(named)) for line in lines)
    lost = {x for (_, x), row in best.items() if _value(row) is None}
    word = "some diverged" if len(named) > 1 else "diverged"
    ticks = tuple(f"{tick}, {word}" if tick in lost else tick for tick in ticks)
    return Figure(name, task, title, metric, x_label, ticks, made, looks, columns, shown, len(rows))


def _axis(name: str) -> tuple[str, Callable[[Mapping[str, str]], str]]:
    """What the x axis stands for, and a row's place on it."""
    if name == "fig7":
        return "clip", _side
    return "quantile that the clip follows", lambda row: _short(row.get("quantile")) or _UNCLIPPED


_UNCLIPPED = "no clipping"


def _noise_label(rows: Sequence[Mapping[str, str]]) -> str:
    """As below the picture that `clipline reproduce` draws."""
    for row in rows:
        noise, at_100 = number_in(row.get("noise_multiplier")), number_in(row.get("noise_at_100"))
        if noise and at_100:
            users = 100 * noise / at_100
            scaled = "" if math.isclose(users, 100) else f"; with {users:.4g} users, {users / 100:.4g} times that"
            return f"noise multiplier z at 100 users a round{scaled}"
    return "noise multiplier z"


def _line(row: Mapping[str, str]) -> str:
    """The quantile or clip that a line of Figure 5 or 6 is about."""
    quantile = _short(row.get("quantile"))
    return f"quantile {quantile}" if quantile else f"clip {_clip(row)}"


def _look(row: Mapping[str, str], quantiles: Sequence[str], clips: Sequence[str]) -> Look:
    """Of a point of Figure 3 (`quantiles`) or 7: a quantile or clip has the colour that its line has elsewhere."""
    quantile, clip = _short(row.get("quantile")), _clip(row)
    if quantile in quantiles:
        return quantiles.index(quantile), len(quantiles)
    if clip in clips:
        return clips.index(clip), len(clips)
    return "accent" if quantile else "plain"


def _clip(row: Mapping[str, str]) -> str:
    return _short(row.get("clip") or row.get("fixed_clip"))


def _side(row: Mapping[str, str]) -> str:
    """Which clip a row of Figure 7 is about."""
    quantile, clip = _short(row.get("quantile")), _clip(row)
    known = f"quantile {quantile}" if quantile else f"clip {clip}" if clip else _UNCLIPPED
    return f"{row['side']}, {known}" if row.get("side") else known


def _fixed_against_adaptive(task: str, metric: str, rows: Sequence[Mapping[str, str]], lower: bool) -> list[Figure]:
    """At each noise: the median clip against the best and the worst of the fixed clips."""
    best: dict[tuple[str, str, str], Mapping[str, str]] = {}  # of all server rates
    for row in rows:
        quantile = _short(row.get("quantile"))
        key = _noise(row), "median" if quantile == "0.5" else "other" if quantile else "fixed", _clip(row)
        if _value(row) is not None and (key not in best or _better(row, best[key], lower)):
            best[key] = row
    noises = sorted({noise for noise, _, _ in best}, key=_order)
    lines: dict[str, list[Point]] = {name: [] for name in _COMPARED}
    ticks: list[str] = []
    for noise in noises:
        median = [row for (at, kind, _), row in best.items() if (at, kind) == (noise, "median")]
        fixed = [row for (at, kind, _), row in best.items() if (at, kind) == (noise, "fixed")]
        if not median or not fixed:
            continue
        ranked = sorted(fixed, key=lambda row: _value(row) or 0.0, reverse=not lower)
        for name, row in zip(_COMPARED, (median[0], ranked[0], ranked[-1]), strict=True):
            note = "quantile 0.5" if row is median[0] else f"clip {_clip(row)}"
            lines[name].append(Point(len(ticks), _value(row) or 0.0, note=note, runs=row.get("runs", "")))
        ticks.append(noise)
    if not ticks:
        return []
    made = tuple((name, tuple(points)) for name, points in lines.items())
    title = "Fixed against adaptive, at each noise"
    return [
        Figure("fixed-against-adaptive", task, title, metric, _noise_label(rows), tuple(ticks), made, ("accent", 0, 2))
    ]


_COMPARED = ("median clip", "best fixed clip, in hindsight", "worst fixed clip tried")


def _metric(task: str, tables: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """As a column `metric` says, or as the paper has it."""
    known = main_metric_of(task) or "value"
    return next((row["metric"] for rows in tables.values() for row in rows if row.get("metric")), known)


def _value(row: Mapping[str, str]) -> float | None:
    return next((number for name in _VALUES if (number := number_in(row.get(name))) is not None), None)


def _better(row: Mapping[str, str], than: Mapping[str, str], lower: bool) -> bool:
    mine, other = _value(row), _value(than)
    if mine is None or other is None:
        return mine is not None
    return mine < other if lower else mine > other


def _noise(row: Mapping[str, str]) -> str:
    return _short(row.get("noise_at_100") or row.get("noise_multiplier")) or "?"


def _rate(row: Mapping[str, str]) -> str:
    return f"server rate {_short(row['server_lr'])}" if row.get("server_lr") else ""


def _short(text: str | None) -> str:
    """A number in few digits; other text as it is."""
    number = number_in(text)
    return (text or "").strip() if number is None else f"{number:.4g}"


def number_in(text: str | None) -> float | None:
    """The finite number that a cell holds, or None."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _order(text: str) -> tuple[int, float, str]:
    """No clipping first, then the median and other words, then numbers by size."""
    match = re.search(r"-?\d+(\.\d+)?(e[+-]?\d+)?$", text)
    if match and "quantile" not in text:
        return (2, float(match[0]), text)
    return (0 if text == _UNCLIPPED else 1, float(match[0]) if match else 0.0, text)
