"""The picture of the performance page: how many times longer the peers take, by task, machine and arithmetic."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peers.systems import PEERS

from .comparison import DATA, Comparison
from .tables import by_arithmetic, short

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))
from clipline.plotting import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Drawn = list[Any]  # times; whether they are estimated
Bars = dict[str, dict[str, dict[str, Drawn]]]  # machine and arithmetic -> task -> bar
BARS = {  # label -> colour
    "whole training, real users, against pfl-research": PALETTE[0],
    "whole training, even users, against pfl-research": PALETTE[5],
    "a warm round, made-up users, against pfl-research": PALETTE[4],
    "a warm round, made-up users, against FedJAX": PALETTE[2],
    "a warm round, made-up users, against Flower": PALETTE[3],
}
_TICKS = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def bars(rows: Sequence[Comparison]) -> Bars:
    """The numbers that are drawn, to two digits after the point. A panel without any was not measured."""
    found: Bars = {}
    for (machine, arithmetic), of in by_arithmetic(rows).items():
        panel = found.setdefault(f"{short(machine)}, {arithmetic}", {})
        for row in [row for row in rows if row in of and of[0].measured]:
            whole = [(row.times(data), row.estimated(data)) for data in DATA]
            drawn = zip(BARS, [*whole, *((row.round_times(system), False) for system in PEERS)], strict=True)
            panel[row.task] = {name: [round(x, 2), about] for name, (x, about) in drawn if x is not None}
    return found


def drawn_in(path: Path) -> Bars | None:
    """The numbers that a picture shows; None if there is no picture, or none of ours."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        text = image.info.get("Description")
    return None if text is None else json.loads(text)


def draw(numbers: Bars, path: Path) -> None:
    """Write the picture as PNG, with its numbers in it, so that a test can tell whether it is up to date."""
    from matplotlib.patches import Patch

    panels = {name: tasks for name, tasks in numbers.items() if tasks}
    tall = [sum(max(1, len(found)) + 0.6 for found in tasks.values()) for tasks in panels.values()]
    figure, axes = new_figure(len(panels), 1, width=9, height=1.4 + 0.17 * sum(tall) + 0.6 * len(tall))
    axes[0].get_gridspec().set_height_ratios(tall)
    all_times = [x for tasks in panels.values() for found in tasks.values() for x, _ in found.values()]
    limits = 0.8 * min([1.0, *all_times]), 1.6 * max([10.0, *all_times])  # one scale, so that panels can be compared
    for axis, (panel, tasks) in zip(axes, panels.items(), strict=True):
        _panel(axis, panel, tasks, limits)
    axes[-1].set_xlabel("times as long as clipline (1: equally fast; logarithmic, the same scale everywhere)")
    shown = [name for name in BARS if any(name in found for tasks in panels.values() for found in tasks.values())]
    handles = [Patch(color=BARS[name], label=name) for name in shown]
    handles.append(Patch(facecolor="none", edgecolor="0.3", label="hollow: estimated from some of its rounds"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    if missing := [name for name, tasks in numbers.items() if not tasks]:
        figure.suptitle(f"Not measured: {'; '.join(missing)}", fontsize=9, color="0.4", x=0.99, ha="right")
    figure.savefig(path, dpi=130, metadata={"Description": json.dumps(numbers), "Software": None})


def _panel(axis: Axes, title: str, tasks: dict[str, dict[str, Drawn]], limits: tuple[float, float]) -> None:
    axis.set_xscale("log")
    place, middles = 0.0, []
    for found in tasks.values():
        middles.append(place + (max(1, len(found)) - 1) / 2)
        for name, (times, about) in found.items():
            look = {"facecolor": "none" if about else BARS[name], "edgecolor": BARS[name], "linewidth": 1.2}
            axis.barh([place], [times - 1], 0.8, left=1, **look)
            end = (max(1.0, times), place)  # of a bar to the left of 1, beside it and not upon it
            axis.annotate(f"{times:.3g}", end, (3, 0), textcoords="offset points", va="center", fontsize=8)
            place += 1
        if not found:
            axis.annotate("not measured", (1, place), (4, 0), textcoords="offset points", va="center", color="0.4")
            place += 1
        place += 0.6
    axis.set_xlim(*limits)
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set_yticks(middles, list(tasks))
    axis.set_ylim(place - 0.6 - 0.3, -0.7)
    axis.grid(False, axis="y")
    axis.grid(True, axis="x", color="0.92")
    ticks = [tick for tick in _TICKS if limits[0] <= tick <= limits[1]]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_title(title, loc="left", fontsize=11)
