"""Outsiders do not know the cohorts, the server does: two ledgers, two sentences."""

import math
from dataclasses import replace

import pytest
from oracle_rows import gaussian_epsilon

from clipline import SettingError
from clipline.privacy.accountant import account
from clipline.privacy.events import GaussianEvent, GroupedPoissonSampling, NoSampling, PoissonSampling, Statistic
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation
from clipline.privacy.two_views import Participations, account_both, against_server, most_participations

ROUND = GaussianEvent(PoissonSampling(0.1), 0.58)
LEDGER = Ledger().add(ROUND, 30)


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
    assert "errors of users are shown" in str(account_both(replace(OUTSIDERS, shows_errors=True), LEDGER, 1).server)


def test_a_server_that_adds_the_noise_is_promised_nothing():
    both = account_both(OUTSIDERS, LEDGER, 0)
    assert both.server is None
    assert "Against the server: no promise" in str(both)


@pytest.mark.parametrize(
    ("told", "rounds", "most"),
    [
        ({"noise_by_clients": True, "asked": 7}, 4, 7),  # three attempts came to nothing
        ({"noise_by_clients": True, "asked": 3}, 4, 4),  # a metric ended the run: charged as planned
        ({"noise_by_clients": True, "asked": 7, "max_participations": 5}, 4, 5),
        ({"noise_by_clients": True, "asked": 2, "max_participations": 5}, 2, 2),
        ({"noise_by_clients": False, "asked": 7}, 4, 0),
    ],
)
def test_a_user_takes_part_at_most_as_often_as_cohorts_were_asked_and_as_the_cap_allows(told, rounds, most):
    assert most_participations(told, rounds) == most


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
