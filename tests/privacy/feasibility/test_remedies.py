"""Each remedy is checked by planning anew with it: the noise is calibrated there, not epsilon."""

import pytest

from clipline.privacy import plan, split_noise
from clipline.privacy.feasibility.remedies import adapters_within, whole_round_noise
from clipline.privacy.noise_split import default_count_stddev

ASKED = {"population_size": 20_000, "cohort_size": 500, "rounds": 100, "epsilon": 3.0, "parameters": 1_200_000}


@pytest.fixture(scope="module")
def planned():
    return plan(**ASKED)


def norm(**changes):
    return plan(**{**ASKED, **changes}).noise_norm


def test_a_larger_cohort_is_the_least_that_helps(planned):
    assert planned.noise_norm > 1.5
    found = planned.remedies.cohort_size
    assert norm(cohort_size=found) <= 1.0 < norm(cohort_size=found * 99 // 100)


def test_more_users_are_the_least_that_help_with_their_own_delta(planned):
    users, cohort = planned.remedies.users
    assert cohort / users == pytest.approx(500 / 20_000, rel=1e-3)
    assert norm(population_size=users, cohort_size=cohort) <= 1.0
    assert norm(population_size=users * 99 // 100, cohort_size=cohort * 99 // 100) > 1.0


def test_fewer_parameters_are_the_most_that_train(planned):
    found = planned.remedies.parameters
    assert found == pytest.approx(1_200_000 / planned.noise_norm**2, abs=1.5)
    assert norm(parameters=found) <= 1.0 < norm(parameters=found + 2)


def test_a_weaker_promise_is_the_strongest_that_helps(planned):
    found = planned.remedies.epsilon
    assert norm(epsilon=found) <= 1.0 < norm(epsilon=0.99 * found)


def test_where_nothing_but_users_or_a_smaller_model_helps_it_is_said():
    few = plan(population_size=300, cohort_size=100, rounds=300, epsilon=2.0, parameters=10**6)
    assert few.remedies.cohort_size is None
    assert few.remedies.users[0] > 300
    assert norm(population_size=300, cohort_size=300, rounds=300, epsilon=2.0, parameters=10**6) > 1.0


def test_what_trains_needs_no_remedy():
    assert plan(**{**ASKED, "parameters": 1000}).remedies is None
    assert plan(**{**ASKED, "epsilon": None, "noise_multiplier": 0.0}).remedies is None


def test_adapters_have_the_largest_rank_that_fits():
    shapes = [(100, 50), (50, 20), (20,), (8, 3, 5, 5)]
    assert adapters_within(shapes, 220 * 3 + 219).rank == 3  # a rank trains 150 + 70 numbers
    assert adapters_within(shapes, 220 * 3).parameters == 660
    assert adapters_within(shapes, 219) is None
    assert adapters_within(shapes, 10**9).rank == 10  # 20 columns: a higher rank would train as much as the matrix
    assert adapters_within([(20,)], 10**9) is None


@pytest.mark.parametrize("count_stddev", [None, 7.0])
@pytest.mark.parametrize("noise", [0.3, 4.0])
def test_the_noise_of_the_round_is_the_inverse_of_the_split(noise, count_stddev):
    z = whole_round_noise(noise, 100, count_stddev)
    stddev = default_count_stddev(100, z) if count_stddev is None else count_stddev
    assert float(split_noise(z, stddev)) == pytest.approx(noise, rel=1e-9)
