"""Noise against the longest mean update, by hand and on the paper's tasks."""

import math

import numpy as np
import pytest

from clipline import SettingError
from clipline.privacy.feasibility.noise_norm import (
    Verdict,
    count_parameters,
    mean_update_norm,
    most_parameters,
    noise_norm,
    slowdown,
    update_noise,
    verdict,
    verdict_text,
)
from clipline_paper.facts import FACTS


def test_the_norm_is_that_of_drawn_noise():
    # 10,000 coordinates of deviation 0.8 / 50: norm 0.016 * 100 = 1.6. The drawn norm deviates by 0.7% (one sigma);
    # the seed is fixed.
    drawn = np.random.default_rng(3).normal(scale=0.8, size=10_000) / 50
    assert noise_norm(0.8, 50, 10_000) == pytest.approx(1.6)
    assert noise_norm(0.8, 50, 10_000) == pytest.approx(np.linalg.norm(drawn), rel=0.02)


@pytest.mark.parametrize(
    ("task", "ratio"),
    [("cifar100", 1.005), ("emnist_cr", 1.098), ("emnist_ae", 0.505), ("shakespeare", 0.906), ("so_nwp", 0.201),
     ("so_lr", 0.224)],
)  # fmt: skip
def test_the_papers_tasks_bear_a_fifth_of_a_clip_to_a_little_over_one(task, ratio):
    # Table 1, by hand: z* sqrt(P) / 100 users, such as 0.1 * sqrt(1,206,590) / 100 = 0.1 * 1098.4 / 100.
    facts = FACTS[task]
    assert noise_norm(facts.noise_at_100, 100, facts.parameters) == pytest.approx(ratio, abs=5e-4)
    assert Verdict.COMFORTABLE.most < ratio < 1.1 * Verdict.FEASIBLE.most


def test_the_default_training_is_comfortable():
    # README: 40,000 writers, 300 a round, epsilon 4: noise 0.5786, 5994 parameters. 0.5786 * 77.42 / 300 = 0.149.
    ratio = noise_norm(0.5786, 300, 5994)
    assert ratio == pytest.approx(0.1493, abs=1e-4)
    assert verdict(ratio) is Verdict.COMFORTABLE


def test_words_come_in_order_and_their_limits_are_included():
    assert [str(verdict(ratio)) for ratio in (0, 0.2, 0.201, 1, 1.001, 2, 2.001, math.inf)] == [
        "comfortable", "comfortable", "feasible", "feasible", "doubtful", "doubtful", "hopeless", "hopeless",
    ]  # fmt: skip
    assert verdict_text(2.7) == "hopeless: the noise is 2.7 times the longest possible mean update"
    assert verdict_text(1.001) == "doubtful: the noise is 1.1 times the longest possible mean update"  # rounded up
    assert verdict_text(0.25) == "feasible: the noise is 0.25 times the longest possible mean update"


def test_the_most_parameters_are_where_the_norm_meets_the_ratio():
    assert most_parameters(0.5, 100, 1.0) == pytest.approx(40_000)  # (100 / 0.5)^2
    assert noise_norm(0.5, 100, 40_000) == pytest.approx(1.0)
    assert most_parameters(0.0, 100, 1.0) == math.inf


def test_parameters_are_a_number_or_shapes():
    assert count_parameters(7) == 7
    assert count_parameters([(3, 4), (4,), ()]) == 12 + 4 + 1
    for wrong in (0, -1, 2.5, "many", [], [3, 4]):
        with pytest.raises(SettingError, match="parameters"):
            count_parameters(wrong)


def test_the_noise_of_the_updates_is_theorem_1_or_all_of_the_round():
    assert update_noise(1.0, 100, 5.0) == pytest.approx(1.00503781525921, rel=1e-12)  # (1 - 1/100)^(-1/2)
    assert update_noise(1.0, 100, 0.4) == 1.0  # a count with 0.4 users of noise would reveal more than the round may


def test_the_mean_of_updates_is_as_long_as_their_agreement():
    assert mean_update_norm(100, 1.0) == 1.0
    assert mean_update_norm(100, 0.0) == pytest.approx(0.1)
    # Two unit vectors at 60 degrees (cosine 1/2): their mean is cos(30 degrees) long.
    assert mean_update_norm(2, 0.5) == pytest.approx(math.sqrt(3) / 2)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 2.7])
def test_noise_slows_descent_as_the_best_rate_on_a_bowl_shows(ratio):
    # Descent of one step at rate s on a bowl of curvature 1 from a gradient of norm 1, noise of norm `ratio`.
    rates = np.linspace(0, 1.5, 150_001)
    descent = (rates - rates**2 * (1 + ratio**2) / 2).max()
    assert slowdown(ratio) == pytest.approx(0.5 / descent, rel=1e-6)
