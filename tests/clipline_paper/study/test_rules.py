import csv
import itertools
import math
import statistics
from pathlib import Path

import numpy as np
import pytest

from clipline.errors import RunError, SettingError
from clipline_paper.study.rules import (
    ClipCurve,
    Interval,
    best_of_server_rates,
    best_row,
    bootstrap,
    bootstrap_difference,
    clip_range,
    compare_clips,
    log_spaced,
    ramp_up_rounds,
    tolerable_noise,
)

NAN = math.nan


TABLE = [
    {"quantile": 0.1, "z": 0.0, "server_lr": 1.0, "metric": 0.5},
    {"quantile": 0.1, "z": 0.0, "server_lr": 1.8, "metric": 0.7},
    {"quantile": 0.1, "z": 0.0, "server_lr": 3.2, "metric": NAN},
    {"quantile": 0.5, "z": 0.0, "server_lr": 1.0, "metric": 0.6},
    {"quantile": 0.5, "z": 0.0, "server_lr": 1.8, "metric": 0.6},
    {"quantile": 0.5, "z": 0.1, "server_lr": 1.0, "metric": math.inf},
    {"quantile": 0.5, "z": 0.1, "server_lr": 1.8, "metric": None},
]


@pytest.mark.parametrize(("lower", "rates"), [(False, [1.8, 1.0, 1.0]), (True, [1.0, 1.0, 1.0])])
def test_each_configuration_keeps_its_best_server_rate_and_the_first_of_equals(lower, rates):
    best = best_of_server_rates(TABLE, ("quantile", "z"), "metric", lower_is_better=lower)
    assert [row["server_lr"] for row in best] == rates
    assert [(row["quantile"], row["z"]) for row in best] == [(0.1, 0.0), (0.5, 0.0), (0.5, 0.1)]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, None])
@pytest.mark.parametrize("lower", [False, True])
def test_a_diverged_run_never_wins(bad, lower):
    rows = [{"metric": bad, "name": "diverged"}, {"metric": -1e9 if not lower else 1e9, "name": "poor"}]
    for order in itertools.permutations(rows):
        assert best_row(order, "metric", lower_is_better=lower)["name"] == "poor"


def test_the_ramp_up_ends_in_the_first_round_near_the_target():
    assert ramp_up_rounds([0.0, 0.0, 0.84, 0.85, 1.0], 0.9) == 3  # 0.84 is 0.06 away, 0.85 exactly 0.05
    assert ramp_up_rounds([0.05], 0.1) == 0
    assert ramp_up_rounds([0.0, 0.2, 0.3], 0.1) is None
    assert ramp_up_rounds([None, 0.5], 0.5) == 1


def test_the_clip_range_by_hand():
    # The 0.1 curve starts at 0.1 (ramp-up, ignored), is near its target from round 2 on, and dips to 0.22 later. Near
    # its target once is enough: round 3 is off again and counts.
    low = ClipCurve(0.1, [0.1, 0.15, 0.3, 0.22, 0.28], [0.0, 0.0, 0.12, 0.3, 0.1])
    # The 0.9 curve overshoots to 9.9 before it is near its target, and its largest after that is 0.95.
    high = ClipCurve(0.9, [0.1, 9.9, 0.9, 0.95, 0.7], [0.0, 1.0, 0.87, 0.95, 0.9])
    assert clip_range(low, high) == (0.22, 0.95)


def test_a_clip_that_never_arrives_gives_no_range():
    low = ClipCurve(0.1, [0.1, 0.12], [0.0, 0.0])
    high = ClipCurve(0.9, [0.1, 0.2], [0.9, 0.9])
    with pytest.raises(RunError, match=r"quantile 0.1 is 0.12 after 2 rounds.*raise --rounds, or raise --clip-start"):
        clip_range(low, high)
    with pytest.raises(RunError, match=r"quantile 0.1 is 0.4 after 2 rounds.*or lower --clip-start"):
        clip_range(ClipCurve(0.1, [0.5, 0.4], [1.0, 1.0]), high)  # it came down, and is still too high
    with pytest.raises(RunError, match=r"C_min=0.5 must be below C_max=0.2"):
        clip_range(ClipCurve(0.1, [0.5], [0.1]), high)
    with pytest.raises(SettingError, match=r"lowest.quantile=0.9 must be below highest.quantile=0.1"):
        clip_range(high, low)
    with pytest.raises(RunError, match="C_min=nan"):
        clip_range(ClipCurve(0.1, [NAN], [0.1]), high)


def test_five_clips_as_on_the_papers_so_lr():
    # Section 3.3 names 16.0 and the next larger, 27.3, of the range 16 to 135 in Table 1.
    assert log_spaced(16.0, 135.0) == [16.0, 27.3, 46.5, 79.2, 135.0]
    assert log_spaced(0.01, 100.0) == [0.01, 0.1, 1.0, 10.0, 100.0]
    with pytest.raises(SettingError, match="0 < low < high"):
        log_spaced(1.0, 1.0)


def test_z_star_by_hand():
    # 5% of 0.80 is 0.04: 0.76 is still within, 0.759 is not.
    assert tolerable_noise({0.0: 0.80, 0.01: 0.81, 0.03: 0.76, 0.1: 0.759}, lower_is_better=False) == 0.03
    assert tolerable_noise({0.0: 0.80, 0.01: 0.79, 0.03: 0.78, 0.1: 0.77}, lower_is_better=False) == 0.1
    assert tolerable_noise({0.1: 0.1, 0.0: 0.80, 0.01: 0.7}, lower_is_better=False) == 0.0
    # An error: 5% of 0.020 is 0.001.
    assert tolerable_noise({0.0: 0.020, 0.01: 0.019, 0.03: 0.021, 0.1: 0.0211}, lower_is_better=True) == 0.03
    # A larger noise that does well again, after one that does not, is luck.
    assert tolerable_noise({0.0: 0.8, 0.01: 0.5, 0.03: 0.8}, lower_is_better=False) == 0.0
    assert tolerable_noise({0.0: 0.8, 0.01: NAN, 0.03: 0.8}, lower_is_better=False) == 0.0
    assert tolerable_noise({0.0: NAN, 0.01: 0.5}, lower_is_better=False) == 0.0
    with pytest.raises(SettingError, match="must hold the metric without noise"):
        tolerable_noise({0.01: 0.5}, lower_is_better=False)


def test_the_bootstrap_of_two_runs_is_known_exactly():
    # Resamples of {0, 1} have the means 0, 1/2, 1 with chances 1/4, 1/2, 1/4: both 2.5% ends are 0 and 1.
    assert bootstrap([0.0, 1.0], seed=0) == Interval(0.5, 0.0, 1.0, 2)
    assert bootstrap([0.7], seed=0) == Interval(0.7, 0.7, 0.7, 1)


def test_the_bootstrap_against_all_resamples_of_five_runs():
    values = [0.1, 0.2, 0.4, 0.7, 1.1]
    means = [statistics.fmean(chosen) for chosen in itertools.product(values, repeat=5)]  # all 3125, equally likely
    low, high = np.quantile(means, [0.025, 0.975])
    found = bootstrap(values, seed=1)
    # The means are multiples of 0.02: 10,000 resamples place an end within one of them.
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.021)
    assert found.mean == pytest.approx(0.5)
    assert bootstrap(values, seed=1) == found


def by_seed(values, first=1):
    return dict(enumerate(values, first))


def test_the_difference_of_two_unpaired_means_by_hand():
    # {0, 1} against {5}: the means of the resamples are 0, 1/2, 1 less 5.
    assert bootstrap_difference({1: 0.0, 2: 1.0}, {1: 5.0}, seed=0) == Interval(-4.5, -5.0, -4.0, 1)
    # Independent sides: variances of the two means add up. Normal within a few percent at 20 runs a side.
    values = np.random.default_rng(1).normal(0.8, 0.01, size=(2, 20))
    found = bootstrap_difference(by_seed(values[0]), by_seed(values[1], 21), seed=0)
    stddev = math.sqrt(values[0].var() / 20 + values[1].var() / 20)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * stddev, rel=0.05)


# Seeds differ by up to 0.4, and on every seed the median is 0.01 behind: 2% of the fixed clip's mean of 0.5.
SPREAD = (0.3, 0.4, 0.5, 0.6, 0.7)
BEHIND = tuple(value - 0.01 for value in SPREAD)


def test_pairs_cancel_what_a_seed_does_to_both_sides():
    paired = compare_clips(by_seed(BEHIND), by_seed(SPREAD), lower_is_better=False, seed=0)
    assert (paired.difference.low, paired.difference.high) == pytest.approx((-2.0, -2.0))
    assert paired.verdict == "equivalent (2.0% worse)"
    assert "(5 seeds, paired)" in paired.sentence
    # Pairs go by the seed, not by the order of coming.
    shuffled = dict(reversed(by_seed(SPREAD).items()))
    assert compare_clips(by_seed(BEHIND), shuffled, lower_is_better=False, seed=0).sentence == paired.sentence
    # Other seeds: the mean of five has a standard deviation of 0.0632 on each side, so that the difference has 0.0894,
    # and 1.96 of these are 35% of 0.5.
    alone = compare_clips(by_seed(BEHIND), by_seed(SPREAD, 6), lower_is_better=False, seed=0)
    assert alone.difference.mean == pytest.approx(-2.0)
    assert (alone.difference.high - alone.difference.low) / 2 == pytest.approx(35, rel=0.1)
    assert alone.verdict == "undecided"
    assert "(5 seeds, unpaired)" in alone.sentence


def test_a_table_of_two_pairs_by_hand():
    # Differences -0.02 and -0.06 of 1: resampled means are -2%, -4% and -6% with chances 1/4, 1/2, 1/4.
    found = compare_clips({1: 0.88, 2: 1.04}, {1: 0.9, 2: 1.1}, lower_is_better=False, seed=0)
    assert (found.difference.low, found.difference.mean, found.difference.high) == pytest.approx((-6, -4, -2))
    assert found.verdict == "worse"  # without 0, and -6% is beyond the margin
    assert found.sentence == (
        "the median clip is worse than the best fixed clip: difference -4.0%, 95% interval [-6.0%, -2.0%] (2 seeds, "
        "paired), not inside the margin of 5%, and without 0"
    )


@pytest.mark.parametrize(
    ("adaptive", "fixed", "lower", "verdict", "percent"),
    [
        ((1.0, 1.02), (1.01, 1.01), False, "equivalent", 0),  # -1% and +1%
        ((1.05, 1.05), (1.0, 1.0), False, "equivalent (5.0% better)", 5),  # the margin itself is inside
        ((1.05, 1.05), (1.0, 1.0), True, "equivalent (5.0% worse)", -5),
        ((1.06, 1.06), (1.0, 1.0), False, "better", 6),
        ((1.06, 1.06), (1.0, 1.0), True, "worse", -6),
        ((0.04, 0.04), (0.01, 0.01), True, "worse", -300),
        ((0.9, 1.1), (1.0, 1.0), False, "undecided", 0),  # -10% to +10%
        ((0.8,), (0.8,), False, "undecided", 0),  # one seed has an interval of no width
        ((0.0, 0.0), (0.0, 0.0), False, "equivalent", 0),
        ((0.5, 0.5), (0.0, 0.0), False, "better", 100),
    ],
)
def test_the_verdict_by_hand(adaptive, fixed, lower, verdict, percent):
    found = compare_clips(by_seed(adaptive), by_seed(fixed), lower_is_better=lower, seed=0)
    assert found.verdict == verdict
    assert found.difference.mean == pytest.approx(percent, abs=1e-9)


@pytest.mark.parametrize(
    ("adaptive", "fixed", "word", "said"),
    [
        ((0.8, NAN), (0.80, 0.79), "worse", "worse: a run of it diverged"),
        ((0.8, 0.8), (0.8, NAN), "better", "better: a run of the best fixed clip diverged"),
        ((NAN,), (NAN,), "undecided", "undecided: runs of both diverged"),
    ],
)
def test_the_side_that_diverged_is_the_worse_one(adaptive, fixed, word, said):
    found = compare_clips(by_seed(adaptive), by_seed(fixed), lower_is_better=True, seed=0)
    assert (found.verdict, found.sentence) == (word, f"the median clip is {said}")


# Intervals of the mean difference of pairs, in percent, resampled by an independent program from the same tables.
@pytest.mark.parametrize(
    ("table", "verdict", "low", "high"),
    [
        ("paper/fig7-cifar100", "equivalent", -1.25, 0.80),
        ("paper/fig7-emnist_cr", "equivalent", -0.09, 0.22),
        ("paper/fig7-emnist_ae", "worse", -551.8, -550.1),
        ("paper/fig7-shakespeare", "equivalent (0.95% worse)", -1.18, -0.72),
        ("paper/fig7-so_nwp", "undecided", -11.8, 12.3),
        ("paper/fig7-so_lr", "worse", -8.96, -0.27),
        ("paper_scale/fig7-so_lr", "equivalent", -0.71, 0.21),
    ],
)
def test_the_verdicts_of_the_studies_in_this_repository(table, verdict, low, high):
    sides = {"median": {}, "best fixed clip": {}}
    with (Path(__file__).parents[3] / "studies" / f"{table}-seeds.csv").open() as file:
        for row in csv.DictReader(file):
            sides[row["side"]][int(row["seed"])] = float(row["value"])
    found = compare_clips(*sides.values(), lower_is_better="emnist_ae" in table, seed=0)
    assert found.verdict == verdict
    assert (found.difference.low, found.difference.high) == pytest.approx((low, high), abs=0.06)
    page = (Path(__file__).parents[3] / "docs" / "results" / "paper.md").read_text()
    assert found.sentence in " ".join(page.split())
