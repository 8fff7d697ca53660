from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from scipy.stats import binom

from clipline import SettingError
from clipline.federated.sampling import FixedSizeSampler, PoissonSampler, sampler_named
from clipline.privacy.events import FixedSizeSampling, PoissonSampling
from clipline.random.streams import Streams

BOTH = [FixedSizeSampler, PoissonSampler]


def by_key(seed):
    """Cohorts by a cryptographic generator, as in runs without a seed."""
    return Streams(2**200 + seed)


both_sources = pytest.mark.parametrize("source", [Streams, by_key])


@both_sources
@pytest.mark.parametrize("kind", BOTH)
def test_a_cohort_is_of_distinct_users_of_the_population_in_order(kind, source):
    for seed in range(50):
        users = kind(30, 10).draw(source(seed).sampling(0)).users
        assert len(set(users.tolist())) == len(users)
        assert users.size == 0 or (users.min() >= 0 and users.max() < 30)
        assert (np.diff(users) > 0).all()


@both_sources
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("population", "cohort"), [(20, 5), (20, 17), (20_000, 100), (1000, 1000)])
def test_every_user_is_equally_likely(kind, population, cohort, source):
    draws = 2000 if population < 100 else 200
    counts = np.zeros(population)
    streams = source(3)
    for t in range(draws):
        np.add.at(counts, kind(population, cohort).draw(streams.sampling(t)).users, 1)
    rate = cohort / population
    # Pearson's statistic over users has mean (population - 1) and deviation sqrt(2 population): 5 deviations
    # either way happen by chance less than once in a million runs.
    if rate < 1:
        statistic = ((counts - draws * rate) ** 2 / (draws * rate * (1 - rate))).sum()
        assert abs(statistic - population) < 5 * np.sqrt(2 * population) + 5
    else:
        assert (counts == draws).all()


@both_sources
def test_fixed_size_is_exact_and_poisson_is_binomial(source):
    streams = source(11)
    fixed = [len(FixedSizeSampler(5000, 50).draw(streams.sampling(t)).users) for t in range(50)]
    assert set(fixed) == {50}
    sizes = np.array([len(PoissonSampler(5000, 50).draw(streams.sampling(t)).users) for t in range(4000)])
    # Binomial(5000, 0.01): mean 50, variance 49.5. Five standard errors each: fails by chance once in a million.
    assert sizes.mean() == pytest.approx(50, abs=5 * np.sqrt(49.5 / 4000))
    assert sizes.var() == pytest.approx(49.5, rel=5 * np.sqrt(2 / 4000))


@pytest.mark.parametrize("users", [25, 99, 400])
def test_at_a_declared_rate_each_user_at_hand_has_the_same_coin(users):
    """100 declared, 30 of them a round: everybody by a coin of 0.3, however many there are."""
    sampler, streams, draws = PoissonSampler(100, 30, users), Streams(7), 4000
    assert sampler.sampling == PoissonSampling(0.3)
    taken = np.zeros((draws, users), bool)
    for t in range(draws):
        taken[t, sampler.draw(streams.sampling(t)).users] = True
    sizes = taken.sum(axis=1)
    mean, variance = 0.3 * users, 0.3 * 0.7 * users  # of a binomial number
    # Five standard errors each, and Pearson's statistic over users: fails by chance once in a million.
    assert sizes.mean() == pytest.approx(mean, abs=5 * np.sqrt(variance / draws))
    assert sizes.var() == pytest.approx(variance, rel=5 * np.sqrt(2 / draws))
    statistic = ((taken.sum(axis=0) - draws * 0.3) ** 2 / (draws * 0.3 * 0.7)).sum()
    assert abs(statistic - users) < 5 * np.sqrt(2 * users) + 5
    together = (taken[:, 0] & taken[:, -1]).mean()
    assert together == pytest.approx(0.09, abs=5 * np.sqrt(0.09 * 0.91 / draws))


@both_sources
@pytest.mark.parametrize("size", [2, 4])  # of 6; of more than half, those who stay out are drawn
def test_every_set_of_users_is_equally_likely_at_a_fixed_size(size, source):
    streams, draws = source(6), 3000
    found = Counter(tuple(FixedSizeSampler(6, size).draw(streams.sampling(t)).users.tolist()) for t in range(draws))
    assert found.keys() == {*combinations(range(6), size)}
    # Chi-squared of 14 degrees of freedom: above 56 less than once in a million.
    assert sum((count - draws / 15) ** 2 / (draws / 15) for count in found.values()) < 56


@both_sources
@pytest.mark.parametrize("rate", [0.05, 0.5, 0.95])
def test_a_poisson_cohort_is_a_coin_for_each_user(rate, source):
    """All 16 cohorts of four users, against the product of four coins."""
    streams, draws, sampler = source(8), 3000, PoissonSampler(1000, int(1000 * rate), 4)
    found = Counter(tuple(sampler.draw(streams.sampling(t)).users.tolist()) for t in range(draws))
    for size in range(5):
        for cohort in combinations(range(4), size):
            chance = rate**size * (1 - rate) ** (4 - size)
            low, high = binom.ppf([1e-8, 1 - 1e-8], draws, chance)  # 96 of them: once in 500,000 runs
            assert low <= found[cohort] <= high


def test_a_seed_draws_what_numpy_draws():
    fixed, poisson = (kind(5000, 50).draw(Streams(9).sampling(4)).users for kind in BOTH)
    rng = Streams(9).sampling(4)
    assert fixed.tolist() == sorted(rng.choice(5000, 50, replace=False, shuffle=False).tolist())
    rng = Streams(9).sampling(4)
    assert poisson.tolist() == sorted(rng.choice(5000, rng.binomial(5000, 0.01), replace=False, shuffle=False).tolist())


@pytest.mark.parametrize("kind", BOTH)
def test_a_key_draws_the_same_again_and_another_key_others(kind):
    first, again, other = (kind(5000, 50).draw(by_key(number).sampling(4)).users.tolist() for number in (1, 1, 2))
    assert first == again
    assert len({*first} & {*other}) < 10  # half a user is expected in both


@both_sources
@pytest.mark.parametrize("kind", BOTH)
def test_rounds_are_drawn_independently_from_the_whole_population(kind, source):
    sampler, streams = kind(100, 50), source(0)
    cohorts = [set(sampler.draw(streams.sampling(t)).users.tolist()) for t in range(400)]
    overlap = [len(a & b) for a, b in pairwise(cohorts)]
    # half of one cohort is in the next: a cycle through the population would give 0, repetition 50
    assert np.mean(overlap) == pytest.approx(25, abs=1.5)


def test_each_sampler_emits_its_own_event():
    assert PoissonSampler(200, 20).sampling == PoissonSampling(0.1)
    assert FixedSizeSampler(200, 20).sampling == FixedSizeSampling(20, 200)
    rng = np.random.default_rng(0)
    for sampler in (PoissonSampler(200, 20), FixedSizeSampler(200, 20)):
        assert sampler.draw(rng).sampling == sampler.sampling


@both_sources
@pytest.mark.parametrize("kind", BOTH)
def test_a_draw_from_ten_million_users_touches_no_array_of_that_size(kind, source):
    import tracemalloc

    sampler, rng = kind(10_000_000, 1000), source(0).sampling(0)
    tracemalloc.start()
    sampler.draw(rng)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000  # ten million users would take 80 MB as a list, 10 MB as a mask


def test_what_a_cohort_shows_of_itself_is_public():
    cohort = PoissonSampler(50, 10).draw(np.random.default_rng(0))
    assert repr(cohort) == "Cohort(Poisson sampling at rate 0.2)"


@pytest.mark.parametrize(
    ("population", "cohort", "words"),
    [
        (10, 11, "cohort_size=11 must be at most the population, 10 users: lower the cohort"),
        (10, 0, "cohort_size=0 must be a whole number at least 1"),
        (10, 2.5, "cohort_size=2.5 must be a whole number"),
    ],
)
@pytest.mark.parametrize("kind", BOTH)
def test_impossible_cohorts_are_refused(kind, population, cohort, words):
    with pytest.raises(SettingError) as error:
        kind(population, cohort)
    assert words in str(error.value)


def test_samplers_by_name():
    assert sampler_named("fixed", 10, 2) == FixedSizeSampler(10, 2)
    assert sampler_named("poisson", 10, 2) == PoissonSampler(10, 2)
    assert sampler_named("poisson", 10, 2, population_size=40) == PoissonSampler(40, 2, users=10)
    with pytest.raises(SettingError, match="did you mean 'poisson'"):
        sampler_named("poison", 10, 2)
