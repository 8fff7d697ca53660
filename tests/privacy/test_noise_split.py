"""Theorem 1 against the paper's numbers, the oracle table and high-precision arithmetic."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipline.errors import SettingError
from clipline.privacy.noise_split import DeltaNoise, counting_cost, default_count_stddev, join_noise, split_noise
from clipline.privacy.renyi import gaussian_curve

PAPER = [
    (1.0, 5.0), (0.01, 5.0), (0.1, 5.0), (1.3958, 697.9), (0.6693, 111.55), (0.513, 25.65), (0.01, 697.9), (3.0, 1.51),
]  # fmt: skip


def test_pitfall_uncentred_bit_needs_its_own_formula():
    # A bit that is not centred moves the count by 1, not by 1/2; the centred formula would add too little noise.
    uncentred = split_noise(1.0, 5.0, bit_bound=1.0)
    assert float(uncentred) == pytest.approx(1.02062, abs=1e-5)
    assert uncentred > split_noise(1.0, 5.0)
    assert join_noise(split_noise(1.0, 5.0), 5.0, bit_bound=1.0) < 1.0


def test_the_oracle_table_of_theorem_1_is_met(oracle):
    rows = oracle("joint_noise.csv")
    assert len(rows) == 16
    for row in rows:
        z, stddev, bound = float(row["z"]), float(row["sigma_b"]), float(row["bit_bound"])
        if row["z_delta"]:
            z_delta = float(split_noise(z, stddev, bit_bound=bound))
            assert z_delta == pytest.approx(float(row["z_delta"]), rel=2e-14)
        else:
            with pytest.raises(SettingError):
                split_noise(z, stddev, bit_bound=bound)


@pytest.mark.parametrize(("z", "stddev"), PAPER)
@pytest.mark.parametrize("bound", [0.5, 1.0])
def test_both_directions_are_exact_to_the_last_digits(z, stddev, bound):
    with mpmath.workdps(60):
        exact_z, bit = mpmath.mpf(z), mpmath.mpf(stddev) / mpmath.mpf(bound)
        if exact_z < bit:
            exact = 1 / mpmath.sqrt(exact_z**-2 - bit**-2)
            ours = float(split_noise(z, stddev, bit_bound=bound))
            assert abs(ours / exact - 1) < 1e-15 * max(1, 1 / (1 - exact_z / bit))
        exact = 1 / mpmath.sqrt(exact_z**-2 + bit**-2)
        assert abs(join_noise(DeltaNoise(z), stddev, bit_bound=bound) / exact - 1) < 1e-15


@given(z=st.floats(1e-6, 1e3), share=st.floats(1e-6, 0.999), bound=st.sampled_from([0.5, 1.0]))
@settings(derandomize=True, deadline=None, max_examples=100)
def test_joining_undoes_splitting(z, share, bound):
    stddev = z * bound / share
    assert join_noise(split_noise(z, stddev, bit_bound=bound), stddev, bit_bound=bound) == pytest.approx(z, rel=1e-12)


@pytest.mark.parametrize(("z", "stddev"), PAPER)
def test_the_two_releases_together_cost_what_one_gaussian_costs(z, stddev):
    orders = 1 + np.logspace(-4, 6, 40)
    update, bit = gaussian_curve(float(split_noise(z, stddev)), orders), gaussian_curve(2 * stddev, orders)
    np.testing.assert_allclose(update + bit, orders / (2 * z * z), rtol=1e-12)


def test_a_part_without_noise_leaves_no_privacy_and_without_a_bit_all_noise_goes_to_the_updates():
    assert split_noise(0, 0) == split_noise(0.0, 5.0) == split_noise(0, math.inf) == DeltaNoise(0)
    assert join_noise(DeltaNoise(0), 5.0) == join_noise(DeltaNoise(1.0), 0) == join_noise(DeltaNoise(0), 0) == 0
    assert float(split_noise(1.3, math.inf)) == join_noise(DeltaNoise(1.3), math.inf) == 1.3
    assert default_count_stddev(100, 0.0) == counting_cost(0.0, 0.0) == 0.0


@pytest.mark.parametrize(
    ("z", "stddev", "bound", "limit"), [(2.0, 1.5, 1.0, "1.5"), (10.0, 5.0, 0.5, "10"), (1.0, 0.0, 0.5, "0")]
)
def test_a_bit_that_reveals_too_much_is_refused_with_a_way_out(z, stddev, bound, limit):
    message = (
        f"noise_multiplier={z}.*below count_stddev / bit_bound = {limit}: raise count_stddev or cohort_size, or lower"
    )
    with pytest.raises(SettingError, match=message):
        split_noise(z, stddev, bit_bound=bound)


@pytest.mark.parametrize("bad", [{"noise_multiplier": -1}, {"count_stddev": -1}, {"bit_bound": 0}, {"bit_bound": 2}])
def test_settings_outside_their_limits_are_refused_by_name(bad):
    (name,) = bad
    with pytest.raises(SettingError, match=f"{name}="):
        split_noise(**{"noise_multiplier": 1.0, "count_stddev": 5.0, **bad})


def test_a_bare_number_is_not_taken_for_the_noise_of_the_updates():
    with pytest.raises(SettingError, match=r"delta_noise=1.0 must be a DeltaNoise: wrap"):
        join_noise(1.0, 5.0)


@pytest.mark.parametrize(("z", "count_stddev"), [pair for pair in PAPER if pair[1] >= 5])
def test_the_papers_experiments_keep_the_papers_noise_on_the_count(z, count_stddev):
    assert default_count_stddev(round(20 * count_stddev), z) == count_stddev


@pytest.mark.parametrize("cohort_size", [1, 2, 10, 100, 10_000])
@pytest.mark.parametrize("z", [1e-3, 0.5, 1.039, 6.4, 50.0, 1e4])
def test_the_default_fits_every_cohort_and_every_noise(cohort_size, z):
    count_stddev = default_count_stddev(cohort_size, z)
    assert count_stddev >= cohort_size / 20
    assert float(split_noise(z, count_stddev)) > z  # exists
    if z <= cohort_size / 5:
        assert counting_cost(z, count_stddev) < 0.035


def rms_clip(count_stddev, cohort_size, rounds, runs):
    """Root mean square of the clip about its median as Algorithm 1 moves it, for log-normal norms of spread e."""
    rng = np.random.default_rng(0)
    log_clip, squares = np.zeros(runs), []
    for _ in range(rounds):
        within = np.array([math.erfc(-x / math.sqrt(2)) / 2 for x in log_clip])  # no sampling error: the noise alone
        log_clip -= 0.2 * (within + rng.normal(0, count_stddev / cohort_size, runs) - 0.5)
        squares.append(np.exp(2 * log_clip).mean())
    return math.sqrt(np.mean(squares[rounds // 5 :]))


def test_the_default_is_near_the_least_total_noise_of_a_simulated_clip():
    """At 500 users, 100 a round, 1500 rounds, epsilon 4: z = 6.393. An independent method: the clip is simulated."""
    z, cohort_size = 6.393, 100

    def total(count_stddev):
        return float(split_noise(z, count_stddev)) / z * rms_clip(count_stddev, cohort_size, rounds=600, runs=100)

    default = default_count_stddev(cohort_size, z)
    totals = {stddev: total(stddev) for stddev in (5.0, 10.0, default, 40.0)}
    assert totals[default] == min(totals.values())
    assert totals[5.0] == pytest.approx(1.30, abs=0.02)  # the paper's m/20
    assert totals[default] == pytest.approx(1.023, abs=0.006)
