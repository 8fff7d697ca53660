"""Coefficients of banded noise against those of jax_privacy (shared/NOISE.md), and the choice of the bands."""

import numpy as np
import pytest

from clipline.errors import SettingError
from clipline.privacy.banded_noise import (
    band_coefficients,
    check_bands,
    choose_bands,
    inverse_coefficients,
    lasting_share,
    model_noise,
)
from clipline.privacy.calibration import noise_multiplier_for
from clipline.privacy.events import sampling_named
from clipline.privacy.relations import Relation


def matrix(rounds, bands):
    """C itself, entry by entry."""
    coefficients = band_coefficients(rounds, bands)
    lag = np.arange(rounds)[:, None] - np.arange(rounds)
    return np.where((lag >= 0) & (lag < bands), np.array(coefficients)[np.clip(lag, 0, bands - 1)], 0.0)


@pytest.mark.parametrize(
    ("rounds", "bands", "rms", "last", "first"),
    [
        (150, 4, 4.683941, 6.441394, [0.661902, 0.488911, 0.427632, 0.374143]),
        (150, 12, 3.244970, 4.244105, [0.610996, 0.363584, 0.301325, 0.268818, 0.247134]),
        (150, 16, 3.023061, 3.884519, []),
        (1000, 32, 4.910722, 6.525263, []),
    ],
)
def test_coefficients_and_errors_are_those_of_another_library(rounds, bands, rms, last, first):
    coefficients = band_coefficients(rounds, bands)
    assert len(coefficients) == bands
    assert np.dot(coefficients, coefficients) == pytest.approx(1, abs=1e-14)
    np.testing.assert_allclose(coefficients[: len(first)], first, atol=5e-7)
    assert model_noise(rounds, bands) == pytest.approx(rms, abs=5e-7)
    sums = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(rounds, bands))  # noise of each model
    variances = (sums**2).sum(axis=1)
    assert np.sqrt(variances.mean()) == pytest.approx(rms, abs=5e-7)
    assert np.sqrt(variances[-1]) == pytest.approx(last, abs=5e-7)


def test_the_inverse_is_that_of_the_matrix():
    np.testing.assert_allclose(inverse_coefficients(30, 7), np.linalg.inv(matrix(30, 7))[:, 0], atol=1e-13)


def test_one_band_is_independent_noise():
    assert band_coefficients(20, 1) == (1.0,)
    assert inverse_coefficients(20, 1).tolist() == [1.0] + 19 * [0.0]
    assert model_noise(20, 1) ** 2 == pytest.approx(np.arange(1, 21).mean())
    assert lasting_share(20, 1) == 1.0


def test_no_coefficients_nearby_leave_less_noise():
    rng, best = np.random.default_rng(0), model_noise(60, 5)
    for _ in range(50):
        other = np.array(band_coefficients(60, 5)) + 1e-3 * rng.standard_normal(5)
        other /= np.linalg.norm(other)
        c = sum(np.diag(np.full(60 - lag, value), -lag) for lag, value in enumerate(other))
        sums = np.tril(np.ones((60, 60))) @ np.linalg.inv(c)
        assert np.sqrt((sums**2).sum(axis=1).mean()) > best


# shared/NOISE.md: EMNIST of 10,000 users; gains of T = 500 at n 20,000 and m 300, and nothing at n 1,000 and m 100.
@pytest.mark.parametrize(
    ("users", "cohort", "rounds", "epsilon", "bands"),
    [
        (10_000, 150, 150, 1.0, 4),
        (10_000, 150, 150, 2.0, 6),
        (10_000, 150, 150, 4.0, 12),
        (10_000, 150, 150, 8.0, 32),
        (1000, 100, 3000, 1.0, 1),
    ],
)
def test_the_planner_chooses_the_bands_of_least_noise(users, cohort, rounds, epsilon, bands):
    terms = {"epsilon": epsilon, "delta": users**-1.1, "relation": Relation.ADD_OR_REMOVE}
    assert choose_bands(cohort_size=cohort, population_size=users, rounds=rounds, **terms) == bands


@pytest.mark.parametrize(
    ("users", "cohort", "rounds", "epsilon"),
    [(20_000, 10_000, 100, 3.0), (20_000, 5000, 300, 3.0), (81_448, 340, 12, 0.5), (51_830, 286, 232, 1.4)],
)
def test_no_other_number_of_bands_has_much_less_noise_by_the_exact_accountant(users, cohort, rounds, epsilon):
    """The quick bound, by which bands are compared, is further off for independent noise of large cohorts."""
    terms = {"rounds": rounds, "epsilon": epsilon, "delta": users**-1.1, "relation": Relation.ADD_OR_REMOVE}

    def noise(bands):
        sampling = sampling_named("poisson", cohort, users, bands)
        return noise_multiplier_for(sampling=sampling, **terms) * lasting_share(rounds, bands)

    chosen = choose_bands(cohort_size=cohort, population_size=users, **terms)
    assert noise(chosen) <= noise(1)
    for bands in (1, 2, 3, 4, 6, 8, 10, 12, 16):
        if bands <= rounds and bands * cohort <= users:
            assert noise(chosen) <= 1.03 * noise(bands)


@pytest.mark.parametrize(
    ("bands", "cohort", "users", "most"),
    [(67, 150, 10_000, 66), (2, 60, 100, 1), (20, 5, 100, 6)],  # 20 groups of 5 users: one in 8 times one is empty
)
def test_groups_that_cannot_hold_a_cohort_or_may_be_empty_are_refused(bands, cohort, users, most):
    with pytest.raises(SettingError, match=f"bands={bands} must be at most {most}:"):
        check_bands(bands, cohort, users)
    check_bands(most, cohort, users)


@pytest.mark.parametrize(("rounds", "bands", "message"), [(5, 6, "bands=6"), (70_000, 2, "rounds=70000")])
def test_more_bands_than_rounds_and_too_many_rounds_are_refused(rounds, bands, message):
    with pytest.raises(SettingError, match=message):
        band_coefficients(rounds, bands)
