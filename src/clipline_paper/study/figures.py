"""The pictures of Figures 3 to 7 and of the search for learning rates, drawn from the tables of an experiment."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipline.plotting import (
    ACCENT,
    ACCENT_MARKER,
    MARKERS,
    PALETTE,
    LineEnd,
    label_ends,
    new_figure,
    ordered_colours,
    plain_log_labels,
    save_figure,
)

from .charts import noise_label
from .experiments import Findings
from .protocol import Protocol, differences
from .rules import DEGRADED, ramp_up_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GREY = "0.35"
_PAPER = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1}  # behind words that a line crosses
_Rows = Sequence[Mapping[str, Any]]


def draw(findings: Findings, path: Path, data: str) -> None:
    """Write the picture of an experiment as PNG; `data` says in words what was trained on."""
    figure, title = _DRAWN[findings.what](findings)
    protocol = findings.protocol
    number = findings.what.replace("fig", "Figure ") if findings.what.startswith("fig") else "Learning rates"
    width = int(figure.get_figwidth() * 12.5)
    heading = textwrap.fill(f"{number}, {protocol.task}: {title}", width)
    figure.suptitle(heading, fontsize=11, x=0.01, ha="left")
    figure.supxlabel(
        textwrap.fill(_footer(protocol, data), int(width * 1.35)), fontsize=8, x=0.01, ha="left", color=_GREY
    )
    save_figure(figure, path)


def _footer(protocol: Protocol, data: str) -> str:
    """Scale and data, and how both differ from the paper's."""
    listed = differences(protocol, data)[1:]
    differing = "; ".join(f"{what} {ours} (paper: {papers})" for what, ours, papers in listed if papers != "-")
    said = f"Scale {protocol.scale}: {protocol.rounds} rounds of {protocol.cohort_size} users. Trained on {data}."
    own = " The paper does not have this task." if not protocol.of_paper else ""
    return f"{said}{own} Otherwise than in the paper: {differing}." if differing else f"{said}{own}"


def _rates(findings: Findings) -> tuple[Figure, str]:
    rows = findings.tables[""].rows
    searched = [row for row in rows if row["method"] == "unclipped"]
    clients, servers = (sorted({row[name] for row in searched}) for name in ("client_lr", "server_lr"))
    values = {(row["client_lr"], row["server_lr"]): row for row in searched}
    figure, (left, right) = new_figure(1, 2, width=11, height=4.8)
    table = [[values[c, s]["value"] for s in servers] for c in clients]
    left.grid(False)
    left.imshow(table, origin="lower", aspect="auto", cmap="Blues_r" if findings.protocol.lower_is_better else "Blues")
    finite = [value for line in table for value in line if math.isfinite(value)]
    middle = (min(finite) + max(finite)) / 2 if finite else 0.0
    for y, client in enumerate(clients):
        for x, server in enumerate(servers):
            row = values[client, server]
            good = (row["value"] < middle) if findings.protocol.lower_is_better else (row["value"] > middle)
            text = f"{row['value']:.3g}" if math.isfinite(row["value"]) else "diverged"
            left.text(x, y, text, ha="center", va="center", fontsize=9, color="white" if good else "black")
            if row["chosen"]:
                left.add_patch(_box(x, y))
    left.set_xticks(range(len(servers)), [f"{rate:.3g}" for rate in servers])
    left.set_yticks(range(len(clients)), [f"{rate:.3g}" for rate in clients])
    left.set(xlabel="server rate", ylabel="client rate", title="without clipping (box: best)")
    median = [row for row in rows if row["method"] == "adaptive"]
    values_of_median = [row["value"] for row in median]
    right.plot(range(len(median)), values_of_median, "-" + ACCENT_MARKER, color=ACCENT, ms=10)
    _mark_diverged(right, range(len(median)), values_of_median)
    right.set_xticks(range(len(median)), [f"{row['server_lr']:.3g}" for row in median])
    right.set(xlabel="server rate", title="with the median clip, no noise")
    _label_metric(right, findings.protocol)
    return figure, "which client and server rates do best on the validation users"


def _fig3(findings: Findings) -> tuple[Figure, str]:
    figure, (axis,) = new_figure(1, 1, width=8, height=4.8)
    seeds = clipping_panel(axis, findings)
    axis.set_xlabel("quantile of update norms that the clip follows (0.1 clips most; each at its best server rate)")
    dashed = "; dashed: no clipping" if axis.lines else ""
    return figure, f"what clipping does without noise ({averaged(findings.protocol)}{seeds}{dashed})"


def clipping_panel(axis: Axes, findings: Findings, size: float = 9) -> str:
    """Draw Figure 3 of one task, with intervals where its rows have some; gives words for these."""
    rows = [row for row in findings.tables[""].rows if row["chosen"]]
    rows.sort(key=lambda row: -1 if row["method"] == "unclipped" else row["quantile"])
    clipped = [row for row in rows if row["method"] != "unclipped"]
    looks = [("P", _GREY)] * (len(rows) - len(clipped)) + _looks(len(clipped))
    values = [row["value"] for row in rows]
    intervals = False
    for x, (row, (marker, colour)) in enumerate(zip(rows, looks, strict=True)):
        value, low, high = row["value"], row.get("low"), row.get("high")
        if not math.isfinite(value):
            continue
        if low is not None and high is not None and math.isfinite(high - low):
            axis.errorbar([x], [value], yerr=[[value - low], [high - value]], color=colour, capsize=5, lw=1.5)
            intervals = True
        axis.plot([x], [value], marker, color=colour, ms=8, ls="none")
        axis.annotate(
            f"{value:.4g}", (x, value), (0, 9), textcoords="offset points", ha="center", fontsize=size, bbox=_PAPER
        )
    if math.isfinite(values[0]) and rows[0]["method"] == "unclipped":
        axis.axhline(values[0], color=_GREY, lw=1, ls="--")
    _mark_diverged(axis, range(len(rows)), values)
    names = ["no\nclipping" if row["method"] == "unclipped" else f"{row['quantile']:g}" for row in rows]
    axis.set_xticks(range(len(rows)), names)
    axis.margins(y=0.2)
    axis.set_xlim(-0.4, len(rows) - 0.6)  # also where the first or the last diverged and has no point
    _label_metric(axis, findings.protocol)
    return "; bars: 95% interval over seeds" if intervals else "; one seed"


def _fig4(findings: Findings) -> tuple[Figure, str]:
    figure, (axis,) = new_figure(1, 1, width=9.5, height=5.4)
    rows = findings.tables[""].rows
    ends = {row["place"]: row["clip"] for row in findings.tables["clips"].rows}  # empty where there is no range
    quantiles = sorted({row["quantile"] for row in rows})
    last = max(row["round"] for row in rows)
    named = []
    for quantile, (marker, colour) in zip(quantiles, _looks(len(quantiles)), strict=True):
        curve = [row for row in rows if row["quantile"] == quantile]
        clips = [_or_nan(row["clip"]) for row in curve]
        start = ramp_up_rounds([row["fraction_within"] for row in curve], quantile)
        start = len(curve) if start is None else start
        ramp = clips[: start + 1]
        axis.plot(range(len(ramp)), ramp, color=colour, lw=1.2, alpha=0.45)
        every = max(1, len(curve) // 8)
        axis.plot(range(start, len(curve)), clips[start:], color=colour, lw=2, marker=marker, ms=5, markevery=every)
        true = [_or_nan(row["unprivate_quantile"]) for row in curve]
        axis.plot(range(len(curve)), true, color=colour, lw=0.7, ls=":", alpha=0.6)
        named.append(LineEnd(len(curve) - 1, clips[-1], f"quantile {quantile:g}", colour))
    axis.set_yscale("log")
    plain_log_labels(axis)
    axis.set(xlabel="round (pale: ramp-up, which the range leaves out)", ylabel="clip (norm of an update)")
    axis.set_xlim(0, last * 1.01)
    said = "no range, as a clip did not arrive"
    if ends:
        low, high = ends["clip_min"], ends["clip_max"]
        axis.axhspan(low, high, color="0.5", alpha=0.1, lw=0)
        fixed = [clip for place, clip in ends.items() if isinstance(place, int)]
        axis.plot([0] * len(fixed), fixed, ">", color="black", ms=7, clip_on=False, zorder=5)
        listed = ", ".join(f"{clip:g}" for clip in fixed)
        said = f"grey: the range C_min {low:.3g} to C_max {high:.3g}; black: the fixed clips of Figure 6, {listed}"
    label_ends(axis, named)
    return figure, (
        "the clip follows its quantile, without noise (solid: the clip; dotted: the true quantile of the cohort's "
        f"update norms, for study only; {said})"
    )


def _noises(findings: Findings, key: str, said: str) -> tuple[Figure, str]:
    rows = [row for row in findings.tables[""].rows if row["chosen"]]
    figure, (axis,) = new_figure(1, 1, width=8.5, height=5)
    label_ends(axis, _lines(axis, findings.protocol, rows, key))
    return figure, f"{said} at four levels of noise, each at its best server rate ({averaged(findings.protocol)})"


def _fig7(findings: Findings) -> tuple[Figure, str]:
    figure, (left, right) = new_figure(1, 2, width=13, height=5.2)
    protocol, choice = findings.protocol, findings.tables["choice"].rows
    noises = list(protocol.noises)
    fixed = [row for row in choice if row["method"] == "fixed"]
    median = [row["value"] for row in choice if row["method"] == "adaptive"]
    named = _lines(left, protocol, fixed, "clip", prefix="fixed ", lw=1.2)
    left.plot(range(len(noises)), median, "-" + ACCENT_MARKER, color=ACCENT, lw=3, ms=11)
    named.append(_line_end(range(len(noises)), median, "median", ACCENT))
    z_star = next(row["noise_at_100"] for row in choice if row["z_star"])
    best = next(row for row in choice if row["c_star"])
    left.axvline(noises.index(z_star), color="0.8", lw=8, zorder=0)
    left.plot(noises.index(z_star), best["value"], "o", ms=15, mfc="none", mec="black", mew=1.5)
    without = next(row["value"] for row in choice if row["noise_at_100"] == 0 and row["best_at_noise"])
    if math.isfinite(without):
        limit = without * (1 + DEGRADED if protocol.lower_is_better else 1 - DEGRADED)
        left.axhline(limit, color=_GREY, lw=1, ls="--")
        left.annotate(
            "5% worse than without noise", (0.02, limit), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=8, color=_GREY,
            bbox=_PAPER,
        )  # fmt: skip
    left.set_title(f"validation: z* = {z_star:g} (grey), C* = {best['clip']:g} (ring)", fontsize=10)
    label_ends(left, named)
    clips = sorted({row["clip"] for row in fixed})
    _sides(right, findings, _looks(len(clips))[clips.index(best["clip"])])
    return figure, (
        "the median clip against the best of five fixed clips, chosen in hindsight. "
        "Left: how the noise and that clip were chosen. Right: both at that noise on the test users"
    )


def _sides(axis: Axes, findings: Findings, look: tuple[str, str]) -> None:
    """Each seed a dot, joined with the other side's of that seed; the mean with its interval outside.

    `look` is how the fixed clip is drawn wherever it is.
    """
    sides = findings.tables[""].rows
    names, seeds = [], findings.tables["seeds"].rows
    inside = [0.1, 0.9]
    for seed in dict.fromkeys(row["seed"] for row in seeds):
        pair = [next((_or_nan(r["value"]) for r in seeds if (r["side"], r["seed"]) == (side["side"], seed)), math.nan)
                for side in sides]  # fmt: skip
        axis.plot(inside, pair, color="0.8", lw=0.8, zorder=1)
    for x, side in enumerate(sides):
        values = [row["value"] for row in seeds if row["side"] == side["side"]]
        marker, colour = (ACCENT_MARKER, ACCENT) if side["method"] == "adaptive" else look
        axis.scatter([inside[x]] * len(values), values, color=colour, alpha=0.5, s=25, zorder=2)
        if math.isfinite(side["mean"]):
            bars = [[side["mean"] - side["low"]], [side["high"] - side["mean"]]]
            outside = (-0.08, 1.08)[x]
            axis.errorbar([outside], [side["mean"]], yerr=bars, fmt=marker, color=colour, capsize=6, lw=2, ms=10)
            text = f"{side['mean']:.4g}\n[{side['low']:.4g}, {side['high']:.4g}]"
            axis.annotate(
                text, (outside, side["mean"]), ((-10, 10)[x], 0), textcoords="offset points", fontsize=9,
                ha=("right", "left")[x], va="center",
            )  # fmt: skip
        else:
            axis.annotate("a run diverged", (x, 0.05), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
        names.append("median clip" if side["method"] == "adaptive" else f"fixed clip C*\n= {side['clip']:g}")
    count = sides[0]["seeds"]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.85, 1.85)
    axis.set_title(f"test: {count} seeds (dots, joined), mean and bootstrapped 95% interval", fontsize=10)
    _label_metric(axis, findings.protocol)


def _looks(count: int) -> list[tuple[str, str]]:
    """Marker and colour of each of so many quantiles or clips, from the lowest on."""
    return [(MARKERS[i % len(MARKERS)], colour) for i, colour in enumerate(ordered_colours(count))]


def _lines(
    axis: Axes, protocol: Protocol, rows: _Rows, key: str, prefix: str | None = None, lw: float = 1.8
) -> list[LineEnd]:
    """One line for each quantile or clip, over the noises at equal distances; gives their ends, to be named."""
    noises = list(protocol.noises)
    which = sorted({row[key] for row in rows})
    ends = []
    for value_of, (marker, colour) in zip(which, _looks(len(which)), strict=True):
        mine = {row["noise_at_100"]: row["value"] for row in rows if row[key] == value_of}
        values = [mine.get(noise, math.nan) for noise in noises]
        axis.plot(range(len(noises)), values, f"-{marker}", color=colour, lw=lw, ms=6)
        ends.append(
            _line_end(range(len(noises)), values, f"{f'{key} ' if prefix is None else prefix}{value_of:g}", colour)
        )
    lost = [
        math.nan if any(not math.isfinite(row["value"]) for row in rows if row["noise_at_100"] == z) else 0.0
        for z in noises
    ]
    _mark_diverged(axis, range(len(noises)), lost, "some diverged")
    axis.set_xticks(range(len(noises)), [f"{noise:g}" for noise in noises])
    axis.set_xlim(-0.2, len(noises) - 0.9)
    axis.set_xlabel(noise_label(protocol))
    _label_metric(axis, protocol)
    return ends


def _line_end(x: Sequence[int], values: Sequence[float], label: str, colour: str) -> LineEnd:
    """At the last value that is finite."""
    known = [(place, value) for place, value in zip(x, values, strict=True) if math.isfinite(value)]
    return LineEnd(*(known[-1] if known else (0, math.nan)), label, colour)


def _mark_diverged(axis: Axes, x: Sequence[int], values: Sequence[float], said: str = "diverged") -> None:
    """A word at the lower edge where a value is missing."""
    for place, value in zip(x, values, strict=True):
        if not math.isfinite(value):
            axis.annotate(
                said, (place, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8, color=PALETTE[1]
            )


def _label_metric(axis: Axes, protocol: Protocol) -> None:
    direction = "lower is better" if protocol.lower_is_better else "higher is better"
    axis.set_ylabel(f"{protocol.metric.replace('_', ' ')} ({direction})")


def averaged(protocol: Protocol, *, short: bool = False) -> str:
    """Of which rounds a metric is the mean, in words."""
    return ("" if short else "validation users, ") + f"average of the last {protocol.average_over} rounds"


def _box(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=PALETTE[1], lw=3)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


_DRAWN: Mapping[str, Callable[[Findings], tuple[Figure, str]]] = {
    "learning-rates": _rates,
    "fig3": _fig3,
    "fig4": _fig4,
    "fig5": partial(_noises, key="quantile", said="clips that follow a quantile"),
    "fig6": partial(_noises, key="clip", said="fixed clips"),
    "fig7": _fig7,
}
