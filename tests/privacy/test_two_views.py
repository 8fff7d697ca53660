"""Outsiders do not know the cohorts, the server does: two ledgers, two sentences."""

import math
from dataclasses import replace

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from clipline import SettingError
from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, GroupedPoissonSampling, NoSampling, PoissonSampling, Statistic
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation
from clipline.privacy.two_views import Participations, TwoGuarantees, account_both, against_server

ROUND = GaussianEvent(PoissonSampling(0.1), 0.58)
LEDGER = Ledger().add(ROUND, 30)


def gaussian_epsilon(mu, delta):
    """Balle and Wang (2018), solved by SciPy."""
    return brentq(lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 100)


OUTSIDERS = account(LEDGER, delta=1e-4, relation=Relation.ADD_OR_REMOVE)


@pytest.mark.parametrize("rounds", [1, 2, 5, 30, 40])
def test_against_the_server_a_user_has_as_many_plain_releases_as_they_were_asked(rounds):
    """Also where they were asked more often than there were rounds: attempts that came to nothing count."""
    both = account_both(OUTSIDERS, LEDGER, rounds)
    assert both.server.epsilon == pytest.approx(gaussian_epsilon(math.sqrt(rounds) / 0.58, 1e-4), rel=1e-6)
    assert both.server.relation is Relation.ZERO_OUT
    assert both.server.rounds == both.participations == rounds
    assert both.outsiders == OUTSIDERS


def test_the_two_sentences_say_whom_they_are_about():
    both = account_both(OUTSIDERS, LEDGER, 3)
    outside, server = str(both).splitlines()
    assert outside.startswith("For outsiders, who do not know the cohorts: (epsilon ")
    assert "Poisson sampling, 30 rounds" in outside
    assert server.startswith("Against the server, for a user who takes part in at most 3 rounds: (epsilon ")
    assert "no sampling, 3 rounds" in server
    assert TwoGuarantees.participations_in(str(both)) == 3
    assert "errors of users are shown" in str(account_both(replace(OUTSIDERS, shows_errors=True), LEDGER, 1).server)


def test_a_server_that_adds_the_noise_is_promised_nothing():
    both = account_both(OUTSIDERS, LEDGER, 0)
    assert both.server is None
    assert "Against the server: no promise" in str(both)
    assert TwoGuarantees.participations_in(str(both)) == 0


def test_the_rounds_with_the_least_noise_count_and_every_statistic():
    little, much = GaussianEvent(PoissonSampling(0.1), 0.4), GaussianEvent(PoissonSampling(0.1), 0.9)
    statistic = GaussianEvent(PoissonSampling(0.2), 2.0, Statistic("mean", "mean of x"))
    seen = against_server(Ledger().add(statistic).add(much, 2).add(ROUND, 3).add(little).add(ROUND, 2), 4)
    assert seen.events == {
        GaussianEvent(NoSampling(), 0.4): 1,
        GaussianEvent(NoSampling(), 0.58): 3,
        GaussianEvent(NoSampling(), 2.0, Statistic("mean", "mean of x")): 1,
    }


def test_noise_without_a_proof_is_refused():
    with pytest.raises(SettingError, match="banded noise"):
        against_server(Ledger().add(GaussianEvent(GroupedPoissonSampling(0.1, 4), 1.0), 4), 1)


def test_participations_are_counted_and_capped():
    counted = Participations(2).add(["a", "b"]).add(["a"])
    assert (counted.most, counted.counts) == (2, {"a": 2, "b": 1})
    assert counted.allowed(["a", "b", "c"]) == ["b", "c"]
    for users in (["a"], ["c", "c"]):
        with pytest.raises(SettingError, match="ask `allowed` users only"):
            counted.add(users)
    assert "a" not in repr(counted).removeprefix("Participations(max_participations")
    assert Participations(1).most == 0
    with pytest.raises(SettingError, match="max_participations"):
        Participations(0)
