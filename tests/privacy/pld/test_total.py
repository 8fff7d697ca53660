"""Many rounds on a lattice: sums by hand, transforms against exact ones, readings against the sum written out."""

import math
from fractions import Fraction

import numpy as np
import pytest

from clipline.privacy.pld.discretised import DiscretisedLoss
from clipline.privacy.pld.total import TotalLoss, convolve, fft_rounding, spectrum_of


def total_of(masses, start=0.0, step=0.5, tilt=1.0, rounding=0.0, charged=0.0):
    """A total that was not tilted, around a loss of 0."""
    return TotalLoss(start, step, tilt, np.asarray(masses, dtype=float), 0.0, start, 0.0, rounding, 0.0, charged)


def test_delta_is_the_hockey_stick_sum():
    # Losses 0, 1/2, 1, 3/2 with chances 1/2, 1/4, 1/8, 1/8. At epsilon 1/2: (1 - e^-1/2) / 8 + (1 - e^-1) / 8.
    total = total_of([0.5, 0.25, 0.125, 0.125])
    assert total.delta(0.5) == pytest.approx((2 - math.exp(-0.5) - math.exp(-1)) / 8, rel=1e-15)
    assert total.delta(1.5) == 0
    # Between two points of the lattice it is the same sum.
    assert total.delta(0.75) == pytest.approx((2 - math.exp(-0.25) - math.exp(-0.75)) / 8, rel=1e-14)


def test_what_is_charged_and_what_rounding_may_have_cost_come_on_top():
    plain = total_of([0.5, 0.25, 0.125, 0.125])
    charged = total_of([0.5, 0.25, 0.125, 0.125], charged=1e-3)
    assert charged.delta(0.5) == pytest.approx(plain.delta(0.5) + 1e-3, rel=1e-14)
    # A rounding error at `centre` falls with the tilt: by exp(-2 / 2) from 0 to 1/2 at a tilt of 2.
    rounded = total_of([0.5, 0.25, 0.125, 0.125], rounding=1e-3, tilt=2.0)
    assert rounded.delta(0.5) == pytest.approx(plain.delta(0.5) + 1e-3 * math.exp(-1), rel=1e-14)
    assert rounded.rounding_share(0.01, 0.5) == pytest.approx(0.1 * math.exp(-1), rel=1e-14)


@pytest.mark.parametrize("delta", [0.3, 1e-4, 1e-11])
@pytest.mark.parametrize("step", [0.004, 0.5, 3.0])
def test_the_first_point_within_a_delta_is_that_of_a_plain_search(step, delta):
    # 2048 points in blocks of 512. At a step of 3 a block is too long for running sums, and bisection is on its own.
    rng = np.random.default_rng(11)
    masses = np.exp(-0.01 * np.arange(2048)) * rng.uniform(0.5, 1.5, 2048)
    total = total_of(masses / masses.sum(), start=-1.0, step=step)
    sums = [total.delta(-1.0 + step * index) for index in range(2048)]
    first = next(index for index, value in enumerate(sums) if value <= delta)
    upper = -1.0 + step * first
    assert upper - step <= total.epsilon(delta) <= upper


def test_no_epsilon_is_found_where_the_charge_alone_exceeds_delta_or_the_window_ends_too_early():
    assert math.isinf(total_of([0.5, 0.5], charged=1e-3).epsilon(1e-3))
    # Rounding of 1 at every point never falls to the target within the lattice.
    assert math.isinf(total_of([0.5, 0.25, 0.125, 0.125], rounding=1.0, tilt=1e-3).epsilon(1e-3))


def coin(chance, step=0.25):
    """A loss of `step` with this chance, else of 0."""
    return DiscretisedLoss(np.array([0.0, step]), np.array([1 - chance, chance]), 0.0)


@pytest.mark.parametrize("chance", [0.5, 0.0625])
@pytest.mark.parametrize("count", [1, 10, 60])
def test_the_sum_of_coins_is_binomial_within_the_stated_error(chance, count):
    size, exact_chance = 64, Fraction(chance)  # a power of two, so that the float is exact
    one = spectrum_of(coin(chance), 0, 1e-300, 1.0, size)  # a tilt of next to nothing
    masses, error = convolve([(one, count)], size)
    exact = [math.comb(count, k) * exact_chance**k * (1 - exact_chance) ** (count - k) for k in range(count + 1)]
    assert 0 < error < 1e-10
    np.testing.assert_allclose(masses[: count + 1], [float(mass) for mass in exact], rtol=0, atol=error)
    np.testing.assert_allclose(masses[count + 1 :], 0, atol=error)


def test_a_transform_errs_less_than_is_charged():
    # A random vector of total one, transformed in long double by the definition.
    rng = np.random.default_rng(3)
    masses = rng.dirichlet(np.ones(240))
    k = np.arange(121)
    angles = (
        np.longdouble(-2) * np.longdouble("3.14159265358979323846264338327950288") / 240 * np.outer(k, np.arange(240))
    )
    exact = np.cos(angles) @ masses.astype(np.longdouble) + 1j * (np.sin(angles) @ masses.astype(np.longdouble))
    assert np.abs(np.fft.rfft(masses) - exact).max() < fft_rounding(240)
