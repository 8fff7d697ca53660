"""Epsilon and delta of many rounds: against monotonicity, certified lower bounds and integrals."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lower_bounds import presence_lower_bound
from oracle_rows import spent
from scipy.special import ndtr

from clipline.privacy.accountant import account, default_relation, delta_at
from clipline.privacy.dominating_pairs import dominating_pair, renyi_curve
from clipline.privacy.events import (
    FixedSizeSampling,
    GaussianEvent,
    NoSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from clipline.privacy.ledger import Ledger
from clipline.privacy.numerics import gaussian_epsilon
from clipline.privacy.pld.compose import LOG_CONVERSION, delta_of, epsilon_of, quick_epsilon_of, total_moments
from clipline.privacy.pld.discretised import TILTS
from clipline.privacy.pld.one_round import Direction, MixturePair, PositiveLossPart
from clipline.privacy.relations import Relation
from clipline.privacy.renyi import epsilon_at

ADD, REPLACE, ZERO_OUT = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT


def test_the_quick_bound_lies_above_and_delta_undoes_epsilon():
    for sampling, relation in [(PoissonSampling(0.02), REPLACE), (FixedSizeSampling(3, 100), ZERO_OUT)]:
        for direction in dominating_pair(GaussianEvent(sampling, 1.1), relation).directions:
            rounds = ((direction, 300),)
            for delta in (1e-12, 1e-5, 0.05):
                epsilon = epsilon_of(rounds, delta)
                assert 0 < epsilon <= quick_epsilon_of(rounds, delta)
                assert delta_of(rounds, epsilon) == pytest.approx(delta, rel=1e-3)


samplings = st.one_of(
    st.just(NoSampling()),
    st.floats(1e-6, 1).map(PoissonSampling),
    st.integers(1, 10**6).map(lambda m: FixedSizeSampling(m, 10**6)),
    st.floats(1e-3, 1).map(lambda q: TruncatedPoissonSampling(q, 10**4, math.ceil(1e4 * q + 300))),
)
SLACK = 1 + 2e-5  # of the lattice of losses


@given(
    sampling=samplings,
    relation=st.sampled_from([ADD, REPLACE, ZERO_OUT]),
    z=st.floats(0.3, 50),
    rounds=st.integers(1, 10**5),
    log_delta=st.floats(-12, -1),
    more=st.floats(1.01, 3),
)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_epsilon_rises_with_rounds_and_falls_with_noise_and_delta(sampling, relation, z, rounds, log_delta, more):
    delta = 10**log_delta
    epsilon = spent(sampling, z, rounds, delta, relation)
    assert spent(sampling, z, math.ceil(rounds * more), delta, relation) * SLACK + 1e-9 >= epsilon
    assert spent(sampling, z * more, rounds, delta, relation) <= epsilon * SLACK + 1e-9
    assert spent(sampling, z, rounds, min(delta * more, 0.5), relation) <= epsilon * SLACK + 1e-9


@given(rate=st.floats(1e-6, 0.5), z=st.floats(0.3, 50), rounds=st.integers(1, 10**4), more=st.floats(1.01, 2))
@settings(derandomize=True, deadline=None, max_examples=12)  # nine accountings each
def test_epsilon_rises_with_the_rate_up_to_no_sampling_and_a_fixed_size_costs_more(rate, z, rounds, more):
    chain = [PoissonSampling(rate), PoissonSampling(rate * more), NoSampling()]
    values = [spent(sampling, z, rounds, 1e-6, ADD) for sampling in chain]
    assert values[0] <= values[1] * SLACK
    assert values[1] <= values[2] * SLACK
    fixed = FixedSizeSampling(max(1, round(rate * 10**6)), 10**6)
    for relation in (ADD, REPLACE, ZERO_OUT):
        poisson = spent(PoissonSampling(fixed.rate), z, rounds, 1e-6, relation)
        assert poisson <= spent(fixed, z, rounds, 1e-6, relation) * SLACK


@given(sampling=samplings, z=st.floats(0.4, 20), rounds=st.integers(1, 10**4), log_delta=st.floats(-10, -2))
@settings(derandomize=True, deadline=None, max_examples=30)
def test_privacy_losses_are_tighter_than_the_renyi_curve(sampling, z, rounds, log_delta):
    event, relation, delta = GaussianEvent(sampling, z), default_relation(sampling), 10**log_delta
    by_renyi, _ = epsilon_at(lambda orders: rounds * renyi_curve(event, relation, orders), delta)
    by_loss = max(epsilon_of(((way, rounds),), delta) for way in dominating_pair(event, relation).directions)
    assert by_loss <= by_renyi * (1 + 1e-4) + 1e-9


def test_the_whole_domain_gives_numbers_at_or_above_certified_lower_bounds():
    # Warnings are errors in this suite, so that this also finds every overflow. Two of five samplings and relations at
    # each point, in turn: every rate, noise and number of rounds meets all of them.
    population = 10**9
    points = itertools.product(
        [1e-9, 1e-5, 0.01, 0.5, 1.0],
        [0.2, 1.0, 30.0, 1e3],
        [(1, 1e-15), (1, 0.1), (1000, 1e-6), (10**6, 1e-15), (10**6, 0.1)],
    )
    turns = itertools.cycle([(0, 2), (1, 3), (4, 2), (0, 3), (1, 4), (2, 3), (4, 0)])
    for (rate, z, (rounds, delta)), turn in zip(points, turns, strict=False):
        fixed = FixedSizeSampling(round(rate * population), population)
        capped = TruncatedPoissonSampling(rate, population, math.ceil(rate * population + 4e4 * math.sqrt(rate)))
        cases = [
            (PoissonSampling(rate), ADD, 1),
            (PoissonSampling(rate), REPLACE, 1),
            (fixed, REPLACE, 2),
            (fixed, ZERO_OUT, 1),
            (capped, ADD, 1),
        ]
        for sampling, relation, shift in (cases[i] for i in turn):
            epsilon = spent(sampling, z, rounds, delta, relation)
            assert math.isfinite(epsilon)
            assert epsilon >= presence_lower_bound(rate, shift / z, rounds, delta) * (1 - 1e-9)


@pytest.mark.parametrize("delta", [1e-15, 1e-6, 0.1])
@pytest.mark.parametrize("counts", [(1, 0), (1000, 0), (300, 7)])
def test_gaussians_convolved_are_the_one_gaussian_that_they_are(counts, delta):
    # The lattice knows nothing of the closed form. Different rounds share one lattice and one transform.
    shifts, rounds, mu = (0.03, 0.21), [], 0.0
    for shift, count in zip(shifts, counts, strict=True):
        if count:
            whole = (PositiveLossPart(MixturePair.REMOVE, 1.0, shift),)
            rounds.append((Direction(whole, whole), count))
            mu = math.hypot(mu, shift * math.sqrt(count))
    exact = gaussian_epsilon(mu, delta)
    assert exact * (1 - 1e-9) <= epsilon_of(tuple(rounds), delta) <= exact + 3e-5


def delta_of_two_rounds(rate, shift, epsilon):
    """The first round by Gauss and Legendre, the second in closed form: E[delta_1(epsilon - L)], the worse way."""
    nodes, weights = np.polynomial.legendre.leggauss(24)
    edges = np.arange(-14, 16 + 3 * shift, 0.02)
    y = (edges[:-1, None] + 0.01 + 0.01 * nodes).ravel()
    chance = np.tile(0.01 * weights, len(edges) - 1) * np.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    loss = np.log1p(rate * np.expm1(shift * y - shift**2 / 2))

    def leave(e):
        inside = e > math.log1p(-rate)
        growth = np.expm1(np.where(inside, e, 0.0))
        threshold = np.log1p(growth / rate) / shift + shift / 2
        stick = rate * ndtr(shift - threshold) - (growth + rate) * ndtr(-threshold)
        return np.where(inside, stick, -np.expm1(e))

    def join(e):
        return -np.expm1(e) + np.exp(e) * leave(-e)

    return max(np.sum(chance * np.exp(loss) * leave(epsilon - loss)), np.sum(chance * join(epsilon + loss)))


@pytest.mark.parametrize(
    ("rate", "z", "delta"),
    [(0.013, 0.7, 1e-6), (1.2e-5, 1.479, 7.44e-11), (3e-4, 0.9, 1e-9), (0.08, 2.8, 6e-9), (1e-5, 1.0, 1e-7)],
)
def test_two_rounds_agree_with_an_integral_also_where_losses_are_rare(rate, z, delta):
    ledger = Ledger().add(GaussianEvent(PoissonSampling(rate), z), 2)
    epsilon = account(ledger, delta=delta, relation=ADD).epsilon
    assert 0.98 * delta < delta_of_two_rounds(rate, 1 / z, epsilon) <= delta
    exact = delta_of_two_rounds(rate, 1 / z, 1.5 * epsilon)
    assert exact <= delta_at(ledger, epsilon=1.5 * epsilon, relation=ADD) < 1.1 * exact


def test_the_known_run_is_no_looser_than_that_of_the_other_library():
    # Oracles E026 and E032: exact values, and those of dp_accounting 0.6.0 at its default spacing.
    for relation, exact, other in [(ADD, 2.223353466, 2.2233667), (REPLACE, 3.964853328, 3.96486213041)]:
        assert exact - 1e-9 < spent(PoissonSampling(0.013958), 1.3958, 1500, 10**-6.6, relation) < other


def gaussian_epsilon_in_60_digits(mu, delta):
    with mpmath.workdps(60):
        low, high = mpmath.mpf(0), mu**2 / 2 + 20 * mu
        for _ in range(150):
            middle = (low + high) / 2
            at = mpmath.ncdf(mu / 2 - middle / mu) - mpmath.exp(middle) * mpmath.ncdf(-mu / 2 - middle / mu)
            low, high = (middle, high) if at > delta else (low, middle)
        return float(high)


@pytest.mark.parametrize(("z", "rounds", "digits"), [(0.5, 50, 1e-5), (0.3, 300, 1e-4), (0.1, 1000, 1e-4)])
def test_an_epsilon_that_protects_nothing_is_an_upper_bound_to_four_digits(z, rounds, digits):
    # At a rate of nearly one the rounds are Gaussian, whose epsilon is known: about 159, 1,912 and 51,348.
    exact = gaussian_epsilon_in_60_digits(mpmath.sqrt(rounds) / mpmath.mpf(z), mpmath.mpf(10) ** -5)
    assert exact < spent(PoissonSampling(1 - 1e-12), z, rounds, 1e-5, ADD) < (1 + digits) * exact


def gaussian_rounds(mu, count):
    """`count` rounds of two normals at distance mu: the total loss is N(m, 2 m) with m = count mu^2 / 2."""
    part = (PositiveLossPart(MixturePair.REMOVE, 1.0, mu),)
    return ((Direction(part, part), count),)


@pytest.mark.parametrize(("mu", "count"), [(0.1, 1), (0.02, 3000), (0.5, 40)])
def test_moments_of_all_rounds_add_up_to_the_closed_form_and_never_less(mu, count):
    moments, infinity_mass = total_moments(gaussian_rounds(mu, count))
    exact = count * TILTS * (TILTS + 1) * mu**2 / 2
    useful = (TILTS + 1) * mu < 10
    assert np.all(moments[useful] >= exact[useful] * (1 - 1e-12))
    assert np.all(moments[useful] <= exact[useful] * 1.03 + 1e-10)
    assert infinity_mass < count * 1e-60


def test_the_conversion_is_that_of_canonne_kamath_and_steinke():
    # delta <= exp((a - 1) (R - epsilon)) / (a - 1) (1 - 1/a)^a, with a = tilt + 1.
    orders = TILTS + 1
    exact = -np.log(orders - 1) + orders * np.log1p(-1 / orders)
    np.testing.assert_allclose(LOG_CONVERSION, exact, rtol=1e-9, atol=1e-12)
