"""The pictures of Figures 3 to 7 and of the search for learning rates, drawn from the tables of an experiment."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clipline.plotting import PALETTE, new_figure, plain_log_labels, save_figure

from .findings import Findings
from .protocol import PAPER_COHORT, Protocol, differences
from .rules import DEGRADED, ramp_up_rounds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "0.35"
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
        textwrap.fill(_footer(protocol, data), int(width * 1.35)), fontsize=8, x=0.01, ha="left", color=_INK
    )
    save_figure(figure, path)


def _footer(protocol: Protocol, data: str) -> str:
    """Scale and data, and how both differ from the paper's."""
    listed = differences(protocol, data)[1:]
    differing = "; ".join(f"{one.what} {one.ours} (paper: {one.paper})" for one in listed if one.paper != "-")
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
    _points(right, range(len(median)), [row["value"] for row in median], "-o")
    _mark_diverged(right, range(len(median)), [row["value"] for row in median])
    right.set_xticks(range(len(median)), [f"{row['server_lr']:.3g}" for row in median])
    right.set(xlabel="server rate", title="with the median clip, no noise")
    _label_metric(right, findings.protocol)
    return figure, "which client and server rates do best on the validation users"


def _fig3(findings: Findings) -> tuple[Figure, str]:
    rows = [row for row in findings.tables[""].rows if row["chosen"]]
    figure, (axis,) = new_figure(1, 1, width=8, height=4.8)
    names = ["no\nclipping" if row["method"] == "unclipped" else f"{row['quantile']:g}" for row in rows]
    values = [row["value"] for row in rows]
    colours = [_INK if row["method"] == "unclipped" else PALETTE[0] for row in rows]
    axis.scatter(range(len(rows)), values, c=colours, s=70, zorder=3)
    if math.isfinite(values[0]):
        axis.axhline(values[0], color=_INK, lw=1, ls="--")
    for x, value in enumerate(values):
        if math.isfinite(value):
            axis.annotate(f"{value:.4g}", (x, value), (0, 9), textcoords="offset points", ha="center", fontsize=9)
    _mark_diverged(axis, range(len(rows)), values)
    axis.set_xticks(range(len(rows)), names)
    axis.margins(y=0.2)
    axis.set_xlim(-0.4, len(rows) - 0.6)  # also where the first or the last diverged and has no point
    axis.set_xlabel("quantile of update norms that the clip follows (0.1 clips most; each at its best server rate)")
    _label_metric(axis, findings.protocol)
    dashed = "; dashed: no clipping" if math.isfinite(values[0]) else ""
    return figure, f"what clipping does without noise ({_averaged(findings.protocol)}{dashed})"


def _fig4(findings: Findings) -> tuple[Figure, str]:
    figure, (axis,) = new_figure(1, 1, width=9.5, height=5.4)
    rows = findings.tables[""].rows
    ends = {row["place"]: row["clip"] for row in findings.tables["clips"].rows}  # empty where there is no range
    quantiles = sorted({row["quantile"] for row in rows})
    for number, quantile in reversed(list(enumerate(quantiles))):  # the highest first, as in the picture
        curve = [row for row in rows if row["quantile"] == quantile]
        colour = PALETTE[number % len(PALETTE)]
        clips = [_or_nan(row["clip"]) for row in curve]
        start = ramp_up_rounds([row["fraction_within"] for row in curve], quantile)
        start = len(curve) if start is None else start
        ramp = clips[: start + 1]
        axis.plot(range(len(ramp)), ramp, color=colour, lw=1.2, alpha=0.45)
        axis.plot(range(start, len(curve)), clips[start:], color=colour, lw=2, label=f"quantile {quantile:g}")
        true = [_or_nan(row["unprivate_quantile"]) for row in curve]
        axis.plot(range(len(curve)), true, color=colour, lw=0.8, ls=":")
    axis.set_yscale("log")
    plain_log_labels(axis)
    if ends:
        axis.axhspan(ends["clip_min"], ends["clip_max"], color="0.5", alpha=0.1, lw=0)
    last = max(row["round"] for row in rows)
    for place, clip in ends.items():
        if isinstance(place, int):
            axis.plot([last * 1.01, last * 1.04], [clip, clip], color="black", lw=1.5, clip_on=False)
            axis.annotate(f"{clip:g}", (last * 1.045, clip), va="center", fontsize=8, annotation_clip=False)
    axis.set(xlabel="round (pale: ramp-up, which the range leaves out)", ylabel="clip (norm of an update)")
    axis.set_xlim(0, last * 1.1)
    axis.legend(frameon=False, ncols=3, loc="best", fontsize=9)
    said = "no range, as a clip did not arrive"
    if ends:
        low, high = ends["clip_min"], ends["clip_max"]
        said = (
            f"grey: the range C_min {low:.3g} to C_max {high:.3g}, with the five fixed clips of Figure 6 at the right"
        )
    return figure, (
        "the clip follows its quantile, without noise (solid: the clip; dotted: the true quantile of the cohort's "
        f"update norms, for study only; {said})"
    )


def _noises(findings: Findings, key: str, said: str) -> tuple[Figure, str]:
    rows = [row for row in findings.tables[""].rows if row["chosen"]]
    figure, (axis,) = new_figure(1, 1, width=8.5, height=5)
    _lines(axis, findings.protocol, rows, key)
    axis.legend(title=key, frameon=False, fontsize=9)
    return figure, f"{said} at four levels of noise, each at its best server rate ({_averaged(findings.protocol)})"


def _fig5(findings: Findings) -> tuple[Figure, str]:
    return _noises(findings, "quantile", "clips that follow a quantile")


def _fig6(findings: Findings) -> tuple[Figure, str]:
    return _noises(findings, "clip", "fixed clips")


def _fig7(findings: Findings) -> tuple[Figure, str]:
    figure, (left, right) = new_figure(1, 2, width=12.5, height=5.2)
    protocol, choice = findings.protocol, findings.tables["choice"].rows
    noises = list(protocol.noises)
    fixed = [row for row in choice if row["method"] == "fixed"]
    median = [row for row in choice if row["method"] == "adaptive"]
    _lines(left, protocol, fixed, "clip", prefix="fixed ", lw=1.2)
    _points(left, range(len(noises)), [row["value"] for row in median], "-s", color="black", lw=2.5, label="median")
    z_star = next(row["noise_at_100"] for row in choice if row["z_star"])
    best = next(row for row in choice if row["c_star"])
    left.axvline(noises.index(z_star), color="0.8", lw=8, zorder=0)
    left.plot(noises.index(z_star), best["value"], "o", ms=15, mfc="none", mec="black", mew=1.5)
    without = next(row["value"] for row in choice if row["noise_at_100"] == 0 and row["best_at_noise"])
    if math.isfinite(without):
        limit = without * (1 + DEGRADED if protocol.lower_is_better else 1 - DEGRADED)
        left.axhline(limit, color=_INK, lw=1, ls="--")
        left.annotate(
            "5% worse than without noise", (0.985, limit), (0, 3), xycoords=("axes fraction", "data"),
            textcoords="offset points", ha="right", fontsize=8, color=_INK,
            bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1},
        )  # fmt: skip
    left.set_title(f"validation: z* = {z_star:g} (grey), C* = {best['clip']:g} (ring)", fontsize=10)
    low, high = left.get_ylim()
    left.set_ylim(low, high + 0.22 * (high - low))  # room for the legend above the lines
    left.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    _sides(right, findings)
    return figure, (
        "the median clip, which nobody tuned, against the best of five fixed clips, chosen in hindsight. "
        "Left: how the noise and that clip were chosen. Right: both at that noise on the test users"
    )


def _sides(axis: Axes, findings: Findings) -> None:
    """Each seed a dot, the mean with its interval beside it."""
    names = []
    for x, side in enumerate(findings.tables[""].rows):
        seeds = [row["value"] for row in findings.tables["seeds"].rows if row["side"] == side["side"]]
        colour = "black" if side["method"] == "adaptive" else PALETTE[1]
        axis.scatter([x - 0.12] * len(seeds), seeds, color=colour, alpha=0.4, s=25)
        if math.isfinite(side["mean"]):
            bars = [[side["mean"] - side["low"]], [side["high"] - side["mean"]]]
            axis.errorbar([x + 0.08], [side["mean"]], yerr=bars, fmt="o", color=colour, capsize=6, lw=2, ms=8)
            text = f"{side['mean']:.4g}\n[{side['low']:.4g}, {side['high']:.4g}]"
            axis.annotate(text, (x + 0.14, side["mean"]), fontsize=9, va="center")
        else:
            axis.annotate("a run diverged", (x, 0.05), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
        what = "median,\nadaptive" if side["method"] == "adaptive" else f"fixed clip C*\n= {side['clip']:g}"
        names.append(what)
    count = findings.tables[""].rows[0]["seeds"]
    axis.set_xticks(range(len(names)), names)
    axis.set_xlim(-0.5, 1.75)
    axis.set_title(f"test: {count} seeds (dots), mean and bootstrapped 95% interval", fontsize=10)
    _label_metric(axis, findings.protocol)


def _lines(axis: Axes, protocol: Protocol, rows: _Rows, key: str, prefix: str = "", lw: float = 1.8) -> None:
    """One line for each quantile or clip, over the noises at equal distances."""
    noises = list(protocol.noises)
    for number, which in enumerate(sorted({row[key] for row in rows})):
        mine = {row["noise_at_100"]: row["value"] for row in rows if row[key] == which}
        values = [mine.get(noise, math.nan) for noise in noises]
        colour = PALETTE[number % len(PALETTE)]
        _points(axis, range(len(noises)), values, "-o", color=colour, lw=lw, label=f"{prefix}{which:g}")
    lost = [
        math.nan if any(not math.isfinite(row["value"]) for row in rows if row["noise_at_100"] == z) else 0.0
        for z in noises
    ]
    _mark_diverged(axis, range(len(noises)), lost, "some diverged")
    axis.set_xticks(range(len(noises)), [f"{noise:g}" for noise in noises])
    scaled = (
        ""
        if protocol.cohort_size == PAPER_COHORT
        else f"; with {protocol.cohort_size} users, {protocol.cohort_size / PAPER_COHORT:g} times that"
    )
    axis.set_xlabel(f"noise multiplier z at 100 users a round{scaled}")
    _label_metric(axis, protocol)


def _points(axis: Axes, x: Sequence[int], values: Sequence[float], style: str, **options: Any) -> None:
    axis.plot(list(x), values, style, **{"ms": 5, **options})


def _mark_diverged(axis: Axes, x: Sequence[int], values: Sequence[float], said: str = "diverged") -> None:
    """A word at the lower edge where a value is missing."""
    for place, value in zip(x, values, strict=True):
        if not math.isfinite(value):
            axis.annotate(
                said, (place, 0.02), xycoords=("data", "axes fraction"), ha="center", fontsize=8, color=PALETTE[3]
            )


def _label_metric(axis: Axes, protocol: Protocol) -> None:
    direction = "lower is better" if protocol.lower_is_better else "higher is better"
    axis.set_ylabel(f"{protocol.metric.replace('_', ' ')} ({direction})")


def _averaged(protocol: Protocol) -> str:
    return f"validation users, average of the last {protocol.average_over} rounds"


def _box(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor=PALETTE[1], lw=3)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


_DRAWN: Mapping[str, Callable[[Findings], tuple[Figure, str]]] = {
    "learning-rates": _rates,
    "fig3": _fig3,
    "fig4": _fig4,
    "fig5": _fig5,
    "fig6": _fig6,
    "fig7": _fig7,
}
