"""Whether a training failed, from what it released and from held-out metrics alone: sentences, or none if it is well.

The rules stand in docs/howto/learning.md, and docs/results/failing.md shows each at work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from ..metric_direction import lower_is_better
from ..privacy.feasibility import Verdict, verdict, verdict_text

RELEASED = ("round", "clip", "fraction_within", "epsilon", "delta", "unprivate_seconds")  # no metric has such a name
LAST = "last/"  # begins the names of the last model's metrics, where others are of the average of models
WITHOUT_MODEL = ("baseline", "share_")  # begin the names of what would do without a model
Round = Mapping[str, Any]  # a line of metrics.jsonl; a metric that is null was measured and is not finite

SIGMAS = 4.0  # of the noise of a mean of fractions: beyond, a distance is not chance (1 in 30,000 runs)
FAR = 0.2  # from the target: the norms then move by 4% a round at the paper's clip_lr, and the clip cannot follow
EMPTY = 0.05  # of the updates: as good as none
FIRST_NORM = 1.0  # a clip above this that still has no update within is rarely just on its way up
GROWN = 10.0  # times: what "far" means for a clip
VANISHED = 100.0  # the same where no metric says whether the model is well
COLLAPSED = 0.2  # of its best that a metric lost, and a third of what it had gained
NEAR = 0.05  # of the metric: the paper's own tolerance
RISING = 0.25  # of what it gained in all that a metric gained in the last third; a straight line gains a third
WELL = 0.5  # of what is left to gain beyond the baseline, or else the first value: then the clip did its work
_LEAST_WINDOW = 5  # rounds, or measurements


@dataclass(frozen=True)
class Finding:
    """One thing that went wrong: `kind` for programs, `text` says what was seen and what to do."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Known:
    """What is public about a run beside its rounds. What is None is not known, and no rule needs it then."""

    target: float | None = None  # the fraction that an adaptive clip aims to have within
    cohort_size: int | None = None
    count_stddev: float | None = None  # noise on the count of users within, in users
    noise_norm: float | None = None  # of the mean update, in clips
    metric: str | None = None  # the main one; left out, the first that is neither the loss nor a baseline
    facts: Mapping[str, str] | None = None  # as of a run directory: which way metrics are better, and `baseline`
    ended: bool = True  # or still running, or interrupted: then what may yet come right is not judged
    done: int = 0  # rounds of the model, of which some may be unknown: those before a resume
    kept: int | None = None  # rounds after which the model was kept, where that is not the last one


@dataclass(frozen=True)
class BestAndLast:
    """The best and the last value of the main metric, and after how many rounds each was measured."""

    metric: str
    best: float
    best_rounds: int
    last: float
    last_rounds: int


def main_metric(rounds: Sequence[Round], known: Known) -> str | None:
    """The name of the metric that is judged; None if nothing was measured."""
    names = dict.fromkeys(name for one in rounds for name in one if name not in RELEASED)
    own = [name for name in names if not name.startswith((*WITHOUT_MODEL, LAST, "unprivate_"))]
    asked = known.metric or (known.facts or {}).get("metric")
    return asked if asked in names else next((name for name in own if name != "loss"), next(iter(own), None))


def best_and_last(rounds: Sequence[Round], known: Known) -> BestAndLast | None:
    """The main metric's best and last finite values; None if there are none."""
    name = main_metric(rounds, known)
    points = _points(rounds, name)
    if name is None or not points:
        return None
    choose = min if lower_is_better(name, known.facts) else max
    best = choose(points, key=lambda point: point[1])
    return BestAndLast(name, best[1], best[0], points[-1][1], points[-1][0])


def diagnose(rounds: Sequence[Round], known: Known) -> tuple[Finding, ...]:
    """What went wrong in these rounds, the worst first; empty for a run that looks well."""
    if not rounds and not known.done:
        said = (
            "No round was run, so the model is as it was at the start: raise the budget, or lower what it was spent on."
        )
        return (Finding("no_rounds", said),) if known.ended else ()
    judged = [one for one in rounds if known.kept is None or one["round"] < known.kept]  # those of the model
    metric = _metric_findings(judged, known)
    found = [*metric, *_clip_findings(rounds, judged, known, metric)]
    if known.noise_norm is not None and verdict(known.noise_norm) is Verdict.HOPELESS:
        found.append(Finding("hopeless_noise", hopeless_text(known.noise_norm)))
    return tuple(found) if found or len(judged) < len(rounds) else tuple(_rising(rounds, known))


def hopeless_text(ratio: float) -> str:
    """What to say of noise under which no model can be trained that one would use."""
    return (
        f"The training is {verdict_text(ratio)}. Take more users a round, fewer parameters or a larger epsilon; "
        "clipline plan says how much of each is enough."
    )


def _metric_findings(rounds: Sequence[Round], known: Known) -> list[Finding]:
    name = main_metric(rounds, known)
    if name is None:
        return []
    measured = [one[name] for one in rounds if name in one]
    if measured and measured[-1] is None:
        said = (
            f"{name} is not finite {_when(known)}: the model diverged. Lower the server's or the users' learning rate."
        )
        return [Finding("not_finite", said)]
    ends = best_and_last(rounds, known)
    assert ends is not None
    found, values = [], [value for _, value in _points(rounds, name)]
    sign = -1 if lower_is_better(name, known.facts) else 1
    enough = len(values) >= _LEAST_WINDOW
    lost, gained = sign * (ends.best - ends.last), sign * (ends.best - values[0])
    if enough and lost > max(COLLAPSED * abs(ends.best), gained / 3, SIGMAS * _scatter(values)):
        found.append(
            Finding(
                "collapsed",
                f"{name} collapsed: {ends.last:.4g} {_when(known)}, and it was {ends.best:.4g} after "
                f"{ends.best_rounds} rounds. Lower the server's learning rate, or keep the best model: keep_best of "
                "Evaluate, restore_best of EarlyStopping, --early-stopping of clipline train.",
            )
        )
    baseline = _baseline(rounds, name, known)
    if known.ended and baseline is not None and not _beats(ends.last, baseline, sign):
        found.append(
            Finding(
                "baseline",
                f"{name} is {ends.last:.4g}, {'hardly' if sign * (ends.last - baseline) > 0 else 'no'} better than "
                f"{baseline:.4g} without a model. Check inputs and labels, "
                "try other learning rates, or bring more users or rounds.",
            )
        )
    return found


def _clip_findings(
    rounds: Sequence[Round], judged: Sequence[Round], known: Known, metric: Sequence[Finding]
) -> list[Finding]:
    """What the clip and the fraction within tell; a clip that does not adapt releases no fraction."""
    well = not metric and _near_best(judged, known)
    target = known.target
    pairs = [(clip, one["fraction_within"]) for one in rounds if (clip := one.get("clip")) is not None]
    complete = 0 < len(pairs) == len(rounds) and all(fraction is not None for _, fraction in pairs)
    if target is None or not known.cohort_size or not complete:
        return []
    clips, fractions = [float(clip) for clip, _ in pairs], [float(fraction) for _, fraction in pairs]
    noise = math.hypot((known.count_stddev or 0.0) / known.cohort_size, 0.5 / math.sqrt(known.cohort_size))

    def chance(window: int) -> float:
        """How far a mean of `window` fractions may be off by noise and sampling."""
        return SIGMAS * noise / math.sqrt(window)

    last = min(len(rounds), max(_LEAST_WINDOW, len(rounds) // 5))
    half = max(last, len(rounds) // 2)
    within, later = fmean(fractions[-last:]), fmean(fractions[-half:])
    span = f"from {clips[0]:.2g} to {clips[-1]:.2g}"
    grew = clips[-1] >= GROWN * clips[0] and clips[-1] >= FIRST_NORM
    none = all(
        mean < EMPTY + chance(window) and mean + chance(window) < target / 2
        for mean, window in ((later, half), (within, last))
    )
    learned = not metric and _learned(judged, known)  # then updates are finite, and the clip is merely on its way
    if grew and none and max(clips) == clips[-1] and not learned:
        said = f"Nearly every update was cut, though the clip grew {span}. With a table the usual cause is inputs "
        said += "far from -1 to 1: give scale=, or new-task --public. Updates that are not finite count as cut too: "
        said += "check the loss and the labels, or the users' learning rate is far too high."
        return [Finding("nothing_within", said)]
    lower = within < target
    room = (target if lower else 1 - target) / 2
    far_off = abs(within - target) > min(FAR, room) + chance(last)
    arrived = _arrived(fractions, target, chance)
    if arrived is not None and not well:
        after = clips[arrived:]
        far = GROWN if main_metric(rounds, known) is not None else VANISHED
        if clips[-1] >= far * after[0]:
            span = f"from {after[0]:.2g}, where it had arrived, to {clips[-1]:.2g}"
            way_out = "Lower the server's learning rate, or the quantile."
            return [Finding("clip_ran_away", f"The clip ran away: {span}, and the noise with it. {way_out}")]
        if clips[-1] * far <= max(after):
            span = f"from {max(after):.2g} to {clips[-1]:.2g}"
            way_out = "Either nothing is left to learn, or the model is stuck: then lower the server's learning rate."
            return [Finding("clip_fell", f"The clip fell {span}: users' updates have all but vanished. {way_out}")]
    if not known.ended or not far_off:
        return []
    share = f"{min(max(within, 0), 1):.0%} of the updates are within, and {target:.0%} should be"
    if arrived is None:
        said = f"The clip has not arrived: it went {span}, and at the end {share}. Start it "
        said += f"{'higher' if lower else 'lower'}, or train more rounds."
    else:
        said = f"The clip does not keep up with updates that {'grow' if lower else 'shrink'}: at the end {share}. "
        said += "Lower the learning rates, or raise the clip's own."
    return [Finding("clip_not_arrived", said)]


def _rising(rounds: Sequence[Round], known: Known) -> list[Finding]:
    """A metric that was still getting better when the rounds were over."""
    name = main_metric(rounds, known)
    points = _points(rounds, name)
    if not known.ended or name is None or len(points) < 4:
        return []
    sign = -1 if lower_is_better(name, known.facts) else 1
    values = [value for _, value in points]
    before = min(points[:-1], key=lambda point: abs(point[0] - points[-1][0] * 2 / 3))[1]
    late, baseline = sign * (values[-1] - before), _baseline(rounds, name, known)
    gained = sign * (values[-1] - values[0])
    if gained <= 0:
        return []
    if baseline is not None:  # before the first measurement it may have gained most of it
        gained = max(gained, sign * (values[-1] - baseline))
    if late < max(RISING * gained, NEAR * abs(values[-1]), SIGMAS * _scatter(values)) or late <= 0:
        return []
    said = f"{name} still got better at the end: from {before:.4g} to {values[-1]:.4g} in the last third."
    return [Finding("still_rising", f"{said} Train more rounds.")]


def _points(rounds: Sequence[Round], name: str | None) -> list[tuple[int, float]]:
    """Rounds done and the value, where it was measured and is finite."""
    return [(one["round"] + 1, one[name]) for one in rounds if name is not None and one.get(name) is not None]


def _near_best(rounds: Sequence[Round], known: Known) -> bool:
    ends = best_and_last(rounds, known)
    return ends is not None and abs(ends.best - ends.last) <= NEAR * max(abs(ends.best), abs(ends.last))


def _scatter(values: Sequence[float]) -> float:
    """The standard deviation of a metric about its trend, from second differences; 0 where too few were measured.

    Never more than the largest step back: a curve that bends but does not turn is a trend, and no noise.
    """
    if len(values) < _LEAST_WINDOW:
        return 0.0
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    up = values[-1] >= values[0]
    back = max((a - b if up else b - a) for a, b in pairwise(values))
    return min(median(bends) / (0.6745 * math.sqrt(6)), max(back, 0.0))


def _baseline(rounds: Sequence[Round], name: str, known: Known) -> float | None:
    """What would do without a model, as the task names it: its facts, a `baseline...` metric, or shares of classes."""
    said = (known.facts or {}).get("baseline")
    try:
        if said is not None and math.isfinite(number := float(said)):
            return number
    except ValueError:  # a fact may be any text
        pass
    last = next((one for one in reversed(rounds) if name in one), {})
    for other, value in last.items():
        if other.startswith("baseline") and value is not None:
            return float(value)
    shares = [value for other, value in last.items() if other.startswith("share_") and value is not None]
    return max(shares, default=None) if "accuracy" in name else None


def _beats(value: float, baseline: float, sign: int, share: float = NEAR) -> bool:
    """Whether a metric is better than without a model, by this share of what is left to gain where that is known."""
    if sign > 0 and 0 <= baseline <= 1 and value <= 1:
        return 1 - value < (1 - share) * (1 - baseline)
    return sign * (value - baseline) > share * abs(baseline)


def _learned(rounds: Sequence[Round], known: Known) -> bool:
    """Whether the metric is near its best and well above its baseline, or above its start where there is none."""
    name = main_metric(rounds, known)
    points = _points(rounds, name)
    if name is None or not points or not _near_best(rounds, known):
        return False
    baseline, sign = _baseline(rounds, name, known), -1 if lower_is_better(name, known.facts) else 1
    return _beats(points[-1][1], points[0][1] if baseline is None else baseline, sign, WELL)


def _when(known: Known) -> str:
    """The moment that the model is of."""
    return "at the end" if known.kept is None else f"after {known.kept} rounds, in the model that was kept"


def _arrived(fractions: Sequence[float], target: float, chance: Callable[[int], float]) -> int | None:
    """The first round at which the clip had come half of the way to its target, beyond the noise; None if it never did.

    Means are taken over as many rounds as it takes to tell half of the way from none of it.
    """
    below = fmean(fractions[:_LEAST_WINDOW]) < target
    edge = (target if below else 1 - target) / 2
    for window in range(_LEAST_WINDOW, len(fractions) + 1):
        if chance(window) <= edge:
            means = [fmean(fractions[end - window : end]) for end in range(window, len(fractions) + 1)]
            reached = (mean >= target / 2 if below else mean <= (1 + target) / 2 for mean in means)
            return next((window - 1 + place for place, there in enumerate(reached) if there), None)
    return None
