"""Renyi curves and epsilons against mpmath, the oracle tables, the binomial sum and limits known by hand."""

import math

import mpmath
import numpy as np
import pytest
from oracle_rows import delta_of_row

from clipline.privacy.renyi import (
    deltas,
    epsilon_at,
    epsilons,
    fixed_size_curve,
    gaussian_curve,
    log_integral,
    poisson_curve,
    wang2019_curve,
)

SAMPLED = [poisson_curve, fixed_size_curve]
ORDERS = 1 + np.logspace(-4, 6, 31)

# (curve, rate, stddev, order, divergence), beside those of rdp.csv: mpmath at 30 digits
KNOWN = [
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
    curves = {"poisson_remove": poisson_curve, "wor_tight": fixed_size_curve, "wor_thm27": wang2019_curve}
    rows = [row for row in oracle("rdp.csv") if row["method"] in curves]
    assert len(rows) == 59
    for row in rows:
        order = np.array([float(row["order"])])
        computed = curves[row["method"]](float(row["q"]), float(row["sigma_eff"]), order)
        assert computed[0] == pytest.approx(float(row["rdp"]), rel=1e-9), row["row_id"]


def poisson_curve_at_whole_orders(rate, stddev, orders):
    """By the binomial sum, one term for each k up to the order."""
    costs = []
    for order in orders.astype(int).tolist():
        k = np.arange(2, order + 1)
        log_choose = np.array([math.lgamma(order + 1) - math.lgamma(j + 1) - math.lgamma(order - j + 1) for j in k])
        exponent = k * (k - 1) / (2 * stddev**2)
        log_growth = exponent + np.log(-np.expm1(-exponent))  # log(e^exponent - 1), which is 0 for k = 0 and k = 1
        terms = log_choose + (order - k) * math.log1p(-rate) + k * math.log(rate) + log_growth
        costs.append(np.logaddexp(0.0, np.logaddexp.reduce(terms)) / (order - 1))
    return np.array(costs)


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
            bound = gaussian_curve(stddev / shift, np.array([order]))[0]
            assert moment / (order - 1) <= bound * (1 + 1e-12)


GRIDS = {
    "int2_64+128+256": np.array([*range(2, 65), 128, 256], dtype=float),
    "dp_accounting_default": np.array([*(1 + k / 10 for k in range(1, 100)), *range(11, 64), 128, 256, 512, 1024]),
    "tfp2020": np.array([1.25, 1.5, 1.75, 2, 2.25, 2.5, 3, 3.5, 4, 4.5, *range(5, 64), 128, 256, 512]),
}
CURVES = {
    "rdp_gaussian": lambda q, s, orders: gaussian_curve(s, orders),
    "rdp_poisson": poisson_curve,
    "rdp_wor_tight": fixed_size_curve,
    "rdp_wor_thm27": wang2019_curve,
}


def test_every_renyi_row_of_the_oracle_table_is_met_and_the_best_order_is_no_worse(oracle):
    rows = [row for row in oracle("epsilon.csv") if row["method"] in CURVES]
    assert len(rows) == 34
    for row in rows:
        delta, rounds, stddev = delta_of_row(row), int(row["T"]), float(row["sigma_eff"])
        rate = int(row["m"]) / int(row["n"]) if row["n"] else float(row["q"])
        orders = GRIDS[row["orders"]]

        def curve(orders, rounds=rounds, rate=rate, stddev=stddev, method=row["method"]):
            return rounds * CURVES[method](rate, stddev, np.array(orders))

        if row["conversion"] == "cks":
            on_grid = epsilons(curve(orders), orders, delta).min()
            if row["method"] != "rdp_wor_thm27":  # known at whole orders, which real ones only come near to
                assert epsilon_at(curve, delta)[0] <= on_grid * (1 + 1e-7), row["row_id"]
        else:
            on_grid = (curve(orders) - math.log(delta) / (orders - 1)).min()
        assert on_grid == pytest.approx(float(row["epsilon"]), rel=1e-9), row["row_id"]


def test_the_gaussian_epsilon_is_the_minimum_over_a_very_fine_list_of_orders():
    orders = 1 + np.logspace(-3, 3, 200_001)
    for z, rounds in [(1.0, 1), (5.0, 100), (300.0, 10)]:
        finest = epsilons(rounds * gaussian_curve(z, orders), orders, 1e-6).min()
        best, _ = epsilon_at(lambda o, z=z, rounds=rounds: rounds * gaussian_curve(z, np.array(o)), 1e-6)
        assert best == pytest.approx(finest, rel=1e-6)


def test_delta_at_an_order_undoes_epsilon_at_that_order():
    orders = np.array([1.5, 4.0, 32.0])
    divergences = gaussian_curve(2.0, orders)
    for index, epsilon in enumerate(epsilons(divergences, orders, 1e-6)):
        assert deltas(divergences, orders, epsilon)[index] == pytest.approx(1e-6, rel=1e-12)


def test_the_tight_curve_lies_below_and_nothing_is_known_above_order_256():
    orders = np.array([1.5, 2.0, 3.5, 8.0, 64.0])
    for rate, stddev in [(0.01, 1.0), (0.1, 3.0), (0.3, 10.0)]:
        assert np.all(fixed_size_curve(rate, stddev, orders) <= wang2019_curve(rate, stddev, orders))
    assert math.isinf(wang2019_curve(0.01, 1.0, np.array([257.0]))[0])


def test_between_whole_orders_the_log_moment_is_a_straight_line():
    whole = wang2019_curve(0.05, 2.0, np.array([5.0, 6.0])) * [4, 5]
    assert wang2019_curve(0.05, 2.0, np.array([5.25]))[0] * 4.25 == pytest.approx(0.75 * whole[0] + 0.25 * whole[1])


LOG_ROOT = 0.5 * math.log(2 * math.pi)


@pytest.mark.parametrize("distance", [4.0, 300.0, 1e5])
def test_two_peaks_far_apart_are_both_counted(distance):
    # One normal around 0 and one of three times the mass around `distance`.
    def two(x, order):
        return np.logaddexp(-0.5 * x * x, math.log(3) - 0.5 * (x - distance) ** 2)

    peaks = np.array([[0.0, distance]])
    found = log_integral(two, np.array([2.0]), peaks=peaks, left=-10.0, right=np.array([distance + 10]), step=0.4)
    assert found[0] == pytest.approx(LOG_ROOT + math.log(4), rel=1e-12)
