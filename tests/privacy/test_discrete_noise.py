"""Discrete Gaussian noise: exact sums over the whole numbers lie under what its event is charged."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from clipline import SettingError
from clipline.privacy.accountant import account, account_renyi, delta_at, quick_epsilon, rough_epsilon
from clipline.privacy.discrete_noise import bound_for, discrete_event, share_stddev, stddev_for, sum_of_shares_log_ratio
from clipline.privacy.events import GaussianEvent, GroupedPoissonSampling, NoSampling, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation

EPSILONS = np.concatenate([np.linspace(0, 0.1, 20, endpoint=False), np.linspace(0.1, 6, 60)])


def weights(stddev, numbers):
    return np.exp(-(numbers.astype(float) ** 2) / (2 * stddev**2))


def exact_deltas(stddev, shift, rate, *, added=False):
    """delta at each epsilon for one user who moves a sum of whole numbers by `shift`, by summing over all outcomes."""
    numbers = np.arange(-int(14 * stddev) - shift - 5, int(14 * stddev) + shift + 6)
    total = weights(stddev, np.arange(-int(40 * stddev), int(40 * stddev) + 1)).sum()
    without = weights(stddev, numbers) / total
    drawn = (1 - rate) * without + rate * weights(stddev, numbers - shift) / total
    first, second = (without, drawn) if added else (drawn, without)
    return np.array([np.maximum(first - math.exp(epsilon) * second, 0).sum() for epsilon in EPSILONS])


def normal_deltas(stddev, shift, rate, *, added=False):
    """The same for normal noise, in closed form."""
    s = stddev / shift

    def removed(epsilon):
        if math.exp(epsilon) <= 1 - rate:
            return 1 - math.exp(epsilon)
        y = s * s * math.log(1 + (math.exp(epsilon) - 1) / rate) + 0.5
        return (1 - rate) * norm.sf(y / s) + rate * norm.sf((y - 1) / s) - math.exp(epsilon) * norm.sf(y / s)

    return np.array([1 - math.exp(e) + math.exp(e) * removed(-e) if added else removed(e) for e in EPSILONS])


@pytest.mark.parametrize(("stddev", "shift"), [(2.5, 1), (4.0, 3), (8.0, 5), (8.0, 8), (40.0, 37), (405.0, 405)])
@pytest.mark.parametrize(("rate", "added"), [(1.0, False), (0.1, False), (0.1, True)])
def test_exact_sums_lie_under_normal_noise_of_a_variance_that_is_4_less(stddev, shift, rate, added):
    exact = exact_deltas(stddev, shift, rate, added=added)
    charged = normal_deltas(math.sqrt(stddev**2 - 4), shift, rate, added=added)
    seen = exact > 1e-13
    assert seen.sum() > 5
    assert (exact[seen] <= charged[seen]).all()


def test_normal_noise_of_the_same_variance_would_claim_too_little():
    exact, claimed = exact_deltas(4.0, 3, 1.0), normal_deltas(4.0, 3, 1.0)
    assert (exact / claimed)[claimed > 1e-12].max() > 1.05


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_the_accountant_reports_no_less_than_the_exact_sums(rate):
    sampling = NoSampling() if rate == 1 else PoissonSampling(rate)
    ledger = Ledger().add(discrete_event(sampling, stddev=8.0, bound=5.0, dim=1))
    relation = Relation.ADD_OR_REMOVE
    worst = np.maximum(exact_deltas(8.0, 5, rate), exact_deltas(8.0, 5, rate, added=True))
    for epsilon, exact in list(zip(EPSILONS, worst, strict=True))[::8]:
        if exact > 1e-13:
            assert delta_at(ledger, epsilon=epsilon, relation=relation) >= exact
    assert ledger.entries[0][0].noise_multiplier == pytest.approx(math.sqrt(60) / 5, rel=1e-12)  # sqrt(64 - 4)


def test_two_rounds_of_exact_sums_lie_under_two_charged_rounds():
    stddev, shift = 10.0, 8
    numbers = np.arange(-140, 149)
    p, q = (weights(stddev, numbers - by) / weights(stddev, np.arange(-400, 401)).sum() for by in (shift, 0))
    pp, qq = np.outer(p, p), np.outer(q, q)
    ledger = Ledger().add(discrete_event(NoSampling(), stddev=stddev, bound=float(shift), dim=1), 2)
    for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0):
        exact = np.maximum(pp - math.exp(epsilon) * qq, 0).sum()
        assert exact <= delta_at(ledger, epsilon=epsilon, relation=Relation.ZERO_OUT) <= exact * 1.5


@pytest.mark.parametrize(("shares", "stddev"), [(10, 0.7), (10, 1.0), (100, 1.0), (100, 1.3)])
def test_a_sum_of_shares_is_as_near_to_a_discrete_gaussian_as_the_bound_says(shares, stddev):
    one = weights(stddev, np.arange(-int(60 * stddev), int(60 * stddev) + 1))
    total = np.array([1.0])
    for _ in range(shares):
        total = np.convolve(total, one / one.sum())
    wide = math.sqrt(shares) * stddev
    near = np.arange(-int(3 * wide), int(3 * wide) + 1)
    single = weights(wide, near) / weights(wide, np.arange(-int(40 * wide), int(40 * wide) + 1)).sum()
    off = np.abs(np.log(total[len(total) // 2 + near] / single)).max()
    bound = sum_of_shares_log_ratio(wide, shares)
    assert off <= bound
    assert off > 1e-9 * bound  # there is something to bound


def test_the_log_ratio_of_many_shares_counts_each_term_or_more():
    exact = 10 * math.fsum(math.exp(-2 * math.pi**2 * 0.49 * k / (k + 1)) for k in range(1, 5000))
    assert exact <= sum_of_shares_log_ratio(0.7 * math.sqrt(5000), 5000) <= 1.2 * exact
    assert sum_of_shares_log_ratio(3.0, 1) == 0


def test_what_a_large_federation_adds_to_epsilon_cannot_be_seen():
    event = discrete_event(PoissonSampling(0.01), stddev=2.5 * 31, bound=40.0, dim=10_000_000, shares=961)
    assert 0 < event.log_ratio * 10_000 < 1e-14  # ten thousand rounds of ten million numbers


@pytest.mark.parametrize("bound_of", [account, account_renyi, quick_epsilon, rough_epsilon])
@pytest.mark.parametrize("sampling", [NoSampling(), PoissonSampling(0.1)])
def test_a_log_ratio_is_added_to_epsilon_twice_and_taken_off_delta(bound_of, sampling):
    def epsilon(ledger, delta):
        found = bound_of(ledger, delta=delta, relation=Relation.ZERO_OUT)
        return getattr(found, "epsilon", found)

    plain, off = (Ledger().add(GaussianEvent(sampling, 1.0, log_ratio=ratio), 10) for ratio in (0.0, 0.01))
    expected = epsilon(plain, 1e-5 * math.exp(-0.1)) + 0.2  # ten rounds, both neighbours
    assert epsilon(off, 1e-5) == pytest.approx(expected, rel=1e-12)
    delta = delta_at(off, epsilon=3.0, relation=Relation.ZERO_OUT)
    plain_delta = delta_at(plain, epsilon=2.8, relation=Relation.ZERO_OUT)
    assert delta == pytest.approx(plain_delta * math.exp(0.1), rel=1e-12)
    assert delta_at(off, epsilon=0.0, relation=Relation.ZERO_OUT) > delta_at(
        plain, epsilon=0.0, relation=Relation.ZERO_OUT
    )


def test_a_log_ratio_is_kept_in_a_ledger_file():
    event = discrete_event(PoissonSampling(0.1), stddev=9.0, bound=4.0, dim=100, shares=5)
    assert GaussianEvent.from_json(event.to_json()) == event
    assert "log_ratio" not in GaussianEvent(PoissonSampling(0.1), 1.0).to_json()
    with pytest.raises(SettingError, match="log_ratio"):
        GaussianEvent.from_json({**event.to_json(), "log_ratio": -1.0})
    with pytest.raises(SettingError, match="banded"):
        GaussianEvent(GroupedPoissonSampling(0.1, 4), 1.0, log_ratio=1e-30)


def test_deviation_and_bound_are_inverse_and_err_towards_noise():
    for multiplier, bound in ((0.3, 50.0), (1.0, 64_860.0), (7.0, 3.0)):
        stddev = stddev_for(multiplier, bound)
        assert stddev == pytest.approx(math.sqrt((multiplier * bound) ** 2 + 4), rel=1e-12)
        assert discrete_event(NoSampling(), stddev=stddev, bound=bound, dim=9).noise_multiplier >= multiplier
        largest = bound_for(multiplier, stddev)
        assert largest == pytest.approx(bound, rel=1e-12)
        assert discrete_event(NoSampling(), stddev=stddev, bound=largest, dim=9).noise_multiplier >= multiplier


def test_shares_of_the_least_number_of_survivors_make_the_whole_noise():
    assert share_stddev(100.0, 25) == pytest.approx(20.0, rel=1e-12)
    assert share_stddev(100.0, 25) * math.sqrt(25) >= 100.0
    assert share_stddev(2.5, 1) >= 2.5
    with pytest.raises(SettingError, match=r"stddev of a share='2.4'.*more bits"):
        share_stddev(24.0, 100)
    with pytest.raises(SettingError, match="stddev of a share"):
        discrete_event(NoSampling(), stddev=24.0, bound=1.0, dim=1, shares=100)
    for none in (0, -1):  # noise that nobody adds
        with pytest.raises(SettingError, match="least number of honest clients"):
            discrete_event(NoSampling(), stddev=24.0, bound=1.0, dim=1, shares=none)
    with pytest.raises(SettingError, match="stddev of discrete noise"):
        discrete_event(NoSampling(), stddev=2.4, bound=1.0, dim=1)
