"""A single round against its hockey-stick divergence in fifty digits."""

import mpmath
import pytest

from clipline.privacy.accountant import account, delta_at
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, PoissonSampling, TruncatedPoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation

ADD, REPLACE, SILENT = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT
POISSON, FIXED = PoissonSampling, lambda rate: FixedSizeSampling(round(rate * 10**9), 10**9)


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
        (FIXED, SILENT): [(sampled(2 * s), sampled(s)), (sampled(s), nobody)],
    }[make, relation]
    return max(hockey_stick(p, q, epsilon) for p, q in pairs)


@pytest.mark.parametrize(
    ("make", "relation"), [(POISSON, ADD), (POISSON, REPLACE), (FIXED, ADD), (FIXED, REPLACE), (FIXED, SILENT)]
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
