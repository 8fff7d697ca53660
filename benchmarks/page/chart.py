"""The picture of the performance page: how many times longer the peers take, by task and machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from peers.systems import PEERS

from .comparison import Comparison

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Bars = dict[str, dict[str, dict[str, float]]]  # machine -> task -> bar -> times
BARS = {  # label -> colour
    "whole training, real users, against pfl-research": "#0b6e8f",
    "whole training, even users, against pfl-research": "#7fb6c8",
    "a warm round, made-up users, against pfl-research": "#e07a1f",
    "a warm round, made-up users, against FedJAX": "#3f8f4f",
    "a warm round, made-up users, against Flower": "#6b4fa0",
}


def bars(rows: Sequence[Comparison]) -> Bars:
    """The numbers that are drawn, to two digits after the point."""
    found: Bars = {}
    for row in rows:
        whole = [row.times(data) for data in ("real", "even")]
        rounds = [row.round_times(system) for system in PEERS]
        drawn = zip(BARS, [*whole, *rounds], strict=True)
        found.setdefault(row.machine, {})[row.task] = {name: round(x, 2) for name, x in drawn if x is not None}
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
    from clipline.plotting import new_figure

    tall = max(len(tasks) for tasks in numbers.values())
    figure, axes = new_figure(1, len(numbers), width=5.6 * len(numbers), height=1.6 + 0.92 * tall)
    for axis, (machine, tasks) in zip(axes, numbers.items(), strict=True):
        _panel(axis, machine, tasks)
    shown = [name for name in BARS if any(name in bar for tasks in numbers.values() for bar in tasks.values())]
    handles = [axes[0].barh([0], [0], color=BARS[name], label=name) for name in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=130, metadata={"Description": json.dumps(numbers), "Software": None})


def _panel(axis: Axes, machine: str, tasks: dict[str, dict[str, float]]) -> None:
    thick = 0.8 / len(BARS)
    axis.set_xscale("log")
    for place, found in enumerate(tasks.values()):
        for number, (name, times) in enumerate(found.items()):
            y = place + (number - (len(found) - 1) / 2) * thick
            axis.barh([y], [times - 1], thick * 0.92, left=1, color=BARS[name])
            end = (max(1.0, times), y)  # of a bar to the left of 1, beside it and not upon it
            axis.annotate(f"{times:.3g}", end, (3, 0), textcoords="offset points", va="center", fontsize=8)
        if not found:
            axis.annotate("not measured", (1, place), (4, 0), textcoords="offset points", va="center", color="0.5")
    drawn = [times for found in tasks.values() for times in found.values()]
    least, most = min([1.0, *drawn]), max([1.0, *drawn])
    axis.set_xlim(0.8 * least, max(10, most * 2))
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set_yticks(range(len(tasks)), list(tasks))
    axis.invert_yaxis()
    axis.grid(False, axis="y")
    axis.grid(True, axis="x", color="0.92")
    ticks = [
        tick for tick in (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500) if 0.8 * least <= tick <= max(10, most * 2)
    ]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("times as long as clipline (1: equally fast; logarithmic)")
    axis.set_title(machine)
