"""Figures 1 and 2 of the paper: the numbers as CSV, then the picture made from those numbers."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clipline import QuantileClip
from clipline.errors import RunError
from clipline.federated import ClippedSum, GaussianMechanism, clip_rows, join_bit
from clipline.plotting import LineEnd, label_ends, new_figure, ordered_colours, plain_log_labels, save_figure
from clipline.privacy import PoissonSampling
from clipline.random import Streams

QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
FIGURE1_VALUES = (15.0, 25.0, 28.0, 40.0, 45.0, 48.0)
FIGURE1_QUANTILES = (0.01, 0.5, 0.75, 0.99)
FIGURE2_POPULATIONS = ((0.0, 1.0), (0.0, 0.1), (float(np.log(10.0)), 1.0))  # mean and deviation of the log


def quantile_loss(clip: NDArray[np.float64], values: Sequence[float], quantile: float) -> NDArray[np.float64]:
    """The average over `values` of the loss whose minimiser is their quantile (section 2), at each clip."""
    excess = clip[:, None] - np.asarray(values)[None, :]
    losses: NDArray[np.float64] = np.where(excess >= 0, (1 - quantile) * excess, -quantile * excess).mean(axis=1)
    return losses


def track_quantile(
    *,
    log_mean: float,
    log_stddev: float,
    quantile: float,
    seed: int,
    rounds: int = 200,
    cohort_size: int = 100,
    start: float = 0.1,
) -> list[float]:
    """The clip in each round when norms are drawn anew from exp(N(log_mean, log_stddev^2)).

    It is the clip of a real training: each norm is an update of one coordinate, and aggregation, mechanism and
    controller are the ones that train models.
    """
    streams = Streams(seed)
    controller = QuantileClip(quantile=quantile, start=start)
    mechanism = GaussianMechanism(cohort_size, noise_multiplier=1.0, count_stddev=cohort_size / 20)
    state, clips = controller.init(), []
    for t in range(rounds):
        clips.append(state.clip)
        norms = np.exp(streams.sampling(t).normal(log_mean, log_stddev, size=(cohort_size, 1)))
        clipped = join_bit(*clip_rows(torch.from_numpy(norms), state.clip))
        total = ClippedSum(clipped.sum(dim=0), state.clip, PoissonSampling(1.0))
        state = controller.update(state, mechanism.release(total, streams.noise(t)))
    return clips


def figure1(folder: Path, *, overwrite: bool = False) -> list[Path]:
    """The losses for six values: `fig1.csv` (quantile, clip, loss) and `fig1.png`."""
    table, picture = _targets(folder, "fig1", overwrite)
    clips = np.linspace(10, 55, 451)
    losses = {q: quantile_loss(clips, FIGURE1_VALUES, q) for q in FIGURE1_QUANTILES}
    rows = [(q, round(float(c), 6), float(v)) for q, loss in losses.items() for c, v in zip(clips, loss, strict=True)]
    _write(table, ("quantile", "clip", "loss"), rows)
    figure, axes = new_figure(1, 1, width=7.5, height=4.2)
    axis = axes[0]
    ends = []
    for (quantile, loss), colour in zip(losses.items(), ordered_colours(len(losses)), strict=True):
        axis.plot(clips, loss, color=colour, lw=2)
        lowest = loss <= loss.min() + 1e-9
        axis.plot(clips[lowest], loss[lowest], "o-", markevery=[0, -1], ms=8, lw=8, alpha=0.4, color=colour)
        ends.append(LineEnd(float(clips[-1]), float(loss[-1]), f"quantile {quantile:g}", colour))
    for value in FIGURE1_VALUES:
        axis.axvline(value, color="0.8", lw=0.8, zorder=0)
    axis.set(
        xlabel="clip C (grey lines: the six values 15, 25, 28, 40, 45, 48)",
        ylabel="average loss",
        title="The loss whose minimum is the quantile (thick: where it is least)",
        xlim=(clips[0], clips[-1]),
        ylim=(0, None),
    )
    label_ends(axis, ends)
    save_figure(figure, picture)
    return [table, picture]


def figure2(folder: Path, *, seed: int = 0, overwrite: bool = False) -> list[Path]:
    """Five quantiles tracked on three log-normal populations: `fig2.csv` and `fig2.png`."""
    Streams(seed)  # refuses what is no seed
    table, picture = _targets(folder, "fig2", overwrite)
    figure, axes = new_figure(1, len(FIGURE2_POPULATIONS), width=13.5, height=4.4)
    rows, colours = [], ordered_colours(len(QUANTILES))
    for i, (axis, (log_mean, log_stddev)) in enumerate(zip(axes, FIGURE2_POPULATIONS, strict=True)):
        ends = []
        for j, (quantile, colour) in enumerate(zip(QUANTILES, colours, strict=True)):
            own_seed = 100 * seed + 10 * i + j  # the fifteen curves are independent of each other
            clips = track_quantile(log_mean=log_mean, log_stddev=log_stddev, quantile=quantile, seed=own_seed)
            truth = float(np.exp(log_mean + log_stddev * NormalDist().inv_cdf(quantile)))
            rows += [(log_mean, log_stddev, quantile, t, clip, truth) for t, clip in enumerate(clips)]
            axis.plot(clips, lw=1.6, color=colour)
            axis.axhline(truth, color=colour, ls="--", lw=0.9)
            ends.append(LineEnd(len(clips) - 1, clips[-1], f"{quantile:g}", colour))
        name = "log 10" if log_mean > 0 else "0"
        axis.set(title=f"norms exp(N({name}, {log_stddev:g}²))", xlabel="round", yscale="log", xlim=(0, len(clips) - 1))
        plain_log_labels(axis)
        label_ends(axis, ends)
    axes[0].set_ylabel("clip")
    figure.suptitle(
        "The clip finds its quantile from 0.1 (dashed: the true quantile, named at the right; 100 users a round, count "
        "noise 5)"
    )
    _write(table, ("log_mean", "log_stddev", "quantile", "round", "clip", "true_quantile"), rows)
    save_figure(figure, picture)
    return [table, picture]


def _targets(folder: Path, name: str, overwrite: bool) -> tuple[Path, Path]:
    targets = folder / f"{name}.csv", folder / f"{name}.png"
    for target in targets:
        if target.exists() and not overwrite:
            raise RunError(f"{str(target)!r} is in use: give another folder with --out, or --overwrite")
    return targets


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
