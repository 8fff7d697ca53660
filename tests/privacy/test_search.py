"""Searches along one number, on curves whose edge is known by hand."""

import pytest

from clipline.privacy.search import least_whole_within, least_within, most_within


def counted(function, calls):
    def asked(number):
        calls.append(number)
        return function(number)

    return asked


@pytest.mark.parametrize("power", [0.3, 1, 2, 3, 8])
@pytest.mark.parametrize("epsilon", [0.01, 1, 50])
def test_the_least_number_of_a_power_law_is_found_from_above(power, epsilon):
    edge = 0.7 * epsilon ** (-1 / power)
    high = max(100 * edge, 1)
    bounds = [lambda x, f=f: f * (0.7 / x) ** power for f in (1.3, 1.0004, 1.0)]
    found = least_within(bounds, epsilon, high, 1e-12, slack=2e-5)
    assert bounds[-1](found) <= epsilon
    assert found == pytest.approx(edge, rel=3e-5 / power)


def test_a_curve_that_jumps_is_left_on_the_private_side_of_the_jump_soon():
    # Flat, then a cliff: secants are of no use, halving is.
    calls = []

    def cliff(x):
        return 3.0 if x < 2.123456 else 0.1

    found = least_within([counted(cliff, calls)], 1.0, 8.0, 0.05, slack=1e-5)
    assert found == pytest.approx(2.123456, rel=1e-6)
    assert found >= 2.123456
    assert len(calls) <= 45


@pytest.mark.parametrize("edge", [1, 2, 3, 10, 999, 123_456, 10**9])
@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_the_most_that_fits_is_found_to_the_last_one(edge, power):
    def spent(n):
        return ((n - 0.5) / edge) ** power  # the edge itself fits, one more does not

    bounds = [lambda n: 1.2 * spent(n), lambda n: 1.0003 * spent(n), spent]
    assert most_within(bounds, 1.0, 1, 10**12) == edge
    assert most_within(bounds, 1.0, 1, max(edge // 2, 1)) == max(edge // 2, 1)
    assert most_within(bounds, 1.0, edge + 1, 10**12) == edge  # not even the first fits: one less


@pytest.mark.parametrize("edge", [1, 7, 250, 99_999])
def test_the_least_whole_number_is_found_to_the_last_one_or_it_is_said_that_there_is_none(edge):
    def spent(cohort):
        return 4 * (edge - 0.5) / cohort  # the edge itself fits, one less does not

    bounds = [lambda n: 1.2 * spent(n), lambda n: 1.001 * spent(n), spent]
    assert least_whole_within(bounds, 4.0, 1, 10**6) == least_whole_within(bounds, 4.0, 1, edge) == edge
    assert least_whole_within(bounds, 4.0, edge + 5, 10**6) == edge + 5
    assert edge == 1 or least_whole_within(bounds, 4.0, 1, edge - 1) is None
