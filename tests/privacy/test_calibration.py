"""The searches end on the private side, and next to the boundary."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_rows import delta_of_row, spent

from clipline.errors import SettingError
from clipline.privacy.accountant import default_relation
from clipline.privacy.calibration import (
    cohort_within,
    least_scale,
    noise_multiplier_for,
    rough_noise_multiplier_for,
    rounds_within,
)
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, NoSampling, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation
from clipline.privacy.renyi import epsilons, poisson_curve, wang2019_curve

DELTA = 10**-6.6
ADD, REPLACE = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE
POISSON, FIXED = PoissonSampling(0.013958), FixedSizeSampling(13958, 10**6)


def test_the_noise_for_an_epsilon_is_the_exact_one_of_the_oracle_table_and_never_less(oracle):
    rows = [row for row in oracle("calibration.csv") if row["method"].startswith("pld")]
    assert len(rows) == 6
    for row in rows:
        rounds, delta, epsilon = int(row["T"]), delta_of_row(row), float(row["target_epsilon"])
        relation = {"add_remove": ADD, "replace_one": REPLACE}[row["relation"]]
        fixed = FixedSizeSampling(int(row["m"]), int(row["n"])) if row["n"] else None
        sampling = fixed if row["sampler"] == "wor" else PoissonSampling(fixed.rate if fixed else float(row["q"]))
        z = noise_multiplier_for(sampling=sampling, rounds=rounds, epsilon=epsilon, delta=delta, relation=relation)
        exact = float(row["z"])
        assert exact * (1 - 1e-9) <= z <= exact * (1 + 3e-5), row["row_id"]
        assert epsilon - 1e-4 <= spent(sampling, z, rounds, delta, relation) <= epsilon, row["row_id"]


def test_the_renyi_rows_of_the_calibration_table_are_met(oracle):
    # Whole orders 2 to 64, 128, 256; fixed size by Theorem 27 at half the noise.
    orders = np.array([*range(2, 65), 128, 256], dtype=float)
    rows = [row for row in oracle("calibration.csv") if row["method"].startswith("rdp")]
    assert len(rows) == 2
    for row in rows:
        curve, half = (wang2019_curve, 2) if row["sampler"] == "wor" else (poisson_curve, 1)
        rate, rounds, target = float(row["q"]), int(row["T"]), float(row["target_epsilon"])
        below, above = (
            epsilons(rounds * curve(rate, noise / half, orders), orders, delta_of_row(row)).min()
            for noise in (float(row["z"]) * (1 - 1e-8), float(row["z"]) * (1 + 1e-8))
        )
        assert above <= target + 1e-8, row["row_id"]
        assert below >= target - 1e-8, row["row_id"]


# Table 1 of the paper: z at a cohort of 100, rounds, and the least cohort printed there; then what it must be for
# Poisson sampling with add-or-remove and with replace-one, and for fixed-size sampling with replace-one.
TABLE1 = [
    (0.03, 4000, 2231, 1924, 1982, 5067),
    (0.1, 1500, 513, 461, 462, 1009),
    (0.03, 3000, 2197, 1884, 1927, 4734),
    (0.1, 1200, 510, 458, 458, 998),
    (0.01, 1500, 13958, 7032, 7980, 38468),
]


@pytest.mark.parametrize(("z", "rounds", "printed", "poisson", "exchanged", "fixed"), TABLE1)
def test_table_1_of_the_paper_is_met_to_the_last_user_and_corrected(z, rounds, printed, poisson, exchanged, fixed):
    kinds = [("fixed", Relation.PAPER), ("poisson", ADD), ("poisson", REPLACE), ("fixed", REPLACE)]
    for (sampling, relation), cohort in zip(kinds, (printed, poisson, exchanged, fixed), strict=True):
        plan = {"population_size": 10**6, "sampling": sampling, "relation": relation, "rounds": rounds, "delta": DELTA}
        assert least_scale(cohort_size=100, noise_multiplier=z, epsilon=5, **plan) == cohort


def test_a_scale_beyond_the_population_is_refused_with_a_way_out():
    plan = {"population_size": 1000, "sampling": "poisson", "relation": ADD, "rounds": 100, "delta": 1e-4}
    with pytest.raises(SettingError, match=r"epsilon=1 .*needs a cohort above the 1000 users.*cohort_size=10: raise"):
        least_scale(cohort_size=10, noise_multiplier=0.001, epsilon=1, **plan)


def test_one_user_more_in_the_cohort_would_be_one_too_many():
    plan = {"population_size": 5000, "sampling": "fixed", "rounds": 100, "delta": 1e-5, "relation": REPLACE}
    cohort = cohort_within(noise_multiplier=3.0, epsilon=2, **plan)
    values = [spent(FixedSizeSampling(m, 5000), 3.0, 100, 1e-5, REPLACE) for m in (cohort, cohort + 1)]
    assert values[0] <= 2 < values[1]
    assert cohort_within(noise_multiplier=1000.0, epsilon=2, **plan) == 5000
    assert cohort_within(noise_multiplier=0.1, epsilon=1e-6, **plan) == 0


def test_pitfall_calibration_lands_on_the_private_side():
    for sampling in (NoSampling(), POISSON, FIXED):
        relation = default_relation(sampling)
        for epsilon in (0.1, 1, 8):
            z = noise_multiplier_for(sampling=sampling, rounds=300, epsilon=epsilon, delta=1e-6, relation=relation)
            assert spent(sampling, z, 300, 1e-6, relation) <= epsilon
            assert spent(sampling, z * (1 - 1e-4), 300, 1e-6, relation) > epsilon


@given(rate=st.floats(1e-5, 1), rounds=st.integers(1, 10**5), epsilon=st.floats(0.05, 20), log_delta=st.floats(-10, -2))
@settings(derandomize=True, deadline=None, max_examples=8)
def test_the_answer_is_always_verified_by_the_accountant(rate, rounds, epsilon, log_delta):
    sampling, delta = PoissonSampling(rate), 10**log_delta
    z = noise_multiplier_for(sampling=sampling, rounds=rounds, epsilon=epsilon, delta=delta, relation=ADD)
    assert spent(sampling, z, rounds, delta, ADD) <= epsilon


def test_four_times_the_rounds_or_replace_one_need_twice_the_noise_without_sampling():
    # The cost of T Gaussians depends on T / z^2 alone.
    one, *others = (
        noise_multiplier_for(sampling=NoSampling(), rounds=rounds, epsilon=2, delta=1e-5, relation=relation)
        for rounds, relation in ((50, ADD), (200, ADD), (50, REPLACE))
    )
    assert others == pytest.approx([2 * one, 2 * one], rel=3e-5)


def test_a_target_that_protects_nobody_still_gets_some_noise():
    z = noise_multiplier_for(sampling=NoSampling(), rounds=1, epsilon=1e5, delta=1e-5, relation=ADD)
    assert z == 0.05


def test_an_impossible_target_is_refused_with_a_way_out():
    with pytest.raises(
        SettingError, match=r"epsilon=1e-12 at delta=1e-15 cannot .* 7 rounds .*rate 0.5.*: raise epsilon"
    ):
        noise_multiplier_for(sampling=PoissonSampling(0.5), rounds=7, epsilon=1e-12, delta=1e-15, relation=ADD)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"rounds": 1.5}, {"epsilon": 0}, {"epsilon": math.inf}, {"delta": 1}])
def test_settings_outside_their_limits_are_refused_by_name(bad):
    (name,) = bad
    good = {"sampling": POISSON, "rounds": 10, "epsilon": 1.0, "delta": 1e-5, "relation": ADD}
    with pytest.raises(SettingError, match=f"{name}="):
        noise_multiplier_for(**{**good, **bad})


@pytest.mark.parametrize(("sampling", "z"), [(POISSON, 1.3958), (FIXED, 1.3958), (NoSampling(), 40.0)])
def test_one_more_round_would_be_one_too_many(sampling, z):
    relation = default_relation(sampling)
    rounds = rounds_within(GaussianEvent(sampling, z), epsilon=5, delta=DELTA, relation=relation)
    assert rounds > 0
    assert spent(sampling, z, rounds, DELTA, relation) <= 5 < spent(sampling, z, rounds + 1, DELTA, relation)


def test_the_known_run_fits_exactly_its_own_epsilon():
    event = GaussianEvent(POISSON, 1.3958)
    # 2.22335347 is exact for 1500 rounds (oracle E026), and one round more costs 0.0008.
    assert rounds_within(event, epsilon=2.2234, delta=DELTA, relation=ADD) == 1500
    assert rounds_within(event, epsilon=2.2234, delta=DELTA, relation=ADD, at_most=700) == 700
    spent_before = Ledger().add(event, 1400)
    assert rounds_within(event, epsilon=2.2234, delta=DELTA, relation=ADD, after=spent_before) == 100


def test_no_round_fits_a_target_that_one_round_exceeds():
    assert rounds_within(GaussianEvent(NoSampling(), 0.5), epsilon=1, delta=1e-6, relation=ADD) == 0
    assert rounds_within(GaussianEvent(POISSON, 0.0), epsilon=100, delta=1e-6, relation=ADD) == 0


def test_rounds_that_cost_next_to_nothing_stop_at_a_trillion():
    event = GaussianEvent(PoissonSampling(1e-9), 1e6)
    assert rounds_within(event, epsilon=1, delta=1e-6, relation=ADD) == 10**12


@pytest.mark.parametrize(("rate", "rounds", "epsilon"), [(0.01, 100, 3.0), (0.3, 1000, 1.0), (0.0005, 3000, 8.0)])
def test_the_rough_noise_errs_on_the_private_side_and_little(rate, rounds, epsilon):
    asked = {"rounds": rounds, "epsilon": epsilon, "delta": 1e-6, "relation": Relation.ADD_OR_REMOVE}
    exact = noise_multiplier_for(sampling=PoissonSampling(rate), **asked)
    assert exact <= rough_noise_multiplier_for(sampling=PoissonSampling(rate), **asked) <= 1.002 * exact
