"""The searches end on the private side, and next to the boundary."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipline.errors import SettingError
from clipline.privacy.accountant import account, default_relation
from clipline.privacy.calibration import noise_multiplier_for, rounds_within
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, NoSampling, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation

DELTA = 10**-6.6
ADD, REPLACE = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE
POISSON, FIXED = PoissonSampling(0.013958), FixedSizeSampling(13958, 10**6)


def spent(sampling, z, rounds, delta, relation):
    return account(Ledger().add(GaussianEvent(sampling, z), rounds), delta=delta, relation=relation).epsilon


@pytest.mark.parametrize(
    ("sampling", "relation", "known", "exact"), [(POISSON, ADD, 0.93226, 0.894906), (FIXED, REPLACE, 2.01913, 1.946686)]
)
def test_the_noise_for_epsilon_five_is_the_known_one(sampling, relation, known, exact):
    # Known: Renyi with a real order. Exact: the privacy-loss distribution, below which no accountant may go.
    z = noise_multiplier_for(sampling=sampling, rounds=1500, epsilon=5, delta=DELTA, relation=relation)
    assert z == pytest.approx(known, rel=2e-5)
    assert z > exact


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


def test_four_times_the_rounds_need_twice_the_noise_without_sampling():
    # The cost of T Gaussians depends on T / z^2 alone.
    z = [noise_multiplier_for(sampling=NoSampling(), rounds=t, epsilon=2, delta=1e-5, relation=ADD) for t in (50, 200)]
    assert z[1] / z[0] == pytest.approx(2, rel=3e-5)


def test_replace_one_needs_twice_the_noise_without_sampling():
    z = [
        noise_multiplier_for(sampling=NoSampling(), rounds=9, epsilon=2, delta=1e-5, relation=r) for r in (ADD, REPLACE)
    ]
    assert z[1] / z[0] == pytest.approx(2, rel=3e-5)


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


def test_an_unsound_pair_is_refused():
    with pytest.raises(SettingError, match="use replace-one"):
        noise_multiplier_for(sampling=FIXED, rounds=10, epsilon=1.0, delta=1e-5, relation=ADD)


@pytest.mark.parametrize(("sampling", "z"), [(POISSON, 1.3958), (FIXED, 1.3958), (NoSampling(), 40.0)])
def test_one_more_round_would_be_one_too_many(sampling, z):
    relation = default_relation(sampling)
    rounds = rounds_within(GaussianEvent(sampling, z), epsilon=5, delta=DELTA, relation=relation)
    assert rounds > 0
    assert spent(sampling, z, rounds, DELTA, relation) <= 5 < spent(sampling, z, rounds + 1, DELTA, relation)


def test_the_known_run_fits_exactly_its_own_epsilon():
    event = GaussianEvent(POISSON, 1.3958)
    assert rounds_within(event, epsilon=2.392492, delta=DELTA, relation=ADD) == 1500


def test_no_round_fits_a_target_that_one_round_exceeds():
    assert rounds_within(GaussianEvent(NoSampling(), 0.5), epsilon=1, delta=1e-6, relation=ADD) == 0
    assert rounds_within(GaussianEvent(POISSON, 0.0), epsilon=100, delta=1e-6, relation=ADD) == 0


def test_rounds_that_cost_next_to_nothing_stop_at_a_trillion():
    event = GaussianEvent(PoissonSampling(1e-9), 1e6)
    assert rounds_within(event, epsilon=1, delta=1e-6, relation=ADD) == 10**12
