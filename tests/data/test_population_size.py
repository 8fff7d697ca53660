"""The number of users: declared beforehand, or read from the data and then public."""

import math

import numpy as np
import pytest
import torch
from samples import LOCAL, cross_entropy, flat_training, linear_model, small_population, without
from scipy.stats import binom, norm

from clipline import FixedClip, Population, Relation, SettingError
from clipline.privacy.accountant import account
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, PoissonSampling
from clipline.privacy.ledger import Ledger


def training(users=60, **changes):
    settings = {"rounds": 2, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5, **changes}
    population = users if isinstance(users, Population) else small_population(users)
    return flat_training(linear_model(dtype=torch.float32), cross_entropy, population, **settings)


def test_rate_and_delta_follow_from_the_declared_number():
    declared = training(60, population_size=100)
    assert declared.algorithm.event == GaussianEvent(PoissonSampling(0.2), 0.5)  # 20 of 100
    assert declared.delta == pytest.approx(10**-2.2)  # 100^-1.1
    assert declared.relation is Relation.ADD_OR_REMOVE
    assert "add-or-remove one user, Poisson sampling" in str(declared.planned)
    assert training(60, population_size=100, delta=1e-6).delta == 1e-6


def test_without_a_declaration_the_number_of_users_at_hand_is_public_and_the_guarantee_says_so():
    counted = training(50)
    assert counted.algorithm.event == GaussianEvent(PoissonSampling(0.4), 0.5)  # 20 of 50
    assert counted.delta == pytest.approx(50**-1.1)
    assert counted.relation is Relation.ZERO_OUT
    assert "zero-out one user (the number of users is public), Poisson sampling" in str(counted.planned)
    assert counted.planned.epsilon == training(50, population_size=50).planned.epsilon  # the same entry of the table


def test_neighbours_of_a_declared_training_are_sampled_and_accounted_alike():
    population = small_population(60)
    whole = training(population, population_size=60)
    for neighbour in (without(population, 7), small_population(61)):
        other = training(neighbour, population_size=60)
        assert other.algorithm.event == whole.algorithm.event
        assert other.algorithm.sampler.sampling == whole.algorithm.sampler.sampling == PoissonSampling(1 / 3)
        assert (other.delta, other.relation, other.planned) == (whole.delta, whole.relation, whole.planned)
        assert other.algorithm.mechanism == whole.algorithm.mechanism
        # which is not so where the number is counted
        assert training(neighbour).algorithm.event != training(population).algorithm.event


def test_a_cohort_of_all_declared_users_is_right_for_the_neighbour_too():
    population = small_population(30)
    for neighbour in (population, without(population, 3)):
        sampler = training(neighbour, population_size=30, cohort_size=30).algorithm.sampler
        assert sampler.sampling == PoissonSampling(1.0)
        assert sampler.draw(np.random.default_rng(0)).users.tolist() == list(range(len(neighbour)))


@pytest.mark.parametrize("changes", [{}, {"engine": "stacked"}, {"engine": "one-by-one"}, {"workers": 2}])
@pytest.mark.filterwarnings("ignore::clipline.federated.sampling.DeclaredUsersWarning")
def test_more_or_fewer_users_than_declared_train_and_the_divisor_is_the_declared_cohort(changes):
    def moved(users, **sizes):
        quiet = {"noise_multiplier": 0.0, "clip": FixedClip(1e9), "rounds": 1, "count_stddev": 0.0, **changes}
        return training(small_population(users), **quiet, **sizes).run().state.params

    everybody = moved(60, cohort_size=60)  # the sum over 60 users, by 60
    assert everybody.norm() > 0
    torch.testing.assert_close(moved(60, cohort_size=20, population_size=20), 3 * everybody)
    torch.testing.assert_close(moved(60, cohort_size=240, population_size=240), everybody / 4)


def mixture_delta(epsilon, first, second, noise):
    """The least delta of two mixtures of normals at `epsilon`, the worse of both ways: by sums over a fine grid."""
    grid = np.linspace(-60, 160, 44_001)
    densities = [sum(w * norm.pdf(grid, c, noise) for c, w in law.items() if w > 1e-30) for law in (first, second)]
    return max(
        float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (grid[1] - grid[0]))
        for p, q in (densities, densities[::-1])
    )


def law_of_sum(others, rate, victim=None, value=1):
    """Where the sum lies, in clips, if each of `others` adds `value`, and the victim as given, each by a coin."""
    law = {}
    for count, chance in enumerate(binom.pmf(np.arange(others + 1), others, rate)):
        for added, share in [(0, 1.0)] if victim is None else [(0, 1 - rate), (victim, rate)]:
            place = value * count + added
            law[place] = law.get(place, 0.0) + chance * share
    return law


def test_a_rate_that_moves_with_the_number_of_users_breaks_add_or_remove():
    """100 users, an expected cohort of 95, noise multiplier 3, one round; the others add +C u, the victim -C u."""
    promised = account(
        Ledger().add(GaussianEvent(PoissonSampling(0.95), 3.0)), delta=1e-5, relation=Relation.ADD_OR_REMOVE
    ).epsilon
    assert promised == pytest.approx(1.2304, abs=1e-4)
    joins = mixture_delta(promised, law_of_sum(100, 95 / 101, victim=-1), law_of_sum(100, 95 / 100), 3.0)
    leaves = mixture_delta(promised, law_of_sum(99, 95 / 100, victim=-1), law_of_sum(99, 95 / 99), 3.0)
    assert (joins, leaves) == (pytest.approx(3.7e-3, rel=0.01), pytest.approx(5.4e-3, rel=0.01))  # 1e-5 was promised
    at_one_rate = mixture_delta(promised, law_of_sum(99, 95 / 100, victim=-1), law_of_sum(99, 95 / 100), 3.0)
    assert at_one_rate < 1e-5


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize("victim", [-1, 1])
def test_at_a_declared_rate_explicit_neighbours_stay_within_the_promise(value, victim):
    population = small_population(100)
    sizes = {"cohort_size": 95, "noise_multiplier": 3.0, "rounds": 1, "delta": 1e-5, "population_size": 100}
    whole, neighbour = (training(p, **sizes) for p in (population, without(population, 5)))
    rates = [one.algorithm.sampler.sampling.rate for one in (whole, neighbour)]
    first = law_of_sum(99, rates[0], victim=victim, value=value)
    reached = mixture_delta(whole.planned.epsilon, first, law_of_sum(99, rates[1], value=value), 3.0)
    assert reached <= 1e-5 * (1 + 1e-5)  # the grid's own error
    if value == 0:  # nobody else adds anything: the pair of the table itself, which the promise meets
        assert reached == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "relation"),
    [
        ({"population_size": 60}, "add-or-remove"),
        ({"population_size": 60, "relation": "add-or-remove"}, "add-or-remove"),
        ({"population_size": 60, "relation": "replace-one"}, "replace-one"),
        ({"population_size": 60, "relation": "zero-out"}, "zero-out"),
        ({}, "zero-out"),
        ({"relation": "replace-one"}, "replace-one"),
        ({"sampling": "fixed"}, "replace-one"),
        ({"sampling": "fixed", "relation": Relation.ZERO_OUT}, "zero-out"),
    ],
)
def test_the_relation_is_one_that_is_true(changes, relation):
    made = training(60, **changes)
    assert (made.relation, made.planned.relation) == (relation, relation)


def test_a_fixed_size_cohort_is_of_the_users_at_hand():
    assert training(50, sampling="fixed").algorithm.sampler.sampling == FixedSizeSampling(20, 50)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"relation": "add-or-remove"}, "must be zero-out or replace-one where the number of users is read from the d"),
        ({"relation": "add-or-remove", "sampling": "fixed"}, "must be replace-one or zero-out where sampling='fixed'"),
        ({"population_size": 60, "sampling": "fixed"}, "population_size=60 must be left out where sampling='fixed'"),
        ({"population_size": 19}, "cohort_size=20 must be at most the population, 19 users: lower the cohort or decla"),
        ({"population_size": 0}, "population_size=0 must be a whole number at least 1"),
        ({"population_size": 60, "relation": "paper"}, "relation='paper' must be one that a guarantee can be given"),
    ],
)
def test_what_would_not_be_true_is_refused(changes, words):
    with pytest.raises(SettingError) as error:
        training(60, **changes)
    assert words in str(error.value)
