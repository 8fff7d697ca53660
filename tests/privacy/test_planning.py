import json
import math

import pytest

from clipline import SettingError, plan
from clipline.privacy.guarantee import LargeDeltaWarning


def test_the_missing_noise_is_found_on_the_private_side():
    # oracle C01: z = 0.894905730 for epsilon 5 at 13,958 of a million users, 1500 rounds
    found = plan(population_size=10**6, cohort_size=13_958, rounds=1500, epsilon=5.0)
    assert found.found == "noise_multiplier"
    assert found.noise_multiplier == pytest.approx(0.894905730, rel=1e-4)
    assert found.noise_multiplier >= 0.894905
    assert found.guarantee.epsilon <= 5.0
    assert found.guarantee.delta == pytest.approx(10**-6.6)


def test_the_missing_epsilon_is_found():
    # oracle E026: 2.223353466
    found = plan(population_size=10**6, cohort_size=13_958, rounds=1500, noise_multiplier=1.3958)
    assert (found.found, found.guarantee.accountant) == ("epsilon", "privacy loss")
    assert found.guarantee.epsilon == pytest.approx(2.223353466, abs=1e-4)
    assert found.renyi_epsilon == pytest.approx(2.392492, abs=2e-3)  # E012, on whole orders


@pytest.mark.parametrize(("name", "given"), [("rounds", {"cohort_size": 200}), ("cohort_size", {"rounds": 100})])
def test_the_missing_rounds_and_cohort_are_the_most_that_fit(name, given):
    given = {"population_size": 40_000, "noise_multiplier": 0.8, **given}
    found = getattr(plan(epsilon=2.0, **given), name)
    epsilons = [plan(**given, **{name: number}).guarantee.epsilon for number in (found, found + 1)]
    assert epsilons[0] <= 2.0 < epsilons[1]


@pytest.mark.parametrize(
    ("sampling", "relation", "cohort"),
    [("fixed", "paper", 513), ("fixed", "replace-one", 1009), ("poisson", None, 461)],
)
def test_the_papers_third_step_scales_cohort_and_noise_together(sampling, relation, cohort):
    # Table 1's EMNIST-CR row, and its honest counterparts
    found = plan(
        population_size=10**6, rounds=1500, epsilon=5.0, scale=(100, 0.1), sampling=sampling, relation=relation
    )
    assert (found.found, found.cohort_size) == ("scale", cohort)
    assert found.noise_multiplier == pytest.approx(cohort / 1000)
    assert found.guarantee.sound is (relation != "paper")


def test_a_scale_beyond_the_population_names_what_is_feasible():
    with pytest.raises(SettingError) as error:
        plan(population_size=3000, rounds=100, epsilon=1.0, scale=(100, 0.05))
    words = str(error.value)
    assert "scale='m=100,z=0.05' must reach epsilon=1.0 with the 3000 users there are" in words
    feasible = plan(population_size=3000, cohort_size=3000, rounds=100, noise_multiplier=1.5)
    assert f"take epsilon {feasible.guarantee.epsilon_text}" in words


def test_counting_costs_what_theorem_1_says():
    found = plan(population_size=10_000, cohort_size=100, rounds=10, noise_multiplier=1.0)
    assert found.count_stddev == 5.0
    assert float(found.delta_noise_multiplier) == pytest.approx(1.00503781525921, rel=1e-12)
    assert "(+0.5%)" in str(found)
    crowded = plan(population_size=10_000, cohort_size=10, rounds=10, noise_multiplier=2.0, count_stddev=0.5)
    assert crowded.delta_noise_multiplier is None
    assert "not possible with 0.5 users of noise on the count: it needs more than 1" in str(crowded)


def test_the_comparison_covers_every_sound_pair_and_agrees_with_the_answer():
    found = plan(population_size=10_000, cohort_size=100, rounds=300, noise_multiplier=2.0)
    table = {(sampling, str(relation)): epsilon for sampling, relation, epsilon in found.comparison}
    relations = ("add-or-remove", "replace-one", "zero-out")
    assert set(table) == {(sampling, relation) for sampling in ("poisson", "fixed") for relation in relations}
    assert table["poisson", "add-or-remove"] == found.guarantee.epsilon
    for relation in relations:
        assert table["fixed", relation] > table["poisson", relation]
    assert table["poisson", "zero-out"] == table["poisson", "add-or-remove"]  # one entry of the table
    # To the last digit the row that is asked for in another way.
    for sampling, relation in [("fixed", None), ("poisson", "replace-one"), ("fixed", "zero-out")]:
        asked = {"sampling": sampling, "relation": relation}
        other = plan(population_size=10_000, cohort_size=100, rounds=300, noise_multiplier=2.0, **asked)
        assert other.guarantee.epsilon == table[sampling, relation or "replace-one"]


def test_the_curve_bounds_every_number_of_rounds_and_closely():
    found = plan(population_size=40_000, cohort_size=300, rounds=800, noise_multiplier=0.9)
    assert found.curve[-1] == (800, found.guarantee.epsilon)
    assert sorted(epsilon for _, epsilon in found.curve) == [epsilon for _, epsilon in found.curve]
    for rounds, epsilon in found.curve:
        exact = plan(population_size=40_000, cohort_size=300, rounds=rounds, noise_multiplier=0.9).guarantee.epsilon
        assert exact <= epsilon <= exact * (1 + 2e-3)


def test_without_noise_nothing_is_promised():
    found = plan(population_size=1000, cohort_size=10, rounds=5, noise_multiplier=0.0)
    assert not found.guarantee.private
    assert "not private" in str(found)
    assert found.to_json()["epsilon"] is None
    json.dumps(found.to_json(), allow_nan=False)


ASKED = {"population_size": 100, "cohort_size": 5, "rounds": 5, "epsilon": 1.0}
NONE = dict.fromkeys(("cohort_size", "rounds", "epsilon"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (NONE, "exactly one must be left out, and now epsilon, noise_multiplier, cohort_size, rounds are: give three"),
        ({"noise_multiplier": 1.0}, "and now none is: drop the one"),
        ({"cohort_size": 500}, "cohort_size=500 must be at most the population, 100"),
        ({"population_size": 1, "cohort_size": 1}, "population_size=1"),
        ({"rounds": 0}, "rounds=0"),
        ({"epsilon": -1.0}, "epsilon=-1.0"),
        ({"delta": 2.0}, "delta=2.0"),
        ({"sampling": "shuffle"}, "sampling='shuffle'"),
        ({"relation": "replace"}, "did you mean 'replace-one'"),
        ({"relation": "paper"}, "fixed-size"),
        ({**NONE, "rounds": 5, "scale": (10, 0.1)}, "give those two and no others"),
        ({"cohort_size": None, "noise_multiplier": 0.2, "epsilon": 0.001}, "enough for a cohort of one user"),
        ({"rounds": None, "noise_multiplier": 0.2, "epsilon": 0.001}, "enough for one round"),
    ],
)
def test_a_question_without_an_answer_is_refused(changes, words):
    with pytest.raises(SettingError) as error:
        plan(**{**ASKED, **changes})
    assert words in str(error.value)


def test_a_small_cohort_gets_the_noise_on_its_count_that_costs_least():
    """By hand: z (z + sqrt(z^2 + 32 m^2)) / 8 at z = 2, m = 10 is 14.6510, and its root 3.82766."""
    found = plan(population_size=10_000, cohort_size=10, rounds=10, noise_multiplier=2.0)
    assert found.count_stddev == pytest.approx(3.82766, abs=1e-5)
    assert float(found.delta_noise_multiplier) == pytest.approx(2 / math.sqrt(1 - 4 / (4 * 14.6510)), rel=1e-5)
    assert "the count 3.828 users of noise (the paper's 0.5: not possible)" in str(found)


def test_a_large_delta_is_warned_of_and_a_meaningless_one_refused():
    with pytest.warns(
        LargeDeltaWarning, match=r"delta=0.01 is above 1 / \(number of users\) = 0.002: .*leave delta out"
    ):
        plan(population_size=500, cohort_size=10, rounds=10, noise_multiplier=2.0, delta=0.01)
    with pytest.raises(SettingError, match=r"delta=0.5 must be a finite number above 0 and at most 0.1"):
        plan(population_size=500, cohort_size=10, rounds=10, noise_multiplier=2.0, delta=0.5)
