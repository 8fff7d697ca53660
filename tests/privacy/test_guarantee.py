"""Guarantees in words: complete, and rounded up at the last digit printed."""

import dataclasses
import math
import warnings
from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipline.privacy.guarantee import Guarantee, LargeDeltaWarning, default_delta, rounded_up, warn_of_delta
from clipline.privacy.relations import Relation

ADD, REPLACE = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE


def test_a_guarantee_is_one_quotable_sentence_rounded_up():
    guarantee = Guarantee(3.9611, 1.81e-5, ADD, "poisson", "renyi", 7.5, 200)
    assert str(guarantee) == (
        "(epsilon 3.97, delta 1.81e-05)-DP for add-or-remove one user, Poisson sampling, 200 rounds, Renyi accountant"
    )


@pytest.mark.parametrize(
    ("epsilon", "delta", "text"),
    [
        (2.3925, 1e-5, "(epsilon 2.40, delta 1e-05)-DP"),
        (5.0, 1e-6, "(epsilon 5, delta 1e-06)-DP"),
        (9.999, 0.001, "(epsilon 10.0, delta 0.001)-DP"),
        (0.00036401, 1e-5, "(epsilon 0.000365, delta 1e-05)-DP"),
        (1841.2, 1e-5, "(epsilon 1850, delta 1e-05)-DP"),
        (1.2301e8, 1e-5, "(epsilon 1.24e+08, delta 1e-05)-DP"),
        (0.0, 1e-5, "(epsilon 0, delta 1e-05)-DP"),
    ],
)
def test_printed_numbers_are_never_below_the_computed_ones(epsilon, delta, text):
    sentence = str(Guarantee(epsilon, delta, REPLACE, "fixed", "renyi", 2.0, 1))
    assert sentence == f"{text} for replace one user, fixed-size sampling, 1 round, Renyi accountant"


@given(value=st.floats(1e-12, 1e12), digits=st.integers(2, 6))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_rounded_number_is_at_least_itself_and_at_most_one_digit_more(value, digits):
    # Decimal(value) is the float exactly; one unit of the last of `digits` digits is at most 10^(1 - digits) of it.
    printed = Decimal(rounded_up(value, digits))
    assert Decimal(value) <= printed <= Decimal(value) * (1 + 10 * Decimal(10) ** -digits)


def test_a_delta_that_was_given_is_printed_as_it_was_given():
    # The float nearest to 1e-5 lies above it; rounding that up would print 1.01e-05.
    assert Guarantee(1.0, 1e-5, ADD, "poisson", "renyi", 2.0, 1).delta_text == "1e-05"
    assert Guarantee(1.0, 2.51188643e-7, ADD, "poisson", "renyi", 2.0, 1).delta_text == "2.52e-07"


def test_no_noise_and_noise_too_small_to_account_are_told_apart():
    bare = Guarantee(math.inf, 1e-5, ADD, "fixed", "privacy loss", None, 3, noisy=False)
    assert str(bare) == ("not private: no noise was added (fixed-size sampling, 3 rounds, privacy-loss accountant)")
    tiny = dataclasses.replace(bare, noisy=True)
    assert str(tiny).startswith("no finite epsilon: the noise is too small for float64 to account (fixed-size")
    for guarantee in (bare, tiny):
        assert not guarantee.private
        assert guarantee.epsilon_text == "infinite (not private)"
        assert math.isinf(guarantee.mu)


def test_mu_is_the_distance_of_two_normals_with_this_epsilon_and_delta():
    # Noise multiplier 1, one round: epsilon 4.377178095681 at delta 1e-5 (oracle E001), so that mu is 1.
    assert Guarantee(4.377178095681, 1e-5, ADD, "none", "privacy loss", None, 1).mu == pytest.approx(1, rel=1e-10)


def test_every_sampling_is_named_in_words():
    for sampler, words in (("none", "no"), ("truncated-poisson", "Poisson sampling with a cap"), ("mixed", "mixed")):
        assert f", {words}" in str(Guarantee(1.0, 1e-5, Relation.ZERO_OUT, sampler, "renyi", 2.0, 2))


def test_the_default_is_the_papers_and_below_one_over_n_for_every_number_of_users():
    assert default_delta(10**6) == pytest.approx(10**-6.6, rel=1e-12)
    assert default_delta(9) == pytest.approx(9**-1.1, rel=1e-12)
    assert [default_delta(users) for users in (1, 2, 8)] == [0.1] * 3  # 8^-1.1 is 0.1015, which would be refused
    assert all(default_delta(users) < 1 / users for users in (1, 2, 8, 9, 10, 500, 10**12))


def test_only_a_delta_above_one_over_n_is_warned_of():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_delta(0.002, 500)
    with pytest.warns(LargeDeltaWarning, match="publish all that one user has"):
        warn_of_delta(0.0021, 500)
