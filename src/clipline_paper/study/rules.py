"""The paper's rules for choosing: clip range, best of server rates, z*, C*, and the bootstrap. Pure functions.

A table is a sequence of rows, and a row is a mapping from names of columns to values. Metrics may be better high
or low: `lower_is_better` says which. A value that is missing, NaN or infinite is that of a run that diverged: it never
wins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clipline.errors import RunError, SettingError

Row = Mapping[str, Any]
NEAR_TARGET = 0.05  # section 3.2: the ramp-up ends when the fraction within is so close to the quantile
DEGRADED = 0.05  # section 3.3: a metric that is worse by more than this, relative to no noise, is unacceptable
RESAMPLES = 10_000
CLIPS = 5


def score(value: float | None, lower_is_better: bool) -> float:
    """A number that is higher the better the metric; minus infinity for a run that diverged."""
    if value is None or not math.isfinite(value):
        return -math.inf
    return -value if lower_is_better else value


def best_row(rows: Iterable[Row], value: str, *, lower_is_better: bool) -> Row:
    """The row whose column `value` is best; of equals the first. Where all diverged, the first, as it is."""
    listed = list(rows)
    if not listed:
        raise SettingError("rows=[] must hold at least one row: there is nothing to choose from")
    return max(listed, key=lambda row: score(row[value], lower_is_better))  # max keeps the first of equals


def best_of_server_rates(rows: Iterable[Row], by: Sequence[str], value: str, *, lower_is_better: bool) -> list[Row]:
    """For each combination of the columns `by`, the row of the server rate with the best `value`, in order of coming.

    Equal rates of success keep the row that comes first.
    """
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return [best_row(group, value, lower_is_better=lower_is_better) for group in groups.values()]


def ramp_up_rounds(fractions: Sequence[float | None], quantile: float) -> int | None:
    """How many rounds come before the fraction within is first within 0.05 of `quantile`; None if it never is.

    A difference of exactly 0.05 counts as within, whatever binary fractions make of it.
    """
    for t, fraction in enumerate(fractions):
        if fraction is not None and abs(fraction - quantile) <= NEAR_TARGET + 1e-9:
            return t
    return None


@dataclass(frozen=True)
class ClipCurve:
    """The clip of each round of a run that followed `quantile` without noise, and the fraction within it."""

    quantile: float
    clips: Sequence[float]
    fractions: Sequence[float | None]

    def after_ramp_up(self) -> Sequence[float]:
        """The clips from the first round on in which the fraction within is near the quantile; refused if none is."""
        start = ramp_up_rounds(self.fractions, self.quantile)
        if start is None:
            last = (
                f"{self.clips[-1]:.3g} after {len(self.clips)} rounds" if self.clips else "unknown: there is no round"
            )
            nearer = "lower" if len(self.clips) > 1 and self.clips[-1] < self.clips[0] else "raise"
            raise RunError(
                f"the clip of quantile {self.quantile:g} is {last}, but in no round was the fraction within it closer "
                f"than {NEAR_TARGET:g} to {self.quantile:g}, so there is no clip range: raise --rounds, or "
                f"{nearer} --clip-start"
            )
        return self.clips[start:]


def clip_range(lowest: ClipCurve, highest: ClipCurve) -> tuple[float, float]:
    """C_min and C_max: the smallest clip of the lowest quantile and the largest of the highest, after the ramp-up.

    Clips that are not finite come from a run that diverged, and are left out.
    """
    if lowest.quantile >= highest.quantile:
        raise SettingError(
            f"lowest.quantile={lowest.quantile:g} must be below highest.quantile={highest.quantile:g}: "
            "give the curves of two quantiles, such as 0.1 and 0.9"
        )
    low = min((clip for clip in lowest.after_ramp_up() if math.isfinite(clip)), default=math.nan)
    high = max((clip for clip in highest.after_ramp_up() if math.isfinite(clip)), default=math.nan)
    if not low < high:
        raise RunError(
            f"C_min={low:.3g} must be below C_max={high:.3g}, to be a clip range: raise --rounds, and look whether "
            "the runs of these quantiles diverged"
        )
    return low, high


def log_spaced(low: float, high: float, count: int = CLIPS) -> list[float]:
    """`count` clips at equal ratios from `low` to `high`, both included, each to three significant digits.

    Rounded so that a study that was computed on two machines asks both for the same clips.
    """
    if not 0 < low < high < math.inf or count < 2:
        raise SettingError(
            f"low={low:g}, high={high:g}, count={count} must be 0 < low < high and two or more: give a range of clips"
        )
    return [significant(low * (high / low) ** (i / (count - 1)), 3) for i in range(count)]


def significant(value: float, digits: int) -> float:
    """`value` to so many significant digits."""
    return float(f"{value:.{digits}g}")


def within_tolerance(value: float | None, reference: float | None, *, lower_is_better: bool) -> bool:
    """Whether `value` is worse than `reference` by no more than 5% of it. What diverged never is."""
    allowed = -DEGRADED * abs(reference) if reference is not None else math.nan
    mine, other = score(value, lower_is_better), score(reference, lower_is_better)
    if not math.isfinite(mine) or not math.isfinite(other):
        return False
    return mine - other >= allowed * (1 + 1e-9)  # 0.95 of 1.0 is within, whatever binary fractions make of it


def tolerable_noise(values: Mapping[float, float | None], *, lower_is_better: bool) -> float:
    """z*: the largest noise multiplier up to which every metric is within 5% of that without noise.

    `values` maps noise multipliers to the metric that is reached with them, and must hold 0. Where noise that is larger
    still does well again, after one that does not, that is luck and does not count.
    """
    if 0 not in values:
        raise SettingError(f"values={dict(values)} must hold the metric without noise: give 0 among the noises")
    tolerable = 0.0
    for noise in sorted(values):
        if not within_tolerance(values[noise], values[0], lower_is_better=lower_is_better):
            break
        tolerable = noise
    return tolerable


@dataclass(frozen=True)
class Interval:
    """A mean over runs with its bootstrapped 95% interval."""

    mean: float
    low: float
    high: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap(values: Sequence[float], *, seed: int, resamples: int = RESAMPLES, confidence: float = 0.95) -> Interval:
    """The mean of `values` and its percentile interval over resamples with replacement.

    One value has an interval of no width: it says nothing of how seeds differ. If a run diverged (NaN or infinite), all
    three numbers are NaN: a mean without it would flatter.
    """
    if not values:
        raise SettingError("values=[] must hold at least one number: there is nothing to resample")
    numbers = np.asarray(values, dtype=np.float64)
    if not np.isfinite(numbers).all():
        return Interval(math.nan, math.nan, math.nan, len(numbers))
    chosen = np.random.default_rng(seed).integers(len(numbers), size=(resamples, len(numbers)))
    means = numbers[chosen].mean(axis=1)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(numbers.mean()), float(low), float(high), len(numbers))


def bootstrap_difference(
    values: Mapping[int, float], others: Mapping[int, float], *, seed: int, resamples: int = RESAMPLES
) -> Interval:
    """The mean of `values` less that of `others`, both by seed, with its 95% percentile interval.

    Where both have the same seeds, pairs of one seed are resampled: what a seed does to both sides cancels. Else each
    side is resampled by itself. NaN if a run diverged.
    """
    if not values or not others:
        raise SettingError("values and others must hold at least one number each: there is nothing to resample")
    if values.keys() == others.keys():
        return bootstrap([values[key] - others[key] for key in values], seed=seed, resamples=resamples)
    ours, theirs = (np.array(list(side.values()), dtype=np.float64) for side in (values, others))
    runs = min(len(ours), len(theirs))
    if not (np.isfinite(ours).all() and np.isfinite(theirs).all()):
        return Interval(math.nan, math.nan, math.nan, runs)
    rng = np.random.default_rng(seed)
    means = [side[rng.integers(len(side), size=(resamples, len(side)))].mean(axis=1) for side in (ours, theirs)]
    low, high = np.quantile(means[0] - means[1], [0.025, 0.975])
    return Interval(float(ours.mean() - theirs.mean()), float(low), float(high), runs)


@dataclass(frozen=True)
class ClipComparison:
    """How the median clip did beside the best fixed clip: `word` is equivalent, better, worse or undecided.

    `difference` is in percent of the fixed clip's metric, and negative where the median is worse, also of an error.
    """

    word: str
    sentence: str
    difference: Interval

    @property
    def direction(self) -> str:
        """Which way the interval lies: better, worse, or empty where it holds 0 or there is none."""
        return "better" if self.difference.low > 0 else "worse" if self.difference.high < 0 else ""

    @property
    def verdict(self) -> str:
        """The word, and of an equivalent median how much worse or better it is if the interval says so."""
        by = f" ({_percent(abs(self.difference.mean))} {self.direction})"
        return self.word + (by if self.word == "equivalent" and self.direction else "")


def compare_clips(
    adaptive: Mapping[int, float], fixed: Mapping[int, float], *, lower_is_better: bool, seed: int
) -> ClipComparison:
    """Compare the metrics of two sets of runs, by seed, against a margin of 5% of the fixed clip's mean.

    Equivalent where the whole interval of the difference is inside the margin; else better or worse where the interval
    does not hold 0; else undecided. One seed decides nothing. A side with a diverged run is the worse one, and it is
    undecided where both have one.
    """
    lost = [not all(map(math.isfinite, side.values())) for side in (adaptive, fixed)]
    found = bootstrap_difference(adaptive, fixed, seed=seed)
    if any(lost):
        word = "undecided" if all(lost) else "worse" if lost[0] else "better"
        whose = "runs of both" if all(lost) else "a run of it" if lost[0] else "a run of the best fixed clip"
        return ClipComparison(word, f"the median clip is {word}: {whose} diverged", found)
    means = [abs(float(np.mean(list(side.values())))) for side in (fixed, adaptive)]
    scale = (-100 if lower_is_better else 100) / (means[0] or means[1] or 1.0)  # by the median's where the other is 0
    low, high = sorted((scale * found.low, scale * found.high))
    found = Interval(scale * found.mean, low, high, found.runs)
    margin = 100 * DEGRADED
    if found.runs == 1:
        word, why = "undecided", "one seed says nothing of how seeds differ"
    elif max(-low, high) <= margin * (1 + 1e-9):  # 1.05 of 1.0 is inside, whatever binary fractions make of it
        word, why = "equivalent", f"all of it inside the margin of {margin:g}%"
    elif low > 0 or high < 0:
        word, why = ("worse" if high < 0 else "better"), f"not inside the margin of {margin:g}%, and without 0"
    else:
        word, why = "undecided", f"which holds 0 and reaches beyond the margin of {margin:g}%"
    judged = ClipComparison(word, "", found)
    than = {"equivalent": "equivalent to", "undecided": "undecided beside"}.get(word, f"{word} than")
    aside = judged.verdict.removeprefix(word)
    seeds = f"{found.runs} seed{'s' * (found.runs != 1)}, {'paired' if adaptive.keys() == fixed.keys() else 'unpaired'}"
    return replace(
        judged,
        sentence=f"the median clip is {than} the best fixed clip{aside}: difference {percents(found)} ({seeds}), {why}",
    )


def percents(difference: Interval) -> str:
    """A difference in percent with its interval, signs included."""
    mean, low, high = (_percent(value, "+") for value in (difference.mean, difference.low, difference.high))
    return f"{mean}, 95% interval [{low}, {high}]"


def _percent(value: float, sign: str = "") -> str:
    digits = 0 if abs(value) >= 10 else 1 if abs(value) >= 0.95 else 2
    return f"{value:{sign}.{digits}f}%"
