"""One-round Renyi curves against mpmath, the oracle table, the binomial sum and limits known by hand."""

import math

import mpmath
import numpy as np
import pytest

from clipline.privacy.renyi.curves import (
    discrete_gaussian_curve,
    fixed_size_curve,
    gaussian_curve,
    poisson_curve,
    poisson_curve_at_whole_orders,
)

SAMPLED = [poisson_curve, fixed_size_curve]
ORDERS = 1 + np.logspace(-4, 6, 31)

# (curve, rate, stddev, order, divergence): mpmath, 17 digits (rdp.csv; the last five computed for this file with the
# formulas of the module docstring at 30 digits)
KNOWN = [
    (poisson_curve, 0.01, 1, 1.5, 0.00012725374332744984),
    (poisson_curve, 0.01, 1, 32, 11.246275937048069),
    (poisson_curve, 0.013958, 1.3958, 8, 0.00056183907232439603),
    (poisson_curve, 0.000513, 0.513, 128, 235.55485516286493),
    (fixed_size_curve, 0.013958, 0.6979, 3, 0.0036074233772060766),
    (fixed_size_curve, 0.01, 1, 1.5, 0.00021018790715386805),
    (fixed_size_curve, 0.1, 3, 32, 0.03130155228690044),
    (poisson_curve, 1e-9, 0.3, 1.0001, 3.0828805137612715e-14),
    (poisson_curve, 0.02, 0.1, 6.25, 307.84282975544265),
    (poisson_curve, 1e-6, 30, 40.5, 2.2512505594842213e-14),
    (fixed_size_curve, 1e-9, 0.3, 1.0001, 6.0405234828083441e-14),
    (fixed_size_curve, 1e-6, 30, 400.5, 2.2854376090037084e-13),
]


@pytest.mark.parametrize(("curve", "rate", "stddev", "order", "divergence"), KNOWN)
def test_known_divergences_are_met(curve, rate, stddev, order, divergence):
    assert curve(rate, stddev, np.array([float(order)]))[0] == pytest.approx(divergence, rel=1e-12)


def test_every_row_of_the_oracle_table_is_met(oracle):
    curves = {"poisson_remove": poisson_curve, "wor_tight": fixed_size_curve}
    rows = [row for row in oracle("rdp.csv") if row["method"] in curves]
    assert len(rows) == 39
    for row in rows:
        order = np.array([float(row["order"])])
        computed = curves[row["method"]](float(row["q"]), float(row["sigma_eff"]), order)
        assert computed[0] == pytest.approx(float(row["rdp"]), rel=1e-9), row["row_id"]


@pytest.mark.parametrize(("rate", "stddev", "order"), [(0.3, 1.7, 17.3), (0.97, 0.4, 1.9), (1e-3, 0.5, 2.01)])
@pytest.mark.parametrize("curve", SAMPLED)
def test_the_quadrature_agrees_with_mpmath(curve, rate, stddev, order):
    with mpmath.workdps(20):
        q, s, a = mpmath.mpf(rate), mpmath.mpf(stddev), mpmath.mpf(order)

        def ratio(x):
            return 1 - q + q * mpmath.exp((2 * s * x - 1) / (2 * s * s))

        if curve is poisson_curve:
            low, excess = mpmath.mpf(-12), lambda r: r**a - 1 - a * (r - 1)
        else:
            low, excess = 1 / (2 * s), lambda r: r**a + r ** (1 - a) - r - 1
        panels = mpmath.linspace(low, max(a, 2) / s + 12, 30)
        total = mpmath.quad(lambda x: excess(ratio(x)) * mpmath.npdf(x), panels, maxdegree=4)
        exact = float(mpmath.log1p(total) / (a - 1))
    assert curve(rate, stddev, np.array([order]))[0] == pytest.approx(exact, rel=1e-10)


def test_the_fast_poisson_curve_equals_the_plain_binomial_sum():
    # A fixed seed; a third of the cases put the integrand's two separate bumps at about equal height, far apart.
    rng = np.random.default_rng(20240601)
    for case in range(120):
        rate, stddev = np.exp(rng.uniform(np.log([1e-9, 0.1]), np.log([0.999, 1e3])))
        order = np.exp(rng.uniform(np.log(2), np.log(3000)))
        if case % 3 == 0:
            order = 1 + 2 * stddev**2 * math.log(1 / rate) * np.exp(rng.uniform(-0.5, 0.5))
        orders = np.array([float(int(np.clip(order, 2, 3000)))])
        plain = poisson_curve_at_whole_orders(rate, stddev, orders)
        np.testing.assert_allclose(poisson_curve(rate, stddev, orders), plain, rtol=1e-9, err_msg=f"{rate} {stddev}")


def test_order_two_of_poisson_sampling_is_the_hand_formula():
    # M(2) = 1 + q^2 (e^(1/s^2) - 1)
    for rate, stddev in [(1e-9, 1e3), (0.01, 1.0), (0.5, 0.2)]:
        expected = math.log1p(rate**2 * math.expm1(stddev**-2))
        assert poisson_curve(rate, stddev, np.array([2.0]))[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("curve", SAMPLED)
@pytest.mark.parametrize("stddev", [0.1, 1.0, 1e3])
def test_sampling_everyone_is_no_sampling(curve, stddev):
    np.testing.assert_allclose(curve(1.0, stddev, ORDERS), ORDERS / (2 * stddev**2), rtol=1e-12)
    np.testing.assert_allclose(curve(1 - 1e-13, stddev, ORDERS), ORDERS / (2 * stddev**2), rtol=1e-9)


@pytest.mark.parametrize("curve", SAMPLED)
@pytest.mark.parametrize("stddev", [0.1, 0.35, 1.0, 7.0, 100.0, 1e3])
@pytest.mark.parametrize("rate", [1e-9, 1e-4, 0.02, 0.6, 0.999])
def test_curves_are_finite_rise_with_the_order_and_stay_below_no_sampling(curve, rate, stddev):
    divergences = curve(rate, stddev, ORDERS)
    assert np.all(np.isfinite(divergences))
    assert np.all(divergences > 0)
    assert np.all(np.diff(divergences) >= -1e-12 * divergences[1:])
    assert np.all(divergences <= gaussian_curve(stddev, ORDERS) * (1 + 1e-12))
    # (a - 1) times the divergence is a log-moment, which is convex in a
    slopes = np.diff((ORDERS - 1) * divergences) / np.diff(ORDERS)
    assert np.all(np.diff(slopes) >= -1e-9 * slopes[1:])


@pytest.mark.parametrize(("rate", "stddev"), [(1e-3, 1e-4), (1e-300, 1.0), (0.5, 1e300), (0.5, 1e-200)])
@pytest.mark.parametrize("curve", SAMPLED)
def test_beyond_its_limits_a_curve_errs_upwards(curve, rate, stddev):
    divergences = curve(rate, stddev, ORDERS)
    assert not np.any(np.isnan(divergences))
    assert np.all(divergences >= rate**2 * np.minimum(gaussian_curve(stddev, ORDERS), 1))


def test_the_exchange_of_a_user_costs_at_least_what_one_user_less_does():
    for rate in (1e-6, 0.01, 0.5):
        for stddev in (0.3, 1.0, 30.0):
            assert np.all(fixed_size_curve(rate, stddev, ORDERS) >= poisson_curve(rate, stddev, ORDERS) * (1 - 1e-12))


def test_a_discrete_gaussian_diverges_no_more_than_the_continuous_one():
    # Summed over the integers, from the definition.
    k = np.arange(-400, 401)
    for stddev, shift in [(0.4, 1), (1.0, 1), (3.0, 2), (20.0, 5)]:
        log_p, log_q = (-((k - c) ** 2) / (2 * stddev**2) for c in (shift, 0))
        log_total = np.logaddexp.reduce(log_q)
        for order in (1.5, 2.0, 8.0):
            moment = np.logaddexp.reduce(order * log_p + (1 - order) * log_q) - log_total
            bound = discrete_gaussian_curve(stddev / shift, np.array([order]))[0]
            assert moment / (order - 1) <= bound * (1 + 1e-12)
