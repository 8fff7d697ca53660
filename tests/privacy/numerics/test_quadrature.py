"""Integrals on a log scale against closed forms, also where their mass lies far out or in two places."""

import math

import numpy as np
import pytest

from clipline.privacy.numerics.quadrature import log_integral

LOG_ROOT = 0.5 * math.log(2 * math.pi)


def exponential_tilt(x, order):
    return order * x - 0.5 * x * x  # the integral is sqrt(2 pi) exp(order^2 / 2)


def test_a_peak_is_found_wherever_it_is():
    orders = np.array([0.0, 1.0, 50.0, 1e4, 1e7])
    found = log_integral(exponential_tilt, orders, peaks=orders[:, None], left=-10.0, right=orders + 10, step=0.4)
    np.testing.assert_allclose(found, LOG_ROOT + orders**2 / 2, rtol=1e-14, atol=1e-13)


def test_a_guess_that_is_off_by_less_than_the_width_of_a_peak_is_good_enough():
    orders = np.array([3.0, 700.0])
    for error in (-2.0, 0.3, 1.5):
        peaks = orders[:, None] + error
        found = log_integral(exponential_tilt, orders, peaks=peaks, left=-10.0, right=orders + 10, step=0.4)
        np.testing.assert_allclose(found, LOG_ROOT + orders**2 / 2, rtol=1e-13)


@pytest.mark.parametrize("distance", [4.0, 300.0, 1e5])
def test_two_peaks_far_apart_are_both_counted(distance):
    # One normal around 0 and one of three times the mass around `distance`.
    def two(x, order):
        return np.logaddexp(-0.5 * x * x, math.log(3) - 0.5 * (x - distance) ** 2)

    peaks = np.array([[0.0, distance]])
    found = log_integral(two, np.array([2.0]), peaks=peaks, left=-10.0, right=np.array([distance + 10]), step=0.4)
    assert found[0] == pytest.approx(LOG_ROOT + math.log(4), rel=1e-12)


def test_what_lies_eighteen_digits_below_the_highest_peak_is_left_out():
    def uneven(x, order):
        return np.logaddexp(-0.5 * x * x, -60.0 - 0.5 * (x - 1e5) ** 2)

    found = log_integral(
        uneven, np.array([2.0]), peaks=np.array([[0.0, 1e5]]), left=-10.0, right=np.array([1e5 + 10]), step=0.4
    )
    assert found[0] == pytest.approx(LOG_ROOT, rel=1e-14)


def test_logarithms_beyond_the_range_of_exp_do_no_harm():
    found = log_integral(
        lambda x, order: order - 0.5 * x * x, np.array([-5000.0, 5000.0]),
        peaks=np.zeros((2, 1)), left=-10.0, right=np.full(2, 10.0), step=0.4,
    )  # fmt: skip
    np.testing.assert_allclose(found, LOG_ROOT + np.array([-5000.0, 5000.0]), rtol=1e-14)


def test_more_than_a_million_nodes_are_answered_with_infinity():
    # exp(-(x / 10^6)^2 / 2) is ten million units wide: too many steps of 0.4.
    found = log_integral(
        lambda x, order: -0.5 * (x / 1e6) ** 2, np.array([2.0]),
        peaks=np.zeros((1, 1)), left=-1e7, right=np.array([1e7]), step=0.4,
    )  # fmt: skip
    assert math.isinf(found[0])
    assert found[0] > 0


def test_orders_are_answered_in_their_own_order_whatever_share_a_matrix():
    orders = np.array([1e6, 0.0, 1e6, 5.0, 0.0])
    found = log_integral(exponential_tilt, orders, peaks=orders[:, None], left=-10.0, right=orders + 10, step=0.4)
    np.testing.assert_allclose(found, LOG_ROOT + orders**2 / 2, rtol=1e-14, atol=1e-13)
