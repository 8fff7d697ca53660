"""Figures 1 and 2 and Table 1 of the paper, which need no training."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
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
from clipline.privacy import (
    GaussianEvent,
    Ledger,
    PoissonSampling,
    Relation,
    account,
    least_scale,
    rounded_up,
    sampling_named,
)
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
        rng = streams.sampling(t)
        assert isinstance(rng, np.random.Generator), "from a seed"
        norms = np.exp(rng.normal(log_mean, log_stddev, size=(cohort_size, 1)))
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


def free(path: Path, overwrite: bool) -> Path:
    """The path, refused if there is a file: before minutes are spent on a new one."""
    if path.exists() and not overwrite:
        raise RunError(f"{str(path)!r} is in use: give another folder with --out, or --overwrite")
    return path


def _targets(folder: Path, name: str, overwrite: bool) -> tuple[Path, Path]:
    return free(folder / f"{name}.csv", overwrite), free(folder / f"{name}.png", overwrite)


def _write(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


USERS = 1_000_000
DELTA = 10**-6.6  # USERS ** -1.1
EPSILON = 5.0


@dataclass(frozen=True)
class TableRow:
    """A task: its rounds, the noise z* that its model bears at 100 users, the cohort that Table 1 prints for epsilon 5.

    The columns after those are ours: the least cohort in the paper's convention; the epsilon that the printed cohort
    really has with fixed-size sampling (replace-one) and with Poisson sampling (add-or-remove); and the least cohorts
    that really reach epsilon 5.
    """

    task: str
    rounds: int
    noise_at_100: float
    paper_cohort: int
    paper_convention_cohort: int
    fixed_epsilon: float
    poisson_epsilon: float
    fixed_cohort: int
    poisson_cohort: int


PRINTED = (
    ("CIFAR-100", 4000, 0.03, 2231),
    ("EMNIST-CR", 1500, 0.1, 513),
    ("EMNIST-AE", 3000, 0.03, 2197),
    ("Shakespeare", 1200, 0.1, 510),
    ("SO-NWP, SO-LR", 1500, 0.01, 13958),
)


def table1(show: Callable[[str], None] = lambda line: None) -> list[TableRow]:
    """All rows; `show` is told before each, as one takes a few seconds."""
    rows = []
    for task, rounds, noise, cohort in PRINTED:
        show(task)
        event = partial(_event, cohort=cohort, z=noise * cohort / 100)
        least = partial(
            least_scale, cohort_size=100, noise_multiplier=noise, population_size=USERS, rounds=rounds,
            epsilon=EPSILON, delta=DELTA,
        )  # fmt: skip
        rows.append(
            TableRow(
                task,
                rounds,
                noise,
                cohort,
                least(sampling="fixed", relation=Relation.PAPER),
                _epsilon(event("fixed"), rounds, Relation.REPLACE_ONE),
                _epsilon(event("poisson"), rounds, Relation.ADD_OR_REMOVE),
                least(sampling="fixed", relation=Relation.REPLACE_ONE),
                least(sampling="poisson", relation=Relation.ADD_OR_REMOVE),
            )
        )
    return rows


def _event(sampling: str, *, cohort: int, z: float) -> GaussianEvent:
    return GaussianEvent(sampling_named(sampling, cohort, USERS), z)


def _epsilon(event: GaussianEvent, rounds: int, relation: Relation) -> float:
    return account(Ledger().add(event, rounds), delta=DELTA, relation=relation).epsilon


def table1_text(rows: list[TableRow]) -> str:
    """The table for a terminal."""
    lines = [
        f"Users a round for (5, n^-1.1) with n = {USERS:,} and z = z* m / 100:",
        "",
        f"{'':28}  {'-- cohort for 5 --':^20}  {'-- what it really has --':^26}  {'-- honest cohort for 5 --':^25}",
        f"{'task':15}{'rounds':>7}{'z*':>6}  {'printed':>9}{'ours':>11}  {'fixed-size':>13}{'Poisson':>13}"
        f"  {'fixed-size':>12}{'Poisson':>13}",
    ]
    for row in rows:
        lines.append(
            f"{row.task:15}{row.rounds:7d}{row.noise_at_100:6g}"
            f"  {row.paper_cohort:9d}{row.paper_convention_cohort:11d}"
            f"  {rounded_up(row.fixed_epsilon, 4):>13}{rounded_up(row.poisson_epsilon, 4):>13}"
            f"  {row.fixed_cohort:12d}{row.poisson_cohort:13d}"
        )
    return "\n".join(
        [
            *lines,
            "",
            "'ours' follows the paper's convention (Theorem 27 of Wang et al. at z): it meets the table and is NOT a",
            "guarantee, since exchanging a user moves the sum by two clips. Real: replace-one for fixed-size sampling,",
            "add-or-remove for Poisson sampling.",
        ]
    )


def write_table1(folder: Path, rows: list[TableRow], *, overwrite: bool = False) -> Path:
    """The same as CSV."""
    path = free(folder / "table1.csv", overwrite)
    _write(path, [field.name for field in fields(TableRow)], [astuple(row) for row in rows])
    return path


def figure2_caption() -> str:
    """Epsilon of the 200 noisy counts of Figure 2 (100 of a million users, count noise 5): printed, and as it is."""

    def spent(sampling: str, relation: Relation, z: float) -> str:
        return rounded_up(_epsilon(_event(sampling, cohort=100, z=z), 200, relation), 3)

    # A centred bit is at most 1/2, so that noise 5 is the multiplier 10; the paper's 0.034 takes it as 5 instead.
    rows = [
        ("printed in the paper", "0.034"),
        ("its convention (Renyi, whole orders up to 256)", spent("fixed", Relation.PAPER, 5.0)),
        ("fixed-size sampling, replace one user", spent("fixed", Relation.REPLACE_ONE, 10.0)),
        ("Poisson sampling, add or remove one user", spent("poisson", Relation.ADD_OR_REMOVE, 10.0)),
    ]
    title = "Epsilon of the whole sequence of clips, at delta = n^-1.1, n = 1,000,000:"
    return "\n".join([title, *(f"  {name:<48}{value:>10}" for name, value in rows)])
