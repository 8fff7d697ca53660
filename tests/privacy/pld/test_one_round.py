"""One round: closed forms against their definition, and epsilon and delta against fifty digits."""

import math

import mpmath
import numpy as np
import pytest
from scipy.special import ndtr

from clipline.privacy.accountant import account, delta_at
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, PoissonSampling, TruncatedPoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.pld.one_round import (
    Direction,
    MixturePair,
    PositiveLossPart,
    _log_odds_below,
    loss_range,
    loss_tails,
)
from clipline.privacy.relations import Relation

ADD, REPLACE, ZERO_OUT = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT
POISSON, FIXED = PoissonSampling, lambda rate: FixedSizeSampling(round(rate * 10**9), 10**9)

# places of the two normals, in units of the shift, of (P, Q)
PLACES = {
    MixturePair.REMOVE: (1, 0),
    MixturePair.ADD: (0, 1),
    MixturePair.REPLACE: (1, -1),
    MixturePair.ZERO_OUT: (2, 1),
}


@pytest.mark.parametrize("pair", list(MixturePair))
@pytest.mark.parametrize(("rate", "shift"), [(0.013, 0.7), (0.5, 2.0), (1e-6, 4.0), (0.97, 0.1)])
def test_hockey_sticks_are_those_of_the_two_mixtures(pair, rate, shift):
    # H = P(L > l) - e^l Q(L > l), against the integral of max(p - e^l q, 0) by the trapezoid rule.
    y = np.linspace(-12, 12 + 2 * shift, 400_001)
    p, q = (
        ((1 - rate) * np.exp(-(y**2) / 2) + rate * np.exp(-((y - place * shift) ** 2) / 2)) / math.sqrt(2 * math.pi)
        for place in PLACES[pair]
    )
    for loss in (1e-4, 0.01, 0.3):
        p_tail, q_tail = (float(x[0]) for x in loss_tails((PositiveLossPart(pair, rate, shift),), np.array([loss])))
        stick = np.maximum(p - math.exp(loss) * q, 0).sum() * (y[1] - y[0])
        assert p_tail - math.exp(loss) * q_tail == pytest.approx(stick, rel=1e-6, abs=1e-14)


def one_part(pair, rate, shift, weight=1.0):
    return (PositiveLossPart(pair, rate, shift, weight),)


def test_the_tails_of_a_mixture_are_the_weighted_sum_of_its_parts():
    losses = np.array([0.0, 0.3, 2.0])
    parts = [one_part(MixturePair.REMOVE, 0.1, 1.0, 0.75), one_part(MixturePair.REPLACE, 0.2, 0.5, 0.25)]
    mixed = loss_tails((*parts[0], *parts[1]), losses)
    for index in (0, 1):
        apart = 0.75 * loss_tails(one_part(MixturePair.REMOVE, 0.1, 1.0), losses)[index]
        apart = apart + 0.25 * loss_tails(one_part(MixturePair.REPLACE, 0.2, 0.5), losses)[index]
        np.testing.assert_allclose(mixed[index], apart, rtol=1e-15)


@pytest.mark.parametrize("rate", [1e-12, 1e-9, 1e-6, 0.001, 0.3, 0.9, 1 - 1e-6])
def test_the_log_odds_of_adding_keep_their_digits_up_to_the_greatest_loss(rate):
    shares = (1e-6, 0.1, 0.4, 0.6, 0.9, 0.99)
    losses = np.array([-math.log1p(-rate) * share for share in shares])
    with mpmath.workdps(50):
        exact = [float(mpmath.log(1 + mpmath.expm1(-mpmath.mpf(float(loss))) / mpmath.mpf(rate))) for loss in losses]
    assert _log_odds_below(losses, rate) == pytest.approx(exact, rel=1e-14, abs=1e-13)
    assert _log_odds_below(np.array([-2 * math.log1p(-rate)]), rate)[0] == -math.inf


def gaussian(mu):
    """Two unit normals at distance mu: the loss is N(mu^2 / 2, mu^2) under P, in both directions."""
    part = one_part(MixturePair.REMOVE, 1.0, mu)
    return Direction(part, part)


@pytest.mark.parametrize("mu", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("mass", [1e-3, 1e-12, 1e-60])
def test_the_range_of_losses_leaves_out_no_more_than_it_may_and_is_not_much_too_wide(mu, mass):
    # Chances of a normal loss, by SciPy. The table of losses is 5 percent apart, hence the 6 percent.
    positive, negative = loss_range(gaussian(mu), mass, mass)
    above, below = ndtr(-(positive - mu**2 / 2) / mu), ndtr((-negative - mu**2 / 2) / mu)
    assert above <= mass
    assert below <= mass
    assert ndtr(-(positive / 1.06 - mu**2 / 2) / mu) > mass
    if negative > 1e-14:  # the least loss in the table is 1e-15: nothing is negative to speak of where mu is 30
        assert ndtr((-negative / 1.06 - mu**2 / 2) / mu) > mass


def hockey_stick(p, q, epsilon):
    """The integral of max(p - e^epsilon q, 0) for two mixtures {mean: weight} of unit normals that cross once."""
    growth = mpmath.exp(mpmath.mpf(epsilon))

    def difference(y):  # over the density at zero
        return sum(w * mpmath.exp(m * y - m * m / 2) for m, w in p.items()) - growth * sum(
            w * mpmath.exp(m * y - m * m / 2) for m, w in q.items()
        )

    low, high = mpmath.mpf(-2000), mpmath.mpf(2000)
    above = difference(high) > 0
    if (difference(low) > 0) == above:
        return mpmath.mpf(0)
    for _ in range(220):
        middle = (low + high) / 2
        low, high = (low, middle) if (difference(middle) > 0) == above else (middle, high)
    side = 1 if above else -1

    def beyond(mixture):
        return sum(w * mpmath.erfc(side * (low - m) / mpmath.sqrt(2)) / 2 for m, w in mixture.items())

    return beyond(p) - growth * beyond(q)


def exact_delta(make, relation, rate, z, epsilon):
    rate, s = mpmath.mpf(rate), 1 / mpmath.mpf(z)

    def sampled(place):
        return {mpmath.mpf(0): 1 - rate, place: rate}

    nobody = {mpmath.mpf(0): mpmath.mpf(1)}
    pairs = {
        (POISSON, ADD): [(sampled(s), nobody), (nobody, sampled(s))],
        (POISSON, REPLACE): [(sampled(s), sampled(-s))],
        (FIXED, ADD): [(sampled(2 * s), nobody), (nobody, sampled(2 * s))],
        (FIXED, REPLACE): [(sampled(2 * s), nobody)],
        (FIXED, ZERO_OUT): [(sampled(2 * s), sampled(s)), (sampled(s), nobody)],
    }[make, relation]
    return max(hockey_stick(p, q, epsilon) for p, q in pairs)


@pytest.mark.parametrize(
    ("make", "relation"), [(POISSON, ADD), (POISSON, REPLACE), (FIXED, ADD), (FIXED, REPLACE), (FIXED, ZERO_OUT)]
)
@pytest.mark.parametrize(
    ("rate", "z", "delta"),
    [(1e-9, 0.3, 1e-14), (1e-7, 2.0, 1e-12), (1e-3, 1.0, 1e-8), (0.3, 0.7, 1e-5), (0.9, 3, 0.01)],
)
def test_epsilon_and_delta_of_one_round_are_exact_and_rounded_up(make, relation, rate, z, delta):
    with mpmath.workdps(50):
        ledger = Ledger().add(GaussianEvent(make(rate), z))
        epsilon = account(ledger, delta=delta, relation=relation).epsilon
        assert exact_delta(make, relation, rate, z, epsilon) <= delta
        if epsilon > 0:
            assert exact_delta(make, relation, rate, z, epsilon * (1 - 1e-5)) > delta
        exact = exact_delta(make, relation, rate, z, epsilon)
        assert exact <= delta_at(ledger, epsilon=epsilon, relation=relation) <= min(float(exact) * (1 + 1e-5), 1)


def test_a_round_that_nearly_always_reveals_nothing_costs_next_to_nothing():
    # 7.86e-8 from fifty digits; a lattice made for sums of losses says 0.05.
    ledger = Ledger().add(GaussianEvent(PoissonSampling(1e-9), 1.0))
    with mpmath.workdps(50):
        assert exact_delta(POISSON, ADD, 1e-9, 1.0, 7.861e-8) > 1e-14 > exact_delta(POISSON, ADD, 1e-9, 1.0, 7.862e-8)
    assert account(ledger, delta=1e-14, relation=ADD).epsilon == pytest.approx(7.8612e-8, rel=1e-3)


def test_a_delta_that_allows_it_gives_zero():
    # The total variation of a round is at most its rate.
    assert account(Ledger().add(GaussianEvent(PoissonSampling(1e-4), 1.0)), delta=1e-4, relation=ADD).epsilon == 0


def test_a_capped_round_lies_between_its_two_parts():
    deltas = [
        delta_at(Ledger().add(GaussianEvent(sampling, 1.0)), epsilon=0.5, relation=ADD)
        for sampling in (PoissonSampling(0.01), TruncatedPoissonSampling(0.01, 1000, 15), FixedSizeSampling(10, 1000))
    ]
    assert deltas == sorted(deltas)
    assert deltas[0] < deltas[2]
