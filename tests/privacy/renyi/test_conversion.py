"""Renyi epsilons against the oracle table on stated lists of orders, and with the best real order."""

import math

import numpy as np
import pytest
from oracle_rows import delta_of_row

from clipline.privacy.renyi.conversion import deltas, epsilon_at, epsilons
from clipline.privacy.renyi.curves import fixed_size_curve, gaussian_curve, poisson_curve
from clipline.privacy.renyi.wang2019 import wang2019_curve

DELTA = 10**-6.6
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


@pytest.mark.parametrize(
    ("curve", "rate", "stddev", "rounds", "delta", "on_grid", "exact"),
    [
        (CURVES["rdp_gaussian"], 1, 5, 100, 1e-6, 11.85538999316, 10.99715121422),
        (poisson_curve, 0.01, 1, 1000, 1e-5, 2.107753075452, 1.8282366665),
        (poisson_curve, 0.013958, 1.3958, 1500, DELTA, 2.392492019652, 2.223353466),
        (poisson_curve, 0.5, 10, 50, 1e-5, 1.504279312403, 1.3767939512),
        (fixed_size_curve, 0.01, 1, 1000, 1e-5, 2.472936880045, 2.1989099489),
        (fixed_size_curve, 0.013958, 0.6979, 1500, DELTA, 12.05489462025, 11.022224779),
        (fixed_size_curve, 0.1, 3, 2000, 1e-6, 9.58291815159, 8.9981957475),
    ],
)
def test_the_best_real_order_lies_between_the_exact_epsilon_and_a_list_of_orders(
    curve, rate, stddev, rounds, delta, on_grid, exact
):
    best, _ = epsilon_at(lambda orders: rounds * curve(rate, stddev, np.array(orders)), delta)
    assert exact <= best <= on_grid


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
