"""One look for all our figures, drawn without a screen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["PALETTE", "new_figure", "plain_log_labels", "save_figure"]

PALETTE = ("#0b6e8f", "#e07a1f", "#3f8f4f", "#a8324a", "#6b4fa0")


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
    return figure, axes


def plain_log_labels(axis: Axes) -> None:
    """Label a logarithmic y axis 0.15 and not 1.5 x 10^-1."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        """The labels that matplotlib would show, in few digits."""

        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if super().__call__(x, pos) else ""

    axis.yaxis.set_major_formatter(Plain())
    axis.yaxis.set_minor_formatter(Plain())


def save_figure(figure: Figure, path: Path) -> None:
    """Write as PNG."""
    figure.savefig(path, dpi=130)
