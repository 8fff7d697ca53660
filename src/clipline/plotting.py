"""One look for all our figures, drawn without a screen."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "ACCENT", "ACCENT_MARKER", "MARKERS", "ORDERED", "ORDERED_DARK", "PALETTE", "PALETTE_DARK", "LineEnd", "label_ends",
    "new_figure", "ordered_colours", "plain_log_labels", "save_figure",
]  # fmt: skip

# Of Okabe and Ito, for what has no order, such as runs: told apart with any kind of colour vision.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
PALETTE_DARK = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#ffffff")
# Of viridis, for what has an order, such as quantiles, clips and noises: 0 to 0.75 on white, 0.4 to 1 on black.
ORDERED = ("#440154", "#424086", "#2c728e", "#1fa088", "#5ec962")
ORDERED_DARK = ("#2a788e", "#1e9c89", "#44bf70", "#9bd93c", "#fde725")
ACCENT = PALETTE[1]  # of the one line that others are compared with
MARKERS = ("o", "s", "^", "D", "v")  # in the order of the colours; page.js draws the same
ACCENT_MARKER = "*"
_INK = "0.2"


def ordered_colours(count: int, stops: Sequence[str] = ORDERED) -> list[str]:
    """`count` colours at equal distances of a scale that gets lighter; page.js has the same."""
    colours = []
    for number in range(count):
        place = number * (len(stops) - 1) / max(count - 1, 1)
        left = min(int(place), len(stops) - 2)
        parts = [(int(stops[left][i : i + 2], 16), int(stops[left + 1][i : i + 2], 16)) for i in (1, 3, 5)]
        colours.append("#" + "".join(f"{round(a + (b - a) * (place - left)):02x}" for a, b in parts))
    return colours


def spread(places: Sequence[float], gap: float, low: float = 0.0, high: float = 1.0) -> list[float]:
    """The places moved as little as possible (least squares), so that each is at least `gap` from the next.

    They keep their order and stay between `low` and `high`, unless they do not all fit there.
    """
    gap = min(gap, (high - low) / max(len(places) - 1, 1))
    order = sorted(range(len(places)), key=lambda i: places[i])
    blocks: list[list[float]] = []  # of places that touch each other, as they would be without gaps
    for rank, i in enumerate(order):
        blocks.append([places[i] - rank * gap])
        while len(blocks) > 1 and sum(blocks[-2]) / len(blocks[-2]) > sum(blocks[-1]) / len(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    moved = [sum(block) / len(block) for block in blocks for _ in block]
    top = high - gap * max(len(places) - 1, 0)
    found = dict(zip(order, (min(max(one, low), top) + rank * gap for rank, one in enumerate(moved)), strict=True))
    return [found[i] for i in range(len(places))]


@dataclass(frozen=True)
class LineEnd:
    """Where a line ends, and what it is called there. `y` is NaN for a line without a point."""

    x: float
    y: float
    label: str
    colour: str


def label_ends(axis: Axes, ends: Sequence[LineEnd], *, gap: float = 0.055, size: float = 9) -> None:
    """Name lines where they end, right of the axis; call it once the limits of the axis stand.

    `gap` is the height of a label as a part of the axis. A thin line joins a label that had to move to its line.
    """
    scale = axis.yaxis.get_transform()
    low, high = (float(scale.transform([end])[0]) for end in axis.get_ylim())
    drawn = [end for end in ends if math.isfinite(end.y)]
    heights = [(float(scale.transform([end.y])[0]) - low) / (high - low) for end in drawn]
    for end, height in zip(drawn, spread(heights, gap), strict=True):
        axis.annotate(
            end.label, (end.x, end.y), (1.02, height), textcoords="axes fraction", va="center", fontsize=size,
            color=_INK, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.colour, "lw": 0.9, "shrinkA": 1, "shrinkB": 3},
        )  # fmt: skip


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure with its axes in reading order; size in inches."""
    from cycler import cycler
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, i + 1) for i in range(rows * columns)]
    for axis in axes:
        axis.set_prop_cycle(cycler(color=PALETTE))
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(True, axis="y", color="0.92")
        axis.set_axisbelow(True)
        axis.ticklabel_format(useOffset=False)  # labels in full, in as many digits as their step needs
    return figure, axes


def plain_log_labels(axis: Axes) -> None:
    """Label a logarithmic y axis 0.15 and not 1.5 x 10^-1."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """The labels that matplotlib would show, without powers of ten."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:.10g}" if super().__call__(x, pos) else ""

    axis.yaxis.set_major_formatter(Plain())
    axis.yaxis.set_minor_formatter(Plain())


def save_figure(figure: Figure, path: Path | IO[bytes]) -> None:
    """Write as PNG; letters that the font lacks become boxes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(path, dpi=130)
