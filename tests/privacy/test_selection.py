"""The price of a search against the oracle table, limits known by hand, and full composition."""

import math

import numpy as np
import pytest

from clipline.errors import SettingError
from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, NoSampling, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation
from clipline.privacy.renyi import epsilons, gaussian_curve, poisson_curve, wang2019_curve
from clipline.privacy.selection import PoissonRuns, TruncatedNegativeBinomial, account_grid, account_search

ADD = Relation.ADD_OR_REMOVE
ORDERS = np.array([*range(2, 65), 128, 256], dtype=float)
DELTA = 10**-6.6


def test_every_row_of_the_oracle_table_is_met(oracle):
    rows = oracle("selection.csv")
    assert len(rows) == 9
    curves = {"poisson": poisson_curve, "wor": wang2019_curve, "gauss": lambda q, s, orders: gaussian_curve(s, orders)}
    for row in rows:
        rate = int(row["m"]) / int(row["n"]) if row["n"] else 1.0
        divergences = int(row["T"]) * curves[row["base"]](rate, float(row["sigma_eff"]), ORDERS)
        if row["runs_distribution"] == "poisson":
            runs = PoissonRuns(float(row["mean_runs"]))
        else:
            runs = TruncatedNegativeBinomial.with_mean(float(row["mean_runs"]), float(row["eta"]))
            assert runs.gamma == pytest.approx(float(row["gamma"]), rel=1e-11)
        delta = 10**-6.6 if row["n"] else float(row["delta"])
        bounds = epsilons(runs.charge(ORDERS, divergences), ORDERS, delta)
        assert bounds.min() == pytest.approx(float(row["epsilon_search"]), rel=5e-10), row["row_id"]
        assert ORDERS[bounds.argmin()] == float(row["best_order"]), row["row_id"]


def test_means_are_those_of_the_distributions():
    # Summed from the definition.
    for eta, gamma in [(1, 0.1), (0, 0.2), (0.5, 0.05), (-0.5, 0.3)]:
        k = np.arange(1, 2000)
        weights = np.cumprod(np.where(k == 1, 1.0, (1 - gamma) * (k - 1 + eta) / k))
        mean = float((k * weights).sum() / weights.sum())
        assert TruncatedNegativeBinomial(eta, gamma).mean == pytest.approx(mean, rel=1e-9)


def test_a_search_costs_more_than_one_run_and_less_than_releasing_all_on_average():
    ledger = Ledger().add(GaussianEvent(PoissonSampling(0.013958), 1.3958), 1500)
    one = account(ledger, delta=DELTA, relation=ADD).epsilon
    search = account_search(ledger, TruncatedNegativeBinomial.with_mean(10), delta=DELTA, relation=ADD)
    everything = account_grid(ledger, 10, delta=DELTA, relation=ADD)
    assert one < search.epsilon <= 4.348274085 * (1 + 1e-4)
    assert search.accountant == "renyi"
    assert search.epsilon < everything.epsilon
    assert everything.rounds == 15000


def test_the_more_runs_the_higher_the_price():
    ledger = Ledger().add(GaussianEvent(NoSampling(), 4.0))
    for law in (TruncatedNegativeBinomial.with_mean, PoissonRuns):
        prices = [account_search(ledger, law(mean), delta=1e-6, relation=ADD).epsilon for mean in (2.0, 5.0, 50.0)]
        assert prices == sorted(prices)


def test_a_search_among_free_runs_is_free_and_among_runs_without_noise_priceless():
    assert account_search(Ledger(), PoissonRuns(3), delta=1e-6, relation=ADD).epsilon == 0
    bare = Ledger().add(GaussianEvent(NoSampling(), 0.0))
    assert math.isinf(account_search(bare, PoissonRuns(3), delta=1e-6, relation=ADD).epsilon)


def test_pitfall_a_fixed_number_of_runs_is_not_covered():
    with pytest.raises(SettingError, match=r"runs=10 must be a distribution.*account_grid"):
        account_search(Ledger(), 10, delta=1e-6, relation=ADD)


@pytest.mark.parametrize(
    ("law", "values", "name"),
    [
        (TruncatedNegativeBinomial, (-1, 0.5), "eta=-1"),
        (TruncatedNegativeBinomial, (1, 1), "gamma=1"),
        (PoissonRuns, (0,), "mean=0"),
        (TruncatedNegativeBinomial.with_mean, (1,), "mean=1"),
    ],
)
def test_distributions_outside_their_limits_are_refused_by_name(law, values, name):
    with pytest.raises(SettingError, match=name):
        law(*values)
