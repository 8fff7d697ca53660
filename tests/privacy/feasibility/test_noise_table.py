"""The table of noise: the exact noise, a little above, for every cohort and number of rounds."""

import json

import pytest

from clipline import SettingError
from clipline.privacy import NoiseTable, plan, plan_table
from clipline.privacy.feasibility.noise_table import NoiseCell, usual_cohorts


@pytest.fixture(scope="module")
def table():
    return plan_table(population_size=20_000, epsilon=3.0, rounds=300, parameters=400_000)


def test_a_cell_has_the_least_noise_or_a_little_more():
    # oracle C01: z = 0.894905730 for epsilon 5 at 13,958 of a million users, 1500 rounds
    (cell,) = plan_table(population_size=10**6, cohort_size=13_958, rounds=1500, epsilon=5.0).cells
    assert 0.894905 <= cell.noise_multiplier <= 0.894906 * 1.002


def test_rows_are_round_numbers_of_users_up_to_half_of_them():
    assert usual_cohorts(20_000) == (200, 500, 1000, 2000, 5000, 10_000)
    assert usual_cohorts(10**9) == (200, 500, 1000, 2000, 5000, 10_000)
    assert usual_cohorts(500) == (5, 10, 20, 50, 100, 200)
    assert usual_cohorts(3) == usual_cohorts(1) == (1,)


def test_more_users_a_round_hide_more_on_the_mean_and_more_rounds_less():
    table = plan_table(population_size=20_000, epsilon=3.0)
    noise = {(cell.cohort_size, cell.rounds): cell.delta_noise_multiplier / cell.cohort_size for cell in table.cells}
    assert len(noise) == 24
    for cohort, larger in zip(table.cohorts, table.cohorts[1:], strict=False):
        assert all(noise[larger, rounds] < noise[cohort, rounds] for rounds in table.rounds)
    for rounds, longer in zip(table.rounds, table.rounds[1:], strict=False):
        assert all(noise[cohort, longer] > noise[cohort, rounds] for cohort in table.cohorts)
    assert (table.best.cohort_size, table.best.rounds) == (10_000, 100)


def test_what_a_cell_bears_is_hand_arithmetic():
    cell = NoiseCell(cohort_size=200, rounds=100, noise_multiplier=0.49, delta_noise_multiplier=0.5)
    assert cell.most_parameters == 160_000  # (200 / 0.5)^2
    assert cell.noise_norm(40_000) == pytest.approx(0.5)


def test_the_least_feasible_cohort_agrees_with_a_plan_of_its_own(table):
    assert isinstance(table, NoiseTable)
    found = table.least_feasible(300).cohort_size
    before = table.cohorts[table.cohorts.index(found) - 1]
    norms = [
        plan(population_size=20_000, epsilon=3.0, rounds=300, cohort_size=cohort, parameters=400_000).noise_norm
        for cohort in (found, before)
    ]
    assert norms[0] <= 1.0 < norms[1]
    assert table.remedies is None


def test_a_table_without_hope_has_remedies_and_is_json():
    table = plan_table(population_size=2000, epsilon=1.0, rounds=300, cohort_size=200, parameters=10**6)
    assert table.least_feasible(300) is None
    answer = json.loads(json.dumps(table.to_json(), allow_nan=False))
    assert answer["table"][0]["verdict"] == "hopeless"
    assert answer["remedies"]["parameters"] == pytest.approx(answer["table"][0]["most_parameters"], abs=1)
    assert answer["remedies"]["population_size"] > 2000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": 0.0}, "epsilon=0.0"),
        ({"cohort_size": 30_000}, "cohort_size=30000 must be at most the population"),
        ({"rounds": 0}, "rounds=0"),
        ({"count_stddev": -1.0}, "count_stddev=-1.0"),
        ({"parameters": 0}, "parameters=0"),
        ({"relation": "paper"}, "fixed-size"),
    ],
)
def test_a_table_that_cannot_be_is_refused(changes, words):
    with pytest.raises(SettingError, match=words):
        plan_table(**{"population_size": 20_000, "epsilon": 3.0, **changes})
