"""Theorem 27 against 150-digit arithmetic, its own definition, and the tight curve."""

import math

import mpmath
import numpy as np
import pytest

from clipline.privacy.renyi.curves import fixed_size_curve
from clipline.privacy.renyi.wang2019 import log_even_differences, wang2019_curve

# (rate, stddev, order, divergence), from rdp.csv: forward differences in 150-digit arithmetic
KNOWN = [
    (0.01, 1, 2, 0.00054350863810943249),
    (0.01, 1, 32, 11.26863552351778),
    (0.013958, 0.6979, 3, 0.0058070733555854108),
    (0.1, 3, 64, 1.2369754640929691),
    (0.5, 20, 2, 0.0025),
    (0.5, 20, 64, 0.045997622619500999),  # repeated subtraction in float64 gives 0.1136
]


@pytest.mark.parametrize(("rate", "stddev", "order", "divergence"), KNOWN)
def test_known_divergences_are_met(rate, stddev, order, divergence):
    assert wang2019_curve(rate, stddev, np.array([float(order)]))[0] == pytest.approx(divergence, rel=1e-9)


def test_every_row_of_the_oracle_table_is_met(oracle):
    rows = [row for row in oracle("rdp.csv") if row["method"] == "wor_thm27"]
    assert len(rows) == 20
    for row in rows:
        order = np.array([float(row["order"])])
        computed = wang2019_curve(float(row["q"]), float(row["sigma_eff"]), order)
        assert computed[0] == pytest.approx(float(row["rdp"]), rel=1e-9), row["row_id"]


@pytest.mark.parametrize("stddev", [0.3, 1.0, 5.0, 20.0])
def test_positive_integrals_are_the_alternating_sums(stddev):
    powers = np.array([2.0, 4.0, 10.0, 40.0])
    with mpmath.workdps(150):
        growth = 1 / (2 * mpmath.mpf(stddev) ** 2)
        sums = [
            mpmath.fsum((-1) ** k * mpmath.binomial(n, k) * mpmath.exp(k * (k - 1) * growth) for k in range(n + 1))
            for n in (2, 4, 10, 40)
        ]
        exact = [float(mpmath.log(total)) for total in sums]
    np.testing.assert_allclose(log_even_differences(stddev, powers), exact, rtol=1e-11)
    assert log_even_differences(stddev, powers)[0] == pytest.approx(math.log(math.expm1(stddev**-2)), rel=1e-12)


def test_the_tight_curve_lies_below_and_nothing_is_known_above_order_256():
    orders = np.array([1.5, 2.0, 3.5, 8.0, 64.0])
    for rate, stddev in [(0.01, 1.0), (0.1, 3.0), (0.3, 10.0)]:
        assert np.all(fixed_size_curve(rate, stddev, orders) <= wang2019_curve(rate, stddev, orders))
    assert math.isinf(wang2019_curve(0.01, 1.0, np.array([257.0]))[0])


def test_between_whole_orders_the_log_moment_is_a_straight_line():
    whole = wang2019_curve(0.05, 2.0, np.array([5.0, 6.0])) * [4, 5]
    assert wang2019_curve(0.05, 2.0, np.array([5.25]))[0] * 4.25 == pytest.approx(0.75 * whole[0] + 0.25 * whole[1])
