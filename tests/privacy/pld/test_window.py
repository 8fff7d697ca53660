"""Windows of a transform: they leave out no more than they may, by the normal law where losses are normal."""

import math

import numpy as np
import pytest
from scipy.special import log_ndtr

from clipline.privacy.numerics.gaussian import gaussian_epsilon
from clipline.privacy.pld.discretised import TILTS
from clipline.privacy.pld.one_round import Direction, MixturePair, PositiveLossPart
from clipline.privacy.pld.window import (
    ACCEPTED_GAIN,
    LOG_CONVERSION,
    TRUNCATED_SHARE,
    _log_chance_below,
    fast_size,
    lattice_step,
    total_moments,
    window_around,
)


def gaussian_rounds(mu, count):
    """`count` rounds of two normals at distance mu: the total loss is N(m, 2 m) with m = count mu^2 / 2."""
    part = (PositiveLossPart(MixturePair.REMOVE, 1.0, mu),)
    return ((Direction(part, part), count),)


@pytest.mark.parametrize(("mu", "count"), [(0.1, 1), (0.02, 3000), (0.5, 40)])
def test_moments_of_all_rounds_add_up_to_the_closed_form_and_never_less(mu, count):
    moments, infinity_mass = total_moments(gaussian_rounds(mu, count))
    exact = count * TILTS * (TILTS + 1) * mu**2 / 2
    useful = (TILTS + 1) * mu < 10
    assert np.all(moments[useful] >= exact[useful] * (1 - 1e-12))
    assert np.all(moments[useful] <= exact[useful] * 1.03 + 1e-10)
    assert infinity_mass < count * 1e-60


def test_different_rounds_add_their_moments():
    one, two = gaussian_rounds(0.1, 5), gaussian_rounds(0.3, 2)
    np.testing.assert_allclose(
        total_moments((*one, *two))[0], total_moments(one)[0] + total_moments(two)[0], rtol=1e-14
    )


def test_the_conversion_is_that_of_canonne_kamath_and_steinke():
    # delta <= exp((a - 1) (R - epsilon)) / (a - 1) (1 - 1/a)^a, with a = tilt + 1.
    orders = TILTS + 1
    exact = -np.log(orders - 1) + orders * np.log1p(-1 / orders)
    np.testing.assert_allclose(LOG_CONVERSION, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("mu", "count"), [(0.02, 3000), (0.5, 40)])
def test_the_bound_on_the_lower_tail_lies_above_the_normal_law(mu, count):
    mean, deviation = count * mu**2 / 2, mu * math.sqrt(count)
    losses = mean + deviation * np.array([-9.0, -5.0, -2.0, 0.0, 3.0])
    bound = _log_chance_below(gaussian_rounds(mu, count), losses)
    exact = log_ndtr((losses - mean) / deviation)
    assert np.all(bound >= exact)
    # The best Chernoff bound on a normal law at k deviations is exp(-k^2 / 2).
    np.testing.assert_allclose(bound[:2], [-81 / 2, -25 / 2], rtol=0.002)


@pytest.mark.parametrize(("mu", "count"), [(0.02, 3000), (0.5, 40), (0.003, 10**6)])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 0.01])
def test_a_window_holds_epsilon_and_all_but_a_small_share_of_delta_above_it(mu, count, delta):
    rounds, total = gaussian_rounds(mu, count), mu * math.sqrt(count)
    epsilon = gaussian_epsilon(total, delta)
    bounds = total_moments(rounds)[0] + LOG_CONVERSION - TILTS * epsilon
    best = int(np.argmin(bounds))
    window = window_around(rounds, best, epsilon, delta, margin=1.0)
    assert window.bottom < epsilon < window.bottom + window.width
    above = log_ndtr((total**2 / 2 - window.bottom - window.width) / total)
    assert above <= math.log(TRUNCATED_SHARE * delta)
    # What lies below wraps to the top, where it counts exp(-tilt width) of its probability.
    below = log_ndtr((window.bottom - total**2 / 2) / total)
    assert below - window.tilt * window.width <= math.log(TRUNCATED_SHARE * delta) + 1e-9
    assert window.width < 40 * max(total, total**2)  # it is no wider than some standard deviations


def test_a_limit_on_the_rounding_gain_is_kept_to_or_else_the_least_gain_is_taken():
    rounds, delta = gaussian_rounds(0.02, 3000), 1e-9
    epsilon = gaussian_epsilon(0.02 * math.sqrt(3000), delta)
    best = int(np.argmin(total_moments(rounds)[0] + LOG_CONVERSION - TILTS * epsilon))
    usual = window_around(rounds, best, epsilon, delta, 1.0)
    assert usual.rounding_gain < ACCEPTED_GAIN
    least = window_around(rounds, best, epsilon, delta, 1.0, gain_limit=-math.inf)
    assert least.rounding_gain <= usual.rounding_gain
    assert least.width >= usual.width


@pytest.mark.parametrize("least", [1.0, 40.0, 41.0, 1000.0, 1025.0, 1e6, 5 * 2**17 + 1])
def test_a_fast_size_is_large_enough_and_at_most_a_quarter_larger(least):
    size = fast_size(least)
    assert max(least, 40) <= size <= max(1.25 * least, 64)
    odd = size // (size & -size)
    assert odd in (1, 3, 5, 7)


def test_the_step_grows_with_coarseness_and_falls_with_rounds_as_the_error_formula_says():
    # rounds h^2 (tilt + 1) / 12 is the error, so that four times the rounds halve h; steps are powers of 2^(1/4).
    few, many = (lattice_step(gaussian_rounds(0.02, n), 10.0, 1.0, 1.0, 1e-12, coarseness=1.0) for n in (400, 1600))
    assert few / many == pytest.approx(2, rel=1e-12)
    coarse = lattice_step(gaussian_rounds(0.02, 400), 10.0, 1.0, 1.0, 1e-12, coarseness=8.0)
    assert coarse / few == pytest.approx(8, rel=1e-12)
    assert 400 * few**2 * 11 / 12 <= 1e-5
    assert (4 * math.log2(few)) == pytest.approx(round(4 * math.log2(few)), abs=1e-9)


def test_a_window_too_wide_for_its_step_gets_a_wider_step():
    step = lattice_step(gaussian_rounds(0.02, 400), 10.0, 1.0, 1e6, 1e-12, coarseness=1.0)
    assert 1e6 / step < 2**19
