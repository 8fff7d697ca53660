"""The charts of a report, from what the experiments of a study found: the same lines and looks as in `figures.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from clipline.study import Figure, Look, Point

from .experiments import Findings, Table, cell, chosen
from .protocol import MEDIAN, PAPER_COHORT, Protocol
from .rules import Row, best_row, score

ROWS = 200  # of a longer table that is no chart, the report shows the first
_TITLES = {
    "fig3": "Figure 3: what clipping does without noise",
    "fig5": "Figure 5: clips that follow a quantile, at each noise",
    "fig6": "Figure 6: fixed clips, at each noise",
    "fig7": "Figure 7: median clip against the best fixed clip",
}
_UNCLIPPED = "no clipping"
_COMPARED = ("median clip", "best fixed clip, in hindsight", "worst fixed clip tried")


def report_figures(found: Sequence[Findings]) -> list[Figure]:
    """Of each task the comparison of fixed and adaptive clips, then a chart or a table of each table."""
    by_task: dict[str, dict[str, Findings]] = {}
    for one in sorted(found, key=lambda one: one.name):
        by_task.setdefault(one.protocol.task, {})[one.what] = one
    return [figure for of_task in by_task.values() for figure in _of_task(of_task)]


def _of_task(found: Mapping[str, Findings]) -> list[Figure]:
    choice = found["fig7"].tables["choice"].rows if "fig7" in found else []
    at_noises = {what: chosen(found[what].tables[""].rows) for what in ("fig5", "fig6") if what in found}
    protocol = next(iter(found.values())).protocol
    compared = [row for rows in at_noises.values() for row in rows] or choice
    clips = sorted({row["clip"] for row in at_noises.get("fig6", choice)} - {None})
    made = _fixed_against_adaptive(protocol, compared)
    for what, findings in found.items():
        for name, table in findings.tables.items():
            drawn = _drawn(what, findings.protocol, table, clips) if name == "" else {}
            titled = f"{what.replace('-', ' ')} {name}".strip()
            title = _TITLES[what] if drawn else f"Table of {titled}"
            rows = tuple(tuple(cell(row[c]) for c in table.columns) for row in table.rows[:ROWS])
            listed = {"columns": table.columns, "rows": rows, "rows_in_file": len(table.rows)}
            made.append(_figure(titled, title, findings.protocol, **drawn, **listed))
    return made


def _figure(name: str, title: str, protocol: Protocol, **parts: Any) -> Figure:
    lower = protocol.lower_is_better
    return Figure(name, protocol.task, title, protocol.metric, lower_is_better=lower, **parts)


def _drawn(what: str, protocol: Protocol, table: Table, clips: Sequence[float]) -> dict[str, Any]:
    """A figure's own table as the parts of a chart; none for one that stays a table."""
    if what in ("fig5", "fig6"):
        key = "quantile" if what == "fig5" else "clip"
        rows = sorted(chosen(table.rows), key=lambda row: (row[key], row["noise_at_100"]))
        return _lines(noise_label(protocol), rows, lambda row: f"{row['noise_at_100']:g}", lambda row: row[key], key)
    if what == "fig3":
        rows = sorted(chosen(table.rows), key=lambda row: (row["quantile"] is not None, row["quantile"]))
        quantiles = [row["quantile"] for row in rows if row["quantile"] is not None]

        def look(row: Row) -> Look:
            return "plain" if row["quantile"] is None else (quantiles.index(row["quantile"]), len(quantiles))

        return _one_line("quantile that the clip follows", protocol, rows, _quantile, look)
    if what == "fig7":

        def side(row: Row) -> str:
            known = f"quantile {_quantile(row)}" if row["clip"] is None else f"clip {row['clip']:.4g}"
            return f"{row['side']}, {known}"

        def look_of_side(row: Row) -> Look:
            return (clips.index(row["clip"]), len(clips)) if row["clip"] in clips else "accent"

        rows = [{**row, "value": row["mean"]} for row in table.rows]
        return _one_line("clip", protocol, rows, side, look_of_side)
    return {}


def _quantile(row: Row) -> str:
    return _UNCLIPPED if row["quantile"] is None else f"{row['quantile']:g}"


def _one_line(
    x_label: str, protocol: Protocol, rows: Sequence[Row], x_of: Callable[[Row], str], look: Callable[[Row], Look]
) -> dict[str, Any]:
    ticks = [f"{x_of(row)}, diverged" if not math.isfinite(row["value"]) else x_of(row) for row in rows]
    points = tuple(_point(x, row, look(row)) for x, row in enumerate(rows) if math.isfinite(row["value"]))
    drawn = {"lines": ((protocol.metric, points),), "looks": ((0, 1),)} if points else {}
    return {"x_label": x_label, "ticks": tuple(ticks), **drawn}


def _lines(
    x_label: str, rows: Sequence[Row], x_of: Callable[[Row], str], line_of: Callable[[Row], float], key: str
) -> dict[str, Any]:
    """A line for each quantile or clip."""
    names = list(dict.fromkeys(line_of(row) for row in rows))
    ticks = list(dict.fromkeys(x_of(row) for row in sorted(rows, key=lambda row: row["noise_at_100"])))
    lost = {x_of(row) for row in rows if not math.isfinite(row["value"])}
    word = "some diverged" if len(names) > 1 else "diverged"
    lines, looks = [], []
    for place, name in enumerate(names):
        mine = [row for row in rows if line_of(row) == name and math.isfinite(row["value"])]
        if mine:
            points = tuple(_point(ticks.index(x_of(row)), row) for row in mine)
            lines.append((f"{key} {name:.4g}", points))
            looks.append((place, len(names)))
    shown = tuple(f"{tick}, {word}" if tick in lost else tick for tick in ticks)
    return {"x_label": x_label, "ticks": shown, "lines": tuple(lines), "looks": tuple(looks)}


def _point(x: int, row: Row, look: Look | None = None) -> Point:
    note = f"server rate {row['server_lr']:.4g}"
    return Point(x, row["value"], row.get("low"), row.get("high"), note, row["runs"], look)


def _fixed_against_adaptive(protocol: Protocol, rows: Sequence[Row]) -> list[Figure]:
    """At each noise: the median clip against the best and the worst of the fixed clips."""
    ticks: list[str] = []
    lines: dict[str, list[Point]] = {name: [] for name in _COMPARED}
    lower = protocol.lower_is_better
    for noise in sorted({row["noise_at_100"] for row in rows}):
        at = [row for row in rows if row["noise_at_100"] == noise and math.isfinite(row["value"])]
        median = [row for row in at if row["quantile"] == MEDIAN]
        fixed = [row for row in at if row["clip"] is not None]
        if not median or not fixed:
            continue
        sides = (
            median[0],
            best_row(fixed, "value", lower_is_better=lower),
            min(fixed, key=lambda row: score(row["value"], lower)),
        )
        for name, row in zip(_COMPARED, sides, strict=True):
            note = f"quantile {MEDIAN:g}" if row["clip"] is None else f"clip {row['clip']:.4g}"
            lines[name].append(Point(len(ticks), row["value"], note=note, runs=row["runs"]))
        ticks.append(f"{noise:g}")
    if not ticks:
        return []
    made = tuple((name, tuple(points)) for name, points in lines.items())
    chart = {"x_label": noise_label(protocol), "ticks": tuple(ticks), "lines": made, "looks": ("accent", 0, 2)}
    return [_figure("fixed-against-adaptive", "Fixed against adaptive, at each noise", protocol, **chart)]


def noise_label(protocol: Protocol) -> str:
    """As below the pictures of `figures.py`."""
    users = protocol.cohort_size
    scaled = "" if users == PAPER_COHORT else f"; with {users} users, {users / PAPER_COHORT:.4g} times that"
    return f"noise multiplier z at 100 users a round{scaled}"
