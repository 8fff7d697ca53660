"""Figures 3 to 7 of the paper and its search for learning rates: the runs that each asks for, the tables it makes.

An experiment asks for runs, looks at them, and asks for the next. Runs are shared by identity: Figure 4 is made of runs
of Figure 3, Figures 5 to 7 take their clip range from it, and Figure 7 chooses among runs of 5 and 6.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

from clipline.errors import RunError, check_choice
from clipline.study import RunRecord, RunSpec
from clipline.tasks import TrainSettings

from ..facts import FACTS
from .protocol import HIGHEST, LOWEST, MEDIAN, PAPER_COHORT, Protocol
from .rules import (
    DEGRADED,
    ClipCurve,
    Interval,
    Row,
    best_of_server_rates,
    best_row,
    bootstrap,
    clip_range,
    compare_clips,
    log_spaced,
    score,
    tolerable_noise,
    within_tolerance,
)


@dataclass(frozen=True)
class Table:
    """Rows of one CSV file. Every row has these columns, and perhaps others; `runs` names the runs behind it."""

    columns: tuple[str, ...]
    rows: list[dict[str, Any]]

    def to_csv(self) -> str:
        """The file's text. What is not there (a clip of a run without one, the metric of a diverged run) is empty."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([cell(row[name]) for name in self.columns] for row in self.rows)
        return text.getvalue()


@dataclass(frozen=True)
class Findings:
    """Tables by the end of their file names ("" is the figure's own), numbers by name, and a few sentences."""

    what: str
    protocol: Protocol
    tables: Mapping[str, Table]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    summary: Sequence[str] = ()

    @property
    def name(self) -> str:
        """Of the experiment on this task, as its files and `study.json` call it."""
        return f"{self.what}-{self.protocol.task}"

    def csv_name(self, table: str) -> str:
        """The file of a table."""
        return f"{self.name}{'-' + table if table else ''}.csv"


def disagreements(table: Table, path: Path) -> list[str]:
    """Where a CSV file is not the table: a sentence for each kind of difference; none if all numbers agree."""
    try:
        found = list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, csv.Error) as error:
        return [f"{path.name} cannot be read ({error})"]
    wanted = list(csv.reader(io.StringIO(table.to_csv())))
    if not found or found[0] != wanted[0]:
        return [f"{path.name} has other columns than its runs give"]
    if len(found) != len(wanted):
        return [f"{path.name} has {len(found) - 1} rows, and its runs give {len(wanted) - 1}"]
    return [
        f"{path.name}, line {line}: {name} is {mine!r}, and its runs give {right!r}"
        for line, (row, other) in enumerate(zip(found[1:], wanted[1:], strict=True), start=2)
        for name, mine, right in zip(wanted[0], row, other, strict=False)
        if not _same(mine, right)
    ]


def _same(mine: str, right: str) -> bool:
    """Equal as text, or as numbers up to the rounding of another machine."""
    if mine == right:
        return True
    try:
        return math.isclose(float(mine), float(right), rel_tol=1e-9)
    except ValueError:
        return False


def cell(value: Any) -> str:
    """A value as tables show it."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return repr(value) if isinstance(value, float) else str(value)


OF_RUN = ("method", "quantile", "clip", "noise_at_100", "noise_multiplier", "client_lr", "server_lr")


class Results(Interface):
    """What makes runs, or looks them up: a `Study`."""

    def results(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order; those that are missing are made."""


@dataclass(frozen=True)
class Grid:
    """A study, the protocol, and the settings that all runs share. A row holds its run's `spec` beside its columns."""

    study: Results
    protocol: Protocol
    base: TrainSettings
    _kept: dict[RunSpec, RunRecord] = field(default_factory=dict)  # what was asked for before is not asked for again

    def records(self, specs: Sequence[RunSpec]) -> list[RunRecord]:
        """The records of these runs, in order."""
        missing = [spec for spec in dict.fromkeys(specs) if spec not in self._kept]
        if missing:
            self._kept.update(zip(missing, self.study.results(missing), strict=True))
        return [self._kept[spec] for spec in specs]

    def adaptive(self, quantiles: Sequence[float], noises: Sequence[float]) -> list[Row]:
        """A run to make for each quantile, noise and server rate."""
        return [
            self._asked(self.protocol.adaptive(self.base, q, z, f), method="adaptive", quantile=q, noise_at_100=z)
            for q, z, f in product(quantiles, noises, self.protocol.server_rates)
        ]

    def fixed(self, clips: Sequence[float], noises: Sequence[float]) -> list[Row]:
        """A run to make for each clip, noise and server rate."""
        return [
            self._asked(self.protocol.fixed(self.base, c, z, f), method="fixed", clip=c, noise_at_100=z)
            for c, z, f in product(clips, noises, self.protocol.server_rates)
        ]

    def unclipped(self, rates: Sequence[tuple[float, float]]) -> list[Row]:
        """A run to make for each pair of client and server rate, without clipping and noise."""
        runs = [self.protocol.unclipped(self.base, *pair) for pair in rates]
        return [self._asked(run, method="unclipped", noise_at_100=0.0) for run in runs]

    def rows(self, asked: Sequence[Row]) -> list[dict[str, Any]]:
        """These runs with what came of them; the best server rate of each configuration is `chosen`."""
        protocol, rows = self.protocol, []
        for row, record in zip(asked, self.records([row["spec"] for row in asked]), strict=True):
            value = record.average(protocol.metric, protocol.average_over)
            found = {"value": value if math.isfinite(value) else math.nan, "outcome": record.outcome, "chosen": False}
            rows.append({**row, **found, "runs": record.id})
        by = ("method", "quantile", "clip", "noise_at_100")
        best = best_of_server_rates(rows, by, "value", lower_is_better=protocol.lower_is_better)
        return [{**row, "chosen": any(row is one for one in best)} for row in rows]

    def chosen(self, asked: Sequence[Row]) -> list[dict[str, Any]]:
        """The rows at their best server rate alone."""
        return chosen(self.rows(asked))

    def clips(self) -> tuple[list[float], dict[str, Any]]:
        """The five fixed clips, and C_min and C_max with the two runs that they come from."""
        rows = self.chosen(self.adaptive((LOWEST, HIGHEST), (0.0,)))
        low, high = clip_range(*(self._curve(row) for row in rows))
        clips = log_spaced(low, high)
        return clips, {"clip_min": low, "clip_max": high, "clips": clips, "runs": [row["runs"] for row in rows]}

    def tested(self, rows: Sequence[Row]) -> list[list[dict[str, Any]]]:
        """For each of these configurations a row for each seed: its final model, measured on the test users."""
        seeds = range(1, self.protocol.seeds + 1)
        asked = list(product(rows, seeds))
        runs = [RunSpec(self.protocol.tested(row["spec"].settings, seed)) for row, seed in asked]
        found = list[dict[str, Any]]()
        for (row, seed), record in zip(asked, self.records(runs), strict=True):
            value = None if record.outcome == "diverged" else record.final.get(self.protocol.metric)
            found.append({
                **{name: row[name] for name in OF_RUN}, "seed": seed,
                "value": math.nan if value is None else float(value), "outcome": record.outcome,
                "clips": [float(clip) for clip in record.rounds["clip"] if clip is not None], "runs": record.id,
            })  # fmt: skip
        return [found[first : first + len(seeds)] for first in range(0, len(found), len(seeds))]

    def _curve(self, row: Row) -> ClipCurve:
        (record,) = self.records([row["spec"]])
        clips = [math.nan if clip is None else float(clip) for clip in record.rounds["clip"]]
        return ClipCurve(row["quantile"], clips, record.rounds["fraction_within"])

    def _asked(self, settings: TrainSettings, **labels: Any) -> Row:
        """Runs without noise that follow a quantile also record the true quantiles, for Figure 4."""
        unprivate = settings.clip == "quantile" and settings.noise_multiplier == 0
        rates = {name: getattr(settings, name) for name in ("noise_multiplier", "client_lr", "server_lr")}
        spec = RunSpec(settings, unprivate, evaluate_last=self.protocol.evaluate_last)
        return {**dict.fromkeys(OF_RUN), **labels, **rates, "spec": spec}


def chosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows at their best server rate."""
    return [row for row in rows if row["chosen"]]


BOOTSTRAP_SEED = 0
_FAR = 2.0  # times the largest clip without noise: a tracked clip beyond it was driven there by noise
_RUNS_ONLY = "this shows that it runs, not the finding: give --scale small, or more --rounds"
MEDIAN_IS_WORST = "on the validation users the median is the worst of the six clips at every noise (one seed)"
_WITHOUT_NOISE = "; z* is 0, so that this says nothing about noise"


def learning_rates(grid: Grid) -> Findings:
    """Section 3.1: 25 pairs of client and server rate without clipping; then the server rates of the median clip."""
    protocol = grid.protocol
    rows = grid.rows(grid.unclipped(protocol.searched_rates()) + grid.adaptive((MEDIAN,), (0.0,)))
    searched = [row for row in rows if row["method"] == "unclipped"]
    median = [row for row in rows if row["method"] == "adaptive"]
    best, clipped = chosen(searched)[0], chosen(median)[0]
    flags = f"--client-lr {best['client_lr']:.4g} --server-lr {best['server_lr']:.4g}"
    grid_ends = [
        (name, extreme(row[name] for row in searched)) for name in ("client_lr", "server_lr") for extreme in (min, max)
    ]
    edge = ", at the edge of the grid" if any(best[name] == end for name, end in grid_ends) else ""
    base = next((row["value"] for row in searched if _at_base_rates(protocol, row)), math.nan)
    reached = f", which are {_compared(protocol, base, best['value'], 'the best')}" if math.isfinite(base) else ""
    beside = _compared(protocol, clipped["value"], best["value"], f"no clipping at the best of {len(searched)} rates")
    summary = [
        f"without clipping, client rate {best['client_lr']:.3g} and server rate {best['server_lr']:.3g} are best of "
        f"{len(searched)}{edge}: {_said(protocol, best['value'])}",
        "these are the base rates of the other figures"
        if _at_base_rates(protocol, best)
        else f"the other figures use client rate {protocol.client_lr:.3g} and server rate {protocol.server_lr:.3g}"
        f"{reached}: give {flags} to change that",
        f"with the median clip, server rate {clipped['server_lr']:.3g} is best of {len(median)}: "
        f"{_said(protocol, clipped['value'])}, {beside}",
    ]
    numbers = {
        "client_lr": best["client_lr"], "server_lr": best["server_lr"], "median_server_lr": clipped["server_lr"],
        "beside": beside,
    }  # fmt: skip
    return Findings("learning-rates", protocol, {"": _table(rows)}, numbers, summary)


def fig3(grid: Grid) -> Findings:
    """Impact of clipping without noise: unclipped against adaptive clips, each at its best server rate."""
    protocol = grid.protocol
    unclipped = grid.unclipped([(protocol.client_lr, protocol.server_lr)])
    rows = grid.rows(unclipped + grid.adaptive(protocol.quantiles, (0.0,)))
    baseline, adaptive = rows[0]["value"], rows[1:]
    lines = [f"without clipping: {_said(protocol, baseline)}"]
    for row in chosen(adaptive):
        lines.append(
            f"quantile {row['quantile']:g}: {_said(protocol, row['value'])}, server rate {row['server_lr']:.3g}"
        )
    at_median = next((row["value"] for row in chosen(adaptive) if row["quantile"] == MEDIAN), math.nan)
    numbers: dict[str, Any] = {"unclipped": baseline, "median": at_median}
    if math.isfinite(at_median):
        rates = len(protocol.server_rates)
        tried = (
            f"one server rate without clipping, the best of {rates} with it" if rates > 1 else "one server rate each"
        )
        compared = _compared(protocol, at_median, baseline, "no clipping")
        opened = f"{compared[:-1]}; " if compared.endswith(")") else f"{compared} ("  # one pair of parentheses
        numbers["verdict"] = f"clipping to the median without noise is {opened}one seed, {tried})"
        lines.append(numbers["verdict"])
    return Findings("fig3", protocol, {"": _table(rows)}, numbers, lines)


def fig4(grid: Grid) -> Findings:
    """The clip at each quantile without noise, the true quantile beside it, and the range of fixed clips."""
    protocol = grid.protocol
    grid.rows(grid.adaptive(sorted({*protocol.quantiles, LOWEST, HIGHEST}), (0.0,)))  # side by side, with the range's
    rows = grid.chosen(grid.adaptive(protocol.quantiles, (0.0,)))
    records = grid.records([row["spec"] for row in rows])
    columns = ("quantile", "round", "clip", "fraction_within", "unprivate_quantile", "server_lr", "runs")
    curves = []
    for row, record in zip(rows, records, strict=True):
        nothing = [None] * len(record.rounds["round"])
        true = record.rounds.get(f"unprivate_quantile_{row['quantile']:g}", nothing)
        table = zip(*(record.rounds[name] for name in ("round", "clip", "fraction_within")), true, strict=True)
        curves += [
            dict(zip(columns, (row["quantile"], *numbers, row["server_lr"], record.id), strict=True))
            for numbers in table
        ]
    try:
        clips, found = grid.clips()
    except RunError as error:  # the curves are worth seeing all the same
        tables = {"": Table(columns, curves), "clips": Table(("place", "clip", "runs"), [])}
        return Findings("fig4", protocol, tables, {}, [str(error)])
    fixed = [{"place": i + 1, "clip": clip, "runs": " ".join(found["runs"])} for i, clip in enumerate(clips)]
    ends = [
        {"place": name, "clip": found[name], "runs": run}
        for name, run in zip(("clip_min", "clip_max"), found["runs"], strict=True)
    ]
    tables = {"": Table(columns, curves), "clips": Table(("place", "clip", "runs"), ends + fixed)}
    low, high = f"C_min = {found['clip_min']:.3g} (quantile 0.1)", f"C_max = {found['clip_max']:.3g} (quantile 0.9)"
    listed = ", ".join(f"{clip:g}" for clip in clips)
    summary = [f"after the ramp-up, clips go from {low} to {high}", f"fixed clips to compare with: {listed}"]
    return Findings("fig4", protocol, tables, found, summary)


def fig5(grid: Grid) -> Findings:
    """Adaptive clips at five quantiles and four noises, each at its best server rate."""
    protocol = grid.protocol
    rows = grid.rows(grid.adaptive(protocol.quantiles, protocol.noises))
    return Findings("fig5", protocol, {"": _table(rows)}, {}, _best_by_noise(protocol, rows, "quantile"))


def fig6(grid: Grid) -> Findings:
    """Fixed clips, five of the range that Figure 4 gives, at four noises, each at its best server rate."""
    protocol = grid.protocol
    clips, found = grid.clips()
    rows = grid.rows(grid.fixed(clips, protocol.noises))
    return Findings("fig6", protocol, {"": _table(rows)}, found, _best_by_noise(protocol, rows, "clip"))


def fig7(grid: Grid) -> Findings:
    """z*, C*, and the median clip against C* on the test users, over seeds of user selection and noise.

    z* goes by the best of what is compared: the median and the five fixed clips, each at its best server rate. Both
    sides of the final comparison have the server rate that was best for them at z* on the validation users.
    """
    protocol = grid.protocol
    lower = protocol.lower_is_better
    median_runs = grid.adaptive((MEDIAN,), protocol.noises)
    grid.rows(median_runs + grid.adaptive((LOWEST, HIGHEST), (0.0,)))  # side by side
    clips, found = grid.clips()
    rows = grid.rows(median_runs + grid.fixed(clips, protocol.noises))
    at = {noise: [row for row in chosen(rows) if row["noise_at_100"] == noise] for noise in protocol.noises}
    best = {noise: best_row(at[noise], "value", lower_is_better=lower) for noise in protocol.noises}
    z_star = tolerable_noise({noise: row["value"] for noise, row in best.items()}, lower_is_better=lower)
    medians = {noise: next(row for row in at[noise] if row["method"] == "adaptive") for noise in protocol.noises}
    alone = tolerable_noise({noise: row["value"] for noise, row in medians.items()}, lower_is_better=lower)
    median = medians[z_star]
    fixed = best_row([row for row in at[z_star] if row["method"] == "fixed"], "value", lower_is_better=lower)
    sides = dict(zip(("median", "best fixed clip"), grid.tested([median, fixed]), strict=True))
    means = {side: bootstrap([row["value"] for row in tested], seed=BOOTSTRAP_SEED) for side, tested in sides.items()}
    by_seed = [{row["seed"]: row["value"] for row in tested} for tested in sides.values()]
    judged = compare_clips(*by_seed, lower_is_better=lower, seed=BOOTSTRAP_SEED)
    tables = {
        "": _means(sides, means),
        "seeds": Table(
            ("side", "seed", "value", "outcome", "runs"),
            [{**row, "side": side} for side, tested in sides.items() for row in tested],
        ),
        "choice": _choice(protocol, rows, best, z_star, fixed["clip"]),
    }
    paths = [row["clips"] or [math.nan] for row in sides["median"]]  # empty if it diverged in its first round
    highest = max(map(max, paths))
    numbers = {
        **found, "z_star": z_star, "median_z_star": alone, "c_star": fixed["clip"], "median": means["median"],
        "fixed": means["best fixed clip"], "largest_noise": max(protocol.noises),
        "median_clip_ends": [path[-1] for path in paths], "median_clip_highest": highest,
        "median_clip_ran_away": highest > _FAR * found["clip_max"],
        "comparison": judged, "verdict": judged.sentence + (_WITHOUT_NOISE if z_star == 0 else ""),
        "median_is_worst": all(
            score(medians[z]["value"], lower) < min(score(row["value"], lower) for row in at[z] if row["clip"])
            for z in protocol.noises
        ),
        "noise_helps": _helping_noise({z: row["value"] for z, row in best.items()}, lower),
    }  # fmt: skip
    said = _said_of_fig7(protocol, numbers, median, fixed) + _at_the_papers_noise(protocol, at, z_star)
    return Findings("fig7", protocol, tables, numbers, said)


EXPERIMENTS: Mapping[str, Callable[[Grid], Findings]]
EXPERIMENTS = {"learning-rates": learning_rates, "fig3": fig3, "fig4": fig4, "fig5": fig5, "fig6": fig6, "fig7": fig7}


STAGES = {  # of the experiments that ask for runs more than once, as progress names them
    "fig6": ("range of clips", "fixed clips"),
    "fig7": ("median and range of clips", "fixed clips", "seeds on test users"),
}


def run_experiment(what: str, grid: Grid) -> Findings:
    """The experiment of this name; one too short to show what the paper found says so at the end."""
    found = EXPERIMENTS[check_choice("what", what, EXPERIMENTS)](grid)
    return found if grid.protocol.shows_finding else replace(found, summary=[*found.summary, _RUNS_ONLY])


def _table(rows: list[dict[str, Any]]) -> Table:
    return Table((*OF_RUN, "value", "outcome", "chosen", "runs"), rows)


def _means(sides: Mapping[str, Sequence[Row]], means: Mapping[str, Interval]) -> Table:
    rows = []
    for side, tested in sides.items():
        found, runs = means[side], " ".join(row["runs"] for row in tested)
        numbers = {"mean": found.mean, "low": found.low, "high": found.high, "seeds": found.runs}
        rows.append({**tested[0], "side": side, **numbers, "runs": runs})
    return Table(("side", *OF_RUN, "mean", "low", "high", "seeds", "runs"), rows)


def _choice(
    protocol: Protocol, rows: Sequence[dict[str, Any]], best: Mapping[float, Row], z_star: float, c_star: float
) -> Table:
    """Every configuration at its best server rate, with marks: best at its noise, within 5% of no noise, z* and C*.

    `runs` are those of all server rates among which the best was chosen.
    """
    columns = (*OF_RUN, "value", "best_at_noise", "within_5_percent", "z_star", "c_star", "runs")
    table = []
    for row in chosen(rows):
        noise = row["noise_at_100"]
        value = best[noise]["value"]
        marks = {
            "best_at_noise": row is best[noise],
            "within_5_percent": within_tolerance(value, best[0.0]["value"], lower_is_better=protocol.lower_is_better),
            "z_star": noise == z_star,
            "c_star": noise == z_star and row["clip"] == c_star,
        }
        tried = [one["runs"] for one in rows if all(one[name] == row[name] for name in OF_RUN[:4])]
        table.append({**row, **marks, "runs": " ".join(tried)})
    return Table(columns, table)


def _best_by_noise(protocol: Protocol, rows: Sequence[dict[str, Any]], what: str) -> list[str]:
    """For each noise, which quantile or clip did best."""
    lines = []
    for noise in protocol.noises:
        at = [row for row in chosen(rows) if row["noise_at_100"] == noise]
        best = best_row(at, "value", lower_is_better=protocol.lower_is_better)
        lines.append(f"noise z = {noise:g}: {what} {best[what]:g} is best, {_said(protocol, best['value'])}")
    return lines


def _said_of_fig7(protocol: Protocol, numbers: Mapping[str, Any], median: Row, fixed: Row) -> list[str]:
    z_star, largest = numbers["z_star"], numbers["largest_noise"]
    low, high = numbers["clip_min"], numbers["clip_max"]
    beyond = ", the largest that was tried" if z_star == largest else ""
    alone = f"; the median by itself bears {numbers['median_z_star']:g}"
    beyond += alone if numbers["median_z_star"] != z_star else ""
    scaled = f" at 100 users a round ({median['noise_multiplier']:.3g} at the {protocol.cohort_size} of these runs)"
    scaled = "" if protocol.cohort_size == PAPER_COHORT else scaled
    return [
        f"z* = {z_star:g}{scaled}: the most noise within 5% of none{beyond}",
        f"C* = {fixed['clip']:g}: the best of five fixed clips at z*, from {low:.3g} to {high:.3g}",
        f"{protocol.metric} on the test users, mean of {numbers['median'].runs} seeds with its 95% interval:",
        f"  median clip               {numbers['median']}  (server rate {median['server_lr']:.3g})",
        f"  best fixed clip, {fixed['clip']:<8g} {numbers['fixed']}  (server rate {fixed['server_lr']:.3g})",
        _clip_in_words(numbers),
        numbers["verdict"],
        *([MEDIAN_IS_WORST] if numbers["median_is_worst"] else []),
        *([noise_that_helps(numbers["noise_helps"])] if numbers["noise_helps"] else []),
    ]


def _at_the_papers_noise(protocol: Protocol, at: Mapping[float, Sequence[Row]], z_star: float) -> list[str]:
    """Both sides on the validation users at the z* of the paper, where it was tried and is not ours."""
    papers = FACTS[protocol.task].noise_at_100 if protocol.task in FACTS else None
    if papers is None or papers == z_star or papers not in at:
        return []
    median = next(row["value"] for row in at[papers] if row["method"] == "adaptive")
    fixed = [row for row in at[papers] if row["method"] == "fixed"]
    best = best_row(fixed, "value", lower_is_better=protocol.lower_is_better)
    return [
        f"at the paper's z* of {papers:g}, on the validation users and one seed: "
        f"median clip {_said(protocol, median)}, best fixed clip {best['clip']:g} {_said(protocol, best['value'])}"
    ]


def _clip_in_words(numbers: Mapping[str, Any]) -> str:
    """Where the tracked clip went in the final runs; where noise and clip drove each other up, this shows it."""
    ends, highest = numbers["median_clip_ends"], numbers["median_clip_highest"]
    left = (
        f", far above the range without noise, whose end is {numbers['clip_max']:.3g}: noise is in proportion to the "
        "clip, so that a rise feeds itself, which a fixed clip cannot; a lower server rate may cure it"
    )
    left = left if numbers["median_clip_ran_away"] else ""
    return f"the median's clip ended between {min(ends):.3g} and {max(ends):.3g}; it was {highest:.3g} at most{left}"


def _said(protocol: Protocol, value: float) -> str:
    return f"{protocol.metric} {value:.4g}" if math.isfinite(value) else "every run diverged"


def _compared(protocol: Protocol, value: float, reference: float, what: str) -> str:
    """One value beside another, in words and in percent of the other."""
    if not math.isfinite(reference):
        return f"better than {what}, which diverged"
    ahead = (reference - value) if protocol.lower_is_better else (value - reference)
    share = f" ({abs(ahead / reference):.1%})" if reference else ""
    if not ahead:
        return f"no different from {what}"
    return f"{'better' if ahead > 0 else 'worse'} than {what} by {abs(ahead):.2g}{share}"


def _at_base_rates(protocol: Protocol, row: Row) -> bool:
    return all(math.isclose(row[name], getattr(protocol, name), rel_tol=1e-6) for name in ("client_lr", "server_lr"))


def _helping_noise(best: Mapping[float, float], lower_is_better: bool) -> tuple[float, float] | None:
    """The noise with which the best metric is furthest ahead of none, and by what share, if that is more than 5%."""
    ahead = {
        z: (best[0.0] - value if lower_is_better else value - best[0.0]) / abs(best[0.0] or 1.0)
        for z, value in best.items()
        if math.isfinite(value)
    }
    noise = max(ahead, key=ahead.__getitem__, default=0.0)
    return (noise, ahead[noise]) if ahead and ahead[noise] > DEGRADED else None


def noise_that_helps(found: tuple[float, float]) -> str:
    """What such noise means."""
    noise, share = found
    return (
        f"noise helps: the best metric at z = {noise:g} is {share:.0%} better than without noise, so that these runs "
        "have not converged, and z* does not say what noise costs"
    )
