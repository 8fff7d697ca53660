import numpy as np
import pytest
from scipy.stats import norm

from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, NoSampling, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.trade_off import trade_off


def curve_of(sampling, z, rounds):
    ledger = Ledger().add(GaussianEvent(sampling, z), rounds)
    promise = account(ledger, delta=1e-5, relation="add-or-remove")
    return trade_off(ledger, epsilon=promise.epsilon, relation=promise.relation)


def test_without_sampling_it_is_the_gaussian_curve():
    curve = curve_of(NoSampling(), 3.0, 4)  # four Gaussians at distance 1/3 are one at distance 2/3
    assert curve.mu == pytest.approx(2 / 3, abs=3e-5)
    assert 0 <= curve.regret < 1e-5
    for rate in (0.001, 0.01, 0.1, 0.5):
        assert curve.true_positives(rate) == pytest.approx(norm.cdf(2 / 3 - norm.isf(rate)), rel=1e-4)


def test_mu_and_regret_of_dp_sgd_are_those_of_gdpnum():
    curve = curve_of(PoissonSampling(0.328), 9.4, 2000)  # CIFAR-10 of De et al. 2022; gdpnum rounds losses to 1e-4
    assert curve.mu == pytest.approx(1.5685622, abs=2e-4)
    assert curve.regret == pytest.approx(0.0010208, abs=1e-5)


def test_one_sampled_round_by_hand():
    q, z = 0.01, 1.0
    curve = curve_of(PoissonSampling(q), z, 1)
    advantage = q * (2 * norm.cdf(1 / (2 * z)) - 1)  # total variation of the mixture
    half = norm.sf(1 / (2 * z))  # who accuses above the middle of the two means accuses so many by mistake
    assert advantage <= curve.true_positives(half) - half < 1.02 * advantage
    rates = np.geomspace(1e-10, 0.4, 30)  # by hand: the likelihood ratio grows with the release x, so thresholds on x
    found = (1 - q) * rates + q * norm.sf(norm.isf(rates) - 1 / z)
    assert all(curve.true_positives(rate) >= exact for rate, exact in zip(rates, found, strict=True))
    assert all(norm.cdf(curve.mu - norm.isf(rates)) >= found)  # the Gaussian of mu is easier to attack
    mu = norm.isf(1e-10) - norm.isf((1 - q) * 1e-10 + q * norm.sf(norm.isf(1e-10) - 1 / z))  # 0.256: rarest errors bind
    assert curve.mu == pytest.approx(mu, rel=2e-4)
    # Far from Gaussian: the curves are farthest apart where both errors are alike, and the regret is in both errors.
    assert curve.regret == pytest.approx((2 * norm.cdf(mu / 2) - 1 - advantage) / 2, rel=2e-4)
