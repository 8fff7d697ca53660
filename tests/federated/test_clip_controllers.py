import math

import pytest
from samples import small_training

from clipline import FixedClip, QuantileClip, ScheduledClip, SettingError
from clipline.federated.clip_controllers import ClipState
from clipline.federated.mechanism import Release
from clipline.privacy.events import GaussianEvent, PoissonSampling

EVENT = GaussianEvent(PoissonSampling(0.1), 1.0)


def released(fraction_within):
    return Release(None, lambda: fraction_within, lambda: True, EVENT)


def clips(controller, fractions):
    state, seen = controller.init(), []
    for fraction in fractions:
        seen.append(state.clip)
        state = controller.update(state, released(fraction))
    return [*seen, state.clip]


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


# Every controller -----------------------------------------------------------------------------------------------------

CONTROLLERS = [
    FixedClip(0.7),
    ScheduledClip({0: 2.0, 3: 1.0, 10: 0.25}),
    QuantileClip(),
    QuantileClip(rule="linear", lr=5.0),
    QuantileClip(quantile=0.9, start=1e-20, clamp_fraction=True),
]


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_clip_is_always_positive_and_finite_whatever_is_released(controller):
    for fraction in (0.0, 1.0, -3.0, 4.0, 1e6, -1e6):
        trace = clips(controller, [fraction] * 3000)
        assert all(0 < clip < math.inf for clip in trace)


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_a_controller_counts_rounds_and_changes_nothing_it_was_given(controller):
    state = controller.init()
    after = controller.update(state, released(0.5))
    assert (state.round_index, after.round_index) == (0, 1)
    assert state == controller.init()


# Quantile -------------------------------------------------------------------------------------------------------------


def test_ten_times_in_23_rounds_when_every_update_is_clipped():
    trace = clips(QuantileClip(quantile=0.5, lr=0.2, start=0.1), [0.0] * 23)
    assert trace[-1] / trace[0] == pytest.approx(10, rel=0.01)  # exp(0.2 * 0.5 * 23) = 9.97


@pytest.mark.parametrize("rule", ["geometric", "linear"])
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_clip_grows_when_no_update_is_within_and_shrinks_when_all_are(rule, quantile):
    controller = QuantileClip(quantile=quantile, start=1.0, rule=rule)
    assert controller.update(ClipState(1.0), released(0.0)).clip > 1.0
    assert controller.update(ClipState(1.0), released(1.0)).clip < 1.0
    assert controller.update(ClipState(1.0), released(quantile)).clip == pytest.approx(1.0, abs=1e-15)


def test_one_geometric_and_one_linear_step_by_hand():
    # 2 exp(-0.2 (0.8 - 0.5)) and 2 - 0.2 (0.8 - 0.5)
    assert QuantileClip().update(ClipState(2.0), released(0.8)).clip == pytest.approx(2 * math.exp(-0.06), rel=1e-15)
    linear = QuantileClip(rule="linear")
    assert linear.update(ClipState(2.0), released(0.8)).clip == pytest.approx(1.94, rel=1e-15)


def test_a_linear_step_takes_away_half_at_most():
    assert QuantileClip(rule="linear", lr=10.0).update(ClipState(2.0), released(1.0)).clip == 1.0


def test_norms_of_a_millionth_are_tracked_as_well_as_norms_of_1():
    from clipline_paper.study.without_training import track_quantile

    end = track_quantile(log_mean=math.log(1e-6), log_stddev=0.1, quantile=0.5, seed=0, rounds=300)[-1]
    assert end == pytest.approx(1e-6, rel=0.1)


def test_the_noisy_fraction_is_clamped_only_on_request():
    wild = released(1.7)
    assert QuantileClip().update(ClipState(1.0), wild).clip == pytest.approx(math.exp(-0.2 * 1.2))
    assert QuantileClip(clamp_fraction=True).update(ClipState(1.0), wild).clip == pytest.approx(math.exp(-0.2 * 0.5))


def predicted_rounds(quantile, start, log_stddev, lr=0.2):
    """How many rounds the rule needs by arithmetic alone: the exact share of a log-normal(0, s) below the clip."""
    z = {0.1: -1.28155, 0.3: -0.52440, 0.5: 0.0, 0.7: 0.52440, 0.9: 1.28155}[quantile]
    log_clip, log_truth, rounds = math.log(start), z * log_stddev, 0
    while abs(log_clip - log_truth) > 0.02:
        log_clip -= lr * (normal_cdf(log_clip / log_stddev) - quantile)
        rounds += 1
    return rounds, math.exp(log_truth)


@pytest.mark.parametrize("quantile", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_the_clip_reaches_the_true_quantile_from_a_thousandfold_off_when_arithmetic_says(quantile, factor):
    from clipline_paper.study.without_training import track_quantile

    log_stddev = 0.1
    start = factor * math.exp(log_stddev * {0.1: -1.28, 0.3: -0.52, 0.5: 0, 0.7: 0.52, 0.9: 1.28}[quantile])
    rounds, truth = predicted_rounds(quantile, start, log_stddev)
    # far off, every round moves log clip by lr * quantile upwards or lr * (1 - quantile) downwards: ln 1000 = 6.9
    straight = 6.9 / (0.2 * (quantile if factor < 1 else 1 - quantile))
    assert straight - 5 < rounds < straight + 25
    trace = track_quantile(
        log_mean=0.0,
        log_stddev=log_stddev,
        quantile=quantile,
        seed=1,
        rounds=rounds + 40,
        cohort_size=1000,
        start=start,
    )
    # Sampling and count noise move the clip by about 1.5 percent (one standard deviation): ten percent never by chance.
    assert all(abs(clip / truth - 1) < 0.1 for clip in trace[rounds:])
    halfway = trace[rounds // 2]
    assert abs(halfway / truth - 1) > 0.5  # and not before: the start really was far off


# Fixed and scheduled --------------------------------------------------------------------------------------------------


def test_the_limits_themselves_are_clips_and_no_clip_is_infinity():
    assert [clips(FixedClip(clip), [0.0, 1.0]) for clip in (1e-30, 1e30, math.inf)] == [
        [1e-30] * 3, [1e30] * 3, [math.inf] * 3,
    ]  # fmt: skip
    assert clips(ScheduledClip({0: 1e-30, 1: 1e30}), [None]) == [1e-30, 1e30]


def test_a_schedule_holds_each_clip_from_its_round_on():
    assert clips(ScheduledClip([(0, 2.0), (2, 1.0), (3, 0.5)]), [None] * 4) == [2.0, 2.0, 1.0, 0.5, 0.5]
    assert ScheduledClip({0: 2.0, 2: 1.0}) == ScheduledClip([(0, 2.0), (2, 1.0)])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: FixedClip(0.0), "clip=0.0 must be a finite number at least 1e-30 and at most 1e+30"),
        (lambda: FixedClip(float("nan")), "clip=nan"),
        (lambda: FixedClip(5e-324), "clip=5e-324 must be a finite number at least 1e-30"),
        (lambda: FixedClip("wide"), "clip='wide'"),
        (lambda: ScheduledClip({0: 1.0, 5: 1e-310}), "schedule clip=1e-310 must be a finite number at least 1e-30"),
        (lambda: ScheduledClip({0: math.inf}), "schedule clip=inf"),
        (lambda: QuantileClip(quantile=1.0), "quantile=1.0 must be a finite number above 0 and below 1"),
        (lambda: QuantileClip(start=-0.1), "clip_start=-0.1"),
        (lambda: QuantileClip(rule="geometrical"), "did you mean 'geometric'"),
        (lambda: ScheduledClip({1: 1.0}), "begin with an entry for round 0"),
        (lambda: ScheduledClip([(0, 1.0), (5, 1.0), (5, 2.0)]), "rounds that start at 0 and rise"),
    ],
)
def test_a_controller_refuses_what_makes_no_sense(make, words):
    with pytest.raises(SettingError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("schedule", [None, 3, [1, 2], "ab", [(0, 1.0, 2.0)]])
def test_a_schedule_that_is_none_is_refused_in_a_sentence(schedule):
    with pytest.raises(SettingError, match=r"schedule=.* must be a mapping from rounds to clips, or pairs of these"):
        ScheduledClip(schedule)


class Number:
    """A rule of somebody who returns the clip itself."""

    needs_fraction = False

    def __init__(self, first):
        self.first = first

    def init(self):
        return self.first

    def update(self, state, release):
        return state.clip


@pytest.mark.parametrize(("first", "method"), [(1.0, r"init\(\)"), (ClipState(1.0), r"update\(state, release\)")])
def test_a_rule_that_returns_a_number_is_told_what_to_return(first, method):
    with pytest.raises(SettingError, match=rf"what {method} of the clip rule returned=1.0 must be a ClipState: return"):
        small_training(2, clip=Number(first)).run()
