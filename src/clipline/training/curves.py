"""A figure of a run: metric, clip, epsilon and fraction within over the rounds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..federated.round import TrainState
from ..plotting import new_figure, plain_log_labels, save_figure
from ..privacy.guarantee import Guarantee
from ..random.streams import GUESSABLE
from .callbacks import Callback
from .diagnosis import RELEASED
from .result import RoundReport, round_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .result import TrainResult
    from .training import Training

_LINE = 140  # characters that fit above the figure
_INSIDERS = "other examples of the training users"  # how a task says whom it measures on
_STRIKE = "\u0336"  # after a character, strikes it through


class Curves(Callback):
    """Draws the rounds of a run into a PNG file when the run ends.

    After a resume the figure has the rounds since. That of a `RunDirectory` has all of them.

    Args:
      path: The PNG file.
      metric: Name of the metric to draw. Left out, it is the first that was measured.
      title: Stands above the figure, before the guarantee.

    Example:
      >>> training.run([cl.Evaluate(test, accuracy), cl.Curves("curves.png")])
    """

    def __init__(self, path: str | Path, *, metric: str | None = None, title: str = "") -> None:
        self.path, self.metric, self.title = Path(path), metric, title
        self._rounds: list[Mapping[str, Any]] = []
        self._training: Training | None = None

    def on_start(self, training: Training, state: TrainState) -> None:
        """Begin with no rounds."""
        self._rounds, self._training = [], training

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Note what the round released."""
        self._rounds.append(round_json(report))

    def on_end(self, result: TrainResult) -> None:
        """Write the figure, if there was a round."""
        if self._rounds:
            assert self._training is not None, "on_start comes first"
            rounds, training = self._rounds, self._training
            draw_curves(self.path, rounds, result.guarantee, training, metric=self.metric, title=self.title)


def quantile_of(training: Training) -> float | None:
    """The fraction of users that the clip aims to have within, if it has such an aim."""
    quantile = getattr(training.algorithm.controller, "quantile", None)
    return float(quantile) if isinstance(quantile, int | float) else None


def _why_void(training: Training, guarantee: Guarantee, measured_on: str) -> str:
    """Why the epsilon on record does not hold, in a few words; nothing where it does."""
    if guarantee.shows_errors:
        return "errors of users are shown"
    if training.privacy.noise_source == "seed" and training.seed is not None and training.seed < GUESSABLE:
        return "the seed of its noise is easily guessed"
    return "metrics are of the training users" if measured_on.startswith(_INSIDERS) else ""


def draw_curves(
    path: Path,
    rounds: Sequence[Mapping[str, Any]],
    guarantee: Guarantee,
    training: Training,
    *,
    metric: str | None = None,
    title: str = "",
    measured_on: str = "",
) -> None:
    """Draw rounds, each as `round_json` gives it and at least one, into a PNG file.

    `measured_on` says whom the metrics are about. A guarantee that does not hold is struck through, and no epsilon is
    drawn.
    """
    quantile, void = quantile_of(training), _why_void(training, guarantee, measured_on)
    figure, (measured, clip, epsilon, within) = new_figure(2, 2, width=11, height=6.4)
    number = [r["round"] + 1 for r in rounds]
    names = [name for r in rounds for name in r if name not in RELEASED]
    name = metric if metric is not None else next(iter(names), "metric")
    points = [(r["round"] + 1, _or_nan(r[name])) for r in rounds if name in r]
    if points:
        measured.plot([n for n, _ in points], [value for _, value in points], marker="o", ms=3.5)
        measured.set_title(f"{name} on {measured_on.split(',')[0]}" if measured_on else name)
    else:
        _say(measured, name, "not measured")
    if rounds[-1]["clip"] is None:
        _say(clip, "clip", "no clip")
    else:
        clip.plot(number, [_or_nan(r["clip"]) for r in rounds])
        clip.set(title="clip (log scale)", yscale="log")
        plain_log_labels(clip)
    if guarantee.private and not void:
        spent = [(n, r["epsilon"]) for n, r in zip(number, rounds, strict=True) if r.get("epsilon") is not None]
        epsilon.plot([n for n, _ in spent], [value for _, value in spent])
        epsilon.set(title=f"epsilon spent so far, at delta {guarantee.delta_text}", ylim=(0, None))
    else:
        _say(epsilon, "epsilon", f"NOT PRIVATE\n{void if guarantee.private else 'no noise was added'}")
    if rounds[-1]["fraction_within"] is None:
        _say(within, "fraction of updates within the clip", "not released:\na clip that does not adapt needs no count")
    else:
        within.plot(number, [_or_nan(r["fraction_within"]) for r in rounds], ".", ms=4, alpha=0.7)
        within.set_title("noisy fraction within the clip")
        if quantile is not None:
            within.axhline(quantile, color="0.4", lw=1, ls="--")
            within.set_title(f"noisy fraction within the clip (dashed: target {quantile:g})")
    for axis in (measured, clip, epsilon, within):
        axis.set_xlim(0, number[-1] + 1)
        axis.set_xlabel("round")
    struck = guarantee.private and bool(void)
    title = title.encode("utf-8", "replace").decode()  # a folder's name may be no text, nor meant as mathematics
    lines = [textwrap.fill(text, _LINE) for text in (title, str(guarantee)) if text]
    if struck:
        lines[-1] = "".join(letter if letter == "\n" else letter + _STRIKE for letter in lines[-1])
        lines.append(f"NOT PRIVATE: {void}")
    figure.suptitle("\n".join(lines), fontsize=10, parse_math=False)
    save_figure(figure, path)


def _or_nan(number: float | None) -> float:
    return math.nan if number is None else number


def _say(axis: Axes, title: str, text: str) -> None:
    axis.set(title=title, yticks=[])
    axis.text(0.5, 0.5, text, ha="center", va="center", transform=axis.transAxes)
