"""The table: its entries against explicit populations, and the Renyi curve of each."""

import itertools
import math

import mpmath
import numpy as np
import pytest

from clipline.errors import SettingError
from clipline.privacy.accountant import delta_at
from clipline.privacy.dominating_pairs import _chance_of_at_least, check_supported, dominating_pair, renyi_curve
from clipline.privacy.events import (
    FixedSizeSampling,
    GaussianEvent,
    NoSampling,
    PoissonSampling,
    TruncatedPoissonSampling,
)
from clipline.privacy.ledger import Ledger
from clipline.privacy.pld.one_round import loss_tails
from clipline.privacy.relations import Relation
from clipline.privacy.renyi import fixed_size_curve, gaussian_curve, poisson_curve, wang2019_curve

ADD, REPLACE, ZERO_OUT = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE, Relation.ZERO_OUT
ORDERS = 1 + np.logspace(-4, 6, 31)


def test_one_round_of_replacement_covers_every_two_users_on_a_line():
    # Fixed size: any three contributions in [-1, 1] of the two users and of the one whose place is taken.
    rate, z = 0.2, 1.5
    (direction,) = dominating_pair(GaussianEvent(FixedSizeSampling(2, 10), z), REPLACE).directions
    y = np.linspace(-16, 16, 32001)
    normal = lambda c: np.exp(-((y - c) ** 2) / (2 * z * z)) / (z * math.sqrt(2 * math.pi))  # noqa: E731
    for x, other, displaced in itertools.product((-1, -0.3, 0.4, 1), repeat=3):
        p, q = ((1 - rate) * normal(displaced) + rate * normal(user) for user in (x, other))
        for epsilon in (0.0, 0.1, 0.5):
            p_tail, q_tail = (t[0] for t in loss_tails(direction.positive, np.array([epsilon])))
            stick = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (y[1] - y[0])
            assert stick <= p_tail - math.exp(epsilon) * q_tail + 1e-6


def profile(direction, epsilon):
    p_tail, q_tail = (tail[0] for tail in loss_tails(direction.positive, np.array([epsilon])))
    return p_tail - math.exp(epsilon) * q_tail


def cohorts(population, draw):
    """{who takes part: chance} for users 0, 1, ..., each with the chance that `draw` gives to a set of users."""
    users = range(population)
    subsets = [set(chosen) for size in range(population + 1) for chosen in itertools.combinations(users, size)]
    return [(chosen, draw(chosen)) for chosen in subsets if draw(chosen) > 0]


def released(y, contributions, chances, z):
    """The density of the noisy sum: a mixture over cohorts, each around the sum of its contributions."""
    centres = [(sum(contributions[user] for user in chosen), chance) for chosen, chance in chances]
    density = sum(chance * np.exp(-((y - centre) ** 2) / (2 * z * z)) for centre, chance in centres)
    return density / (z * math.sqrt(2 * math.pi))


def check_charged(event, pairs, y):
    for relation, p, q in pairs:
        for epsilon in (0.0, 0.2, 1.0):
            stick = np.maximum(p - math.exp(epsilon) * q, 0).sum() * (y[1] - y[0])
            assert stick <= max(profile(way, epsilon) for way in dominating_pair(event, relation).directions) + 1e-6


@pytest.mark.parametrize("others", [(1, 1, 1), (-1, 0.5, 1), (-1, -1, -1)])
@pytest.mark.parametrize("z", [0.7, 2.0])
def test_no_explicit_population_reveals_more_than_is_charged(z, others):
    # Three others with contributions in [-1, 1] and the user, all on a line; every cohort is written out.
    rate, y = 0.3, np.linspace(-16, 16, 8001)
    chances = cohorts(4, lambda chosen: rate ** len(chosen) * (1 - rate) ** (4 - len(chosen)))
    with_user, without, replaced = (released(y, (*others, x), chances, z) for x in (1, 0, -1))
    pairs = [(ADD, with_user, without), (ADD, without, with_user), (ZERO_OUT, with_user, without)]
    check_charged(GaussianEvent(PoissonSampling(rate), z), [*pairs, (REPLACE, with_user, replaced)], y)

    # Two of four users. Silent: contributes 0 and still takes a place. One user less: two of the three others.
    four = cohorts(4, lambda chosen: (len(chosen) == 2) / 6)
    with_user, silent, replaced = (released(y, (*others, x), four, z) for x in (1, 0, -1))
    without = released(y, others, cohorts(3, lambda chosen: (len(chosen) == 2) / 3), z)
    pairs = [(ADD, with_user, without), (ZERO_OUT, with_user, silent), (REPLACE, with_user, replaced)]
    pairs += [(relation, q, p) for relation, p, q in pairs]
    check_charged(GaussianEvent(FixedSizeSampling(2, 4), z), pairs, y)


def test_a_cap_in_a_tiny_population_costs_at_least_what_two_explicit_users_reveal():
    # Two users, each drawn with probability 1/2, a cohort of one at most; the victim adds +1, the other -1, noise 0.2.
    # Nobody with 1/4; the victim alone 1/4; the other alone 1/4; both, and then one of them, 1/4. Without the victim:
    # nobody 1/2, the other 1/2. By quadrature on a fine grid: the total variation distance, delta at epsilon 0.
    y = np.linspace(-3, 3, 60_001)

    def normal(centre):
        return np.exp(-0.5 * ((y - centre) / 0.2) ** 2) / (0.2 * math.sqrt(2 * math.pi))

    with_victim = 0.25 * normal(0) + 0.375 * normal(1) + 0.375 * normal(-1)
    without = 0.5 * normal(0) + 0.5 * normal(-1)
    truth = float(np.maximum(with_victim - without, 0).sum() * (y[1] - y[0]))
    assert truth == pytest.approx(0.375, abs=0.01)
    ledger = Ledger().add(GaussianEvent(TruncatedPoissonSampling(0.5, 2, 1), 0.2))
    assert delta_at(ledger, epsilon=0.0, relation=ADD) >= truth


@pytest.mark.parametrize(("least", "trials", "rate"), [(3, 10, 0.1), (60, 500, 0.1), (1, 4, 0.5), (500, 500, 0.9)])
def test_the_chance_of_a_full_cohort_is_a_binomial_tail_and_never_less(least, trials, rate):
    with mpmath.workdps(40):
        q = mpmath.mpf(rate)
        terms = (mpmath.binomial(trials, k) * q**k * (1 - q) ** (trials - k) for k in range(least, trials + 1))
        exact = mpmath.fsum(terms)
    assert exact <= _chance_of_at_least(least, trials, rate) <= exact * (1 + 3e-9)


def test_a_cap_that_cannot_be_reached_is_poisson_sampling():
    for relation in (ADD, REPLACE, ZERO_OUT):
        capped = dominating_pair(GaussianEvent(TruncatedPoissonSampling(0.1, 50, 51), 1.3), relation)
        assert capped.directions == dominating_pair(GaussianEvent(PoissonSampling(0.1), 1.3), relation).directions


def test_a_round_without_sampling_is_two_normals_at_one_or_two_clips():
    for sampling in (NoSampling(), PoissonSampling(1.0), FixedSizeSampling(7, 7)):
        assert dominating_pair(GaussianEvent(sampling, 4.0), REPLACE).mu == 0.5
        assert dominating_pair(GaussianEvent(sampling, 4.0), ZERO_OUT).mu == 0.25
    # Who leaves a cohort of everybody is replaced by nobody; a fixed size has to fill the place, and moves by two.
    assert dominating_pair(GaussianEvent(PoissonSampling(1.0), 4.0), ADD).mu == 0.25
    assert dominating_pair(GaussianEvent(FixedSizeSampling(7, 7), 4.0), ADD).mu == 0.5
    assert dominating_pair(GaussianEvent(PoissonSampling(0.5), 4.0), ADD).mu is None


def test_symmetric_relations_have_one_direction_and_the_others_two_reverse_ones():
    symmetric = [(PoissonSampling(0.1), REPLACE), (FixedSizeSampling(1, 10), REPLACE), (NoSampling(), ADD)]
    for sampling, relation in symmetric:
        (direction,) = dominating_pair(GaussianEvent(sampling, 1.0), relation).directions
        assert direction.reverse == direction
    for sampling, relation in [
        (PoissonSampling(0.1), ADD),
        (FixedSizeSampling(1, 10), ADD),
        (FixedSizeSampling(1, 10), ZERO_OUT),
    ]:
        one, other = dominating_pair(GaussianEvent(sampling, 1.0), relation).directions
        assert one.reverse == other != one


@pytest.mark.parametrize("sampling", [NoSampling(), PoissonSampling(0.1), TruncatedPoissonSampling(0.1, 50, 9)])
def test_the_papers_convention_is_in_the_table_for_fixed_size_sampling_alone(sampling):
    with pytest.raises(SettingError, match=r"relation='paper' cannot be accounted with .*: use add-or-remove"):
        check_supported(GaussianEvent(sampling, 1.0), Relation.PAPER)
    paper = dominating_pair(GaussianEvent(FixedSizeSampling(1, 100), 2.0), Relation.PAPER)
    assert paper.directions == ()
    np.testing.assert_array_equal(paper.renyi_curve(ORDERS), wang2019_curve(0.01, 2.0, ORDERS))


def curve_of(sampling, relation, noise_multiplier=2.0):
    return renyi_curve(GaussianEvent(sampling, noise_multiplier), relation, tuple(ORDERS))


def test_closed_curves_are_those_of_the_table():
    # Replace-one has half the noise multiplier, and so has a fixed size for one user more or less.
    one, two = gaussian_curve(1.0, ORDERS), gaussian_curve(2.0, ORDERS)
    for sampling, relation, expected in [
        (NoSampling(), ADD, two),
        (NoSampling(), ZERO_OUT, two),
        (NoSampling(), REPLACE, one),
        (FixedSizeSampling(50, 50), REPLACE, one),
        (FixedSizeSampling(1, 100), REPLACE, fixed_size_curve(0.01, 1.0, ORDERS)),
        (FixedSizeSampling(1, 100), ADD, poisson_curve(0.01, 1.0, ORDERS)),
        (PoissonSampling(0.01), ADD, poisson_curve(0.01, 2.0, ORDERS)),
        (PoissonSampling(0.01), ZERO_OUT, poisson_curve(0.01, 2.0, ORDERS)),
    ]:
        np.testing.assert_array_equal(curve_of(sampling, relation), expected)
    assert np.all(np.isinf(curve_of(PoissonSampling(0.1), ADD, 0.0)))


@pytest.mark.parametrize("order", [1.3, 2.0, 4.5, 17.0])
def test_a_curve_from_the_lattice_of_losses_is_an_upper_bound_and_close(order):
    # Poisson sampling, replace-one: E over Q of (P/Q)^a, with both mixtures written out.
    rate, z = 0.02, 1.3
    with mpmath.workdps(20):
        q, a = mpmath.mpf(rate), mpmath.mpf(order)
        p, other = (lambda y, s=s: (1 - q) * mpmath.npdf(y, 0, z) + q * mpmath.npdf(y, s, z) for s in (1, -1))
        moment = mpmath.quad(lambda y: p(y) ** a * other(y) ** (1 - a), mpmath.linspace(-20, 50, 40))
        exact = float(mpmath.log(moment) / (a - 1))
    ours = renyi_curve(GaussianEvent(PoissonSampling(rate), z), Relation.REPLACE_ONE, (order,))[0]
    assert exact <= ours <= exact * (1 + 0.002 * order)


@pytest.mark.parametrize("order", [1.5, 4.0, 20.0])
def test_the_curve_of_a_cap_is_the_moment_of_the_mixture(order):
    # E exp((a - 1) L) of a mixture whose part is revealed is the weighted sum of the two moments.
    capped = renyi_curve(GaussianEvent(TruncatedPoissonSampling(0.1, 500, 60), 2.0), ADD, (order,))[0]
    tau = sum(math.comb(500, k) * 0.1**k * 0.9 ** (500 - k) for k in range(60, 501))
    parts = [(1 - tau, poisson_curve(0.1, 2.0, np.array([order]))), (tau, poisson_curve(0.1, 1.0, np.array([order])))]
    moment = sum(weight * math.exp((order - 1) * float(curve[0])) for weight, curve in parts)
    assert capped == pytest.approx(math.log(moment) / (order - 1), rel=1e-7)
