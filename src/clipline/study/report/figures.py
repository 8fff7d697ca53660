"""The paper's figures of a study, from their CSV tables, as charts: what stands on the x axis, and the lines."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROWS = 200  # of a longer table that is no chart, the report shows the first
_TITLES = {
    "fig3": "Figure 3: what clipping costs, without noise",
    "fig5": "Figure 5: adaptive clip, at each noise",
    "fig6": "Figure 6: fixed clip, at each noise",
    "fig7": "Figure 7: median clip against the best fixed clip",
}
_VALUES = ("value", "mean", "metric_value")
_LOWER_IS_BETTER = ("loss", "error", "perplexity")


@dataclass(frozen=True)
class Point:
    """One number of a figure, with an interval if there is one, and the runs behind it."""

    x: int  # place on the axis
    value: float
    low: float | None = None
    high: float | None = None
    note: str = ""
    runs: str = ""


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
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    rows_in_file: int = 0


def read_figures(path: Path) -> tuple[list[Figure], list[str]]:
    """The tables `figN-TASK.csv` of a folder as figures, the comparison of Figs. 5 and 6 first; and what is unreadable."""
    tables: dict[tuple[str, str], list[dict[str, str]]] = {}
    problems = []
    for file in sorted(path.glob("fig[0-9]*.csv")):
        name, _, task = file.stem.partition("-")
        try:
            with file.open(encoding="utf-8", newline="") as lines:
                rows = [{k: v for k, v in row.items() if k and isinstance(v, str)} for row in csv.DictReader(lines)]
        except (OSError, ValueError, csv.Error) as error:
            problems.append(f"{file.name} cannot be read ({error}): it is left out")
            continue
        if rows:
            tables[task, name] = rows
    figures = []
    for task in dict.fromkeys(task for task, _ in tables):
        of_task = {name: rows for (other, name), rows in tables.items() if other == task}
        if "fig5" in of_task and "fig6" in of_task:
            figures += _fixed_against_adaptive(task, of_task["fig5"], of_task["fig6"])
        figures += [_figure(name, task, rows) for name, rows in sorted(of_task.items())]
    return figures, problems


def _figure(name: str, task: str, rows: Sequence[Mapping[str, str]]) -> Figure:
    """One table as a chart where its columns are known, else as a table."""
    title = _TITLES.get(name, f"Table of {name}")
    columns = tuple(rows[0])
    shown = tuple(tuple(row.get(column, "") for column in columns) for row in rows[:ROWS])
    metric, value = _metric(rows), next((column for column in _VALUES if column in columns), None)
    plain = Figure(name, task, title, metric, columns=columns, rows=shown, rows_in_file=len(rows))
    if value is None or name not in _TITLES:
        return plain
    x_label, x_of = _axis(name, rows)
    line_of = _noise if name in ("fig5", "fig6") else (lambda row: "adaptive and fixed" if name == "fig7" else metric)
    ticks = tuple(sorted(dict.fromkeys(x_of(row) for row in rows), key=_order))
    best: dict[tuple[str, str], Mapping[str, str]] = {}
    for row in rows:  # several server rates: the best one counts, as in the paper
        key = line_of(row), x_of(row)
        if key not in best or _better(row, best[key], value, metric):
            best[key] = row
    lines: dict[str, list[Point]] = {}
    for (line, x), row in sorted(best.items(), key=lambda item: (_order(item[0][0]), ticks.index(item[0][1]))):
        if (number := number_in(row.get(value))) is not None:
            lines.setdefault(line, []).append(
                Point(ticks.index(x), number, number_in(row.get("low")), number_in(row.get("high")), _rate(row),
                      row.get("runs", ""))
            )  # fmt: skip
    made = tuple((line, tuple(points)) for line, points in lines.items())
    return Figure(name, task, title, metric, x_label, ticks, made, columns, shown, len(rows))


def _axis(name: str, rows: Sequence[Mapping[str, str]]) -> tuple[str, Any]:
    """What the x axis stands for, and a row's place on it."""
    if name == "fig6":
        return "fixed clip", lambda row: _short(row.get("fixed_clip") or row.get("clip"))
    if name == "fig7":
        return "clip", _kind
    return "quantile that the clip follows", lambda row: _short(row.get("quantile")) or "unclipped"


def _kind(row: Mapping[str, str]) -> str:
    """Which clip a row is about: the words of a column for that, or its quantile or fixed clip."""
    for column in ("method", "kind", "arm", "what"):
        if row.get(column):
            return row[column]
    if number_in(row.get("quantile")) is not None:
        quantile = _short(row["quantile"])
        return "median, adaptive" if quantile == "0.5" else f"quantile {quantile}, adaptive"
    clip = _short(row.get("fixed_clip") or row.get("clip"))
    return f"fixed {clip}" if clip else "unclipped"


def _fixed_against_adaptive(
    task: str, adaptive: Sequence[Mapping[str, str]], fixed: Sequence[Mapping[str, str]]
) -> list[Figure]:
    """At each noise: the median clip, which nobody tuned, against the best and the worst of the fixed clips."""
    metric = _metric([*adaptive, *fixed])
    by_noise = _best_by(adaptive, "quantile", metric), _best_by(fixed, "fixed_clip", metric)
    noises = [noise for noise in by_noise[0] if noise in by_noise[1]]
    noises.sort(key=_order)
    median, best, worst = [], [], []
    for place, noise in enumerate(noises):
        of_quantiles, of_clips = by_noise[0][noise], by_noise[1][noise]
        if "0.5" in of_quantiles:
            median.append(Point(place, of_quantiles["0.5"], note="quantile 0.5"))
        ranked = sorted(of_clips.items(), key=lambda item: item[1], reverse=not lower_is_better(metric))
        best.append(Point(place, ranked[0][1], note=f"clip {ranked[0][0]}"))
        worst.append(Point(place, ranked[-1][1], note=f"clip {ranked[-1][0]}"))
    if not median:
        return []
    lines = (
        ("median clip, not tuned", tuple(median)),
        ("best fixed clip, in hindsight", tuple(best)),
        ("worst fixed clip tried", tuple(worst)),
    )
    ticks = tuple(noise.removeprefix("z = ") for noise in noises)
    title = "Fixed against adaptive (Figures 5 and 6)"
    return [Figure("fixed-against-adaptive", task, title, metric, "noise multiplier z", ticks, lines)]


def _best_by(rows: Iterable[Mapping[str, str]], column: str, metric: str) -> dict[str, dict[str, float]]:
    """noise -> quantile or clip -> the best value of all server rates."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        value = next((n for name in _VALUES if (n := number_in(row.get(name))) is not None), None)
        if value is None or not row.get(column):
            continue
        of_noise = found.setdefault(_noise(row), {})
        key = _short(row[column])
        choose = min if lower_is_better(metric) else max
        of_noise[key] = choose(value, of_noise.get(key, value))
    return found


def _metric(rows: Iterable[Mapping[str, str]]) -> str:
    return next((row["metric"] for row in rows if row.get("metric") and number_in(row["metric"]) is None), "value")


def lower_is_better(metric: str) -> bool:
    """Whether the smaller value of a metric is the better one."""
    return any(word in metric for word in _LOWER_IS_BETTER)


def _better(row: Mapping[str, str], than: Mapping[str, str], value: str, metric: str) -> bool:
    mine, other = number_in(row.get(value)), number_in(than.get(value))
    if mine is None or other is None:
        return mine is not None
    return mine < other if lower_is_better(metric) else mine > other


def _noise(row: Mapping[str, str]) -> str:
    return f"z = {_short(row.get('noise_multiplier') or row.get('z')) or '?'}"


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
    """Unclipped first, then words (the adaptive clip), then numbers by size."""
    match = re.search(r"-?\d+(\.\d+)?(e[+-]?\d+)?$", text)
    if match:
        return (2, float(match[0]), text)
    return (0 if text == "unclipped" else 1, 0.0, text)
