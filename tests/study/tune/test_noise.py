import math

import pytest

from clipline.study.tune.recipe import borne, next_noises
from clipline.study.tune.trials import Metric, Trial

UP, DOWN = Metric("accuracy", lower_is_better=False), Metric("error", lower_is_better=True)


def trials(*pairs):
    return [Trial(0.1, 1.0, z, value) for z, value in pairs]


def rise(metric, allowed=0.05, *, limit=1e9, at_once=1):
    """The noises that step 2 tries where `metric` gives the metric at each, and the one it chooses."""
    table = trials((0.01, metric(0.01)))
    while following := next_noises(table, allowed, UP, limit=limit, at_once=at_once):
        table += trials(*((z, metric(z)) for z in following))
    tried = [trial.noise_multiplier for trial in table]
    return tried, borne(table, allowed, UP).noise_multiplier


def test_degradation_is_relative_and_knows_the_direction():
    assert UP.loss(0.8, 0.76) == pytest.approx(0.05)
    assert UP.loss(0.8, 0.84) == pytest.approx(-0.05)
    assert DOWN.loss(0.02, 0.021) == pytest.approx(0.05)
    assert DOWN.loss(0.02, 0.019) == pytest.approx(-0.05)
    assert UP.loss(-2.0, -2.1) == pytest.approx(0.05)  # a log-likelihood that fell
    assert [DOWN.loss(0.0, 0.0), DOWN.loss(0.0, 0.1), UP.loss(0.0, 0.1)] == [0, math.inf, 0]
    for diverged in (math.inf, -math.inf, math.nan):
        assert UP.loss(0.8, diverged) == DOWN.loss(0.8, diverged) == math.inf


# The limit of 5% lies at 0.76 where higher is better, and at 0.84 where lower is.
HIGHER = trials((0.01, 0.80), (0.03, 0.79), (0.1, 0.765), (0.3, 0.75), (1.0, 0.79))
LOWER = trials((0.01, 0.80), (0.03, 0.81), (0.1, 0.835), (0.3, 0.85), (1.0, 0.81))


@pytest.mark.parametrize(("table", "metric"), [(HIGHER, UP), (LOWER, DOWN)])
def test_the_most_noise_before_the_metric_degrades(table, metric):
    assert borne(table, 0.05, metric).noise_multiplier == 0.1
    assert borne(table[::-1], 0.05, metric).noise_multiplier == 0.1
    assert borne(table, 0.02, metric).noise_multiplier == 0.03
    assert borne(table, 0.07, metric).noise_multiplier == 1.0


def test_a_loss_of_exactly_what_is_allowed_is_allowed():
    table = trials((0.01, 1.0), (0.03, 0.75), (0.1, 0.7))
    assert borne(table, 0.25, UP).noise_multiplier == 0.03


def test_noise_is_raised_until_the_metric_degrades_and_then_narrowed_down_once():
    # Bears anything up to 0.2: 0.3 is too much, and so is none of the others; 0.173 lies between 0.1 and 0.3.
    assert rise(lambda z: 0.9 if z <= 0.2 else 0.5) == ([0.01, 0.03, 0.1, 0.3, 0.173], 0.173)
    assert rise(lambda z: 0.9 if z <= 0.15 else 0.5) == ([0.01, 0.03, 0.1, 0.3, 0.173], 0.1)


def test_noise_that_meets_the_target_alone_is_the_last_to_be_tried():
    assert rise(lambda z: 0.9, limit=0.4) == ([0.01, 0.03, 0.1, 0.3, 0.4], 0.4)
    assert rise(lambda z: 0.9, limit=0.005) == ([0.01], 0.01)
    assert rise(lambda z: 0.9, limit=5.0) == ([0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 5.0], 5.0)


def test_a_model_that_bears_nothing_keeps_the_least_noise():
    tried, chosen = rise(lambda z: 0.9 if z <= 0.01 else math.nan)
    assert chosen == 0.01
    assert tried == [0.01, 0.03, 0.0173]


def test_two_at_once_end_at_the_same_noise():
    assert rise(lambda z: 0.9 if z <= 0.2 else 0.5, at_once=2) == ([0.01, 0.03, 0.1, 0.3, 1.0, 0.173], 0.173)
    assert rise(lambda z: 0.9 if z <= 0.05 else 0.5, at_once=2) == ([0.01, 0.03, 0.1, 0.0548], 0.03)
