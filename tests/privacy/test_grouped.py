"""Correlated noise with users in groups, as the ledger counts it and the accountant charges it."""

import itertools
import math
import random

import pytest

from clipline.errors import RunError, SettingError
from clipline.privacy import (
    GaussianEvent,
    GroupedPoissonSampling,
    Ledger,
    NoSampling,
    PoissonRuns,
    PoissonSampling,
    Relation,
    Statistic,
    account,
    account_grid,
    account_renyi,
    account_search,
    delta_at,
    noise_multiplier_for,
    rounds_within,
)
from clipline.privacy.dominating_pairs import dominating_pair
from clipline.privacy.ledger import ledger_line

BANDS, RATE, Z = 4, 0.3, 1.3
EVENT = GaussianEvent(GroupedPoissonSampling(RATE, BANDS), Z)
BLOCK = GaussianEvent(PoissonSampling(RATE), Z)
ADD_OR_REMOVE = Relation.ADD_OR_REMOVE


# shared/NOISE.md: of dp_accounting's PLD, for ceil(T / b) Poisson rounds at rate m b / n and delta n^-1.1.
@pytest.mark.parametrize(
    ("users", "cohort", "rounds", "bands", "z", "epsilon"),
    [
        (40000, 300, 150, 1, 0.577864, 4.01285),
        (40000, 300, 150, 16, 0.913714, 3.99998),
        (10000, 150, 150, 12, 1.0690802, 3.99997),
        (40000, 300, 150, 32, 1.068, 3.99997),
        (40000, 300, 150, 133, 1.5384, 3.99735),
    ],
)
def test_epsilon_is_that_of_another_library(users, cohort, rounds, bands, z, epsilon):
    sampling = GroupedPoissonSampling(cohort * bands / users, bands)
    terms = {"delta": users**-1.1, "relation": ADD_OR_REMOVE}
    guarantee = account(Ledger().add(GaussianEvent(sampling, z), rounds), **terms)
    assert guarantee.epsilon == pytest.approx(epsilon, abs=1e-5)
    assert (guarantee.rounds, guarantee.sampler) == (rounds, "grouped-poisson")
    found = noise_multiplier_for(sampling=sampling, rounds=rounds, epsilon=epsilon, **terms)
    assert found == pytest.approx(z, rel=2e-4)


@pytest.mark.parametrize("rounds", [1, 3, 4, 5, 8, 9, 150])
@pytest.mark.parametrize("relation", [ADD_OR_REMOVE, Relation.ZERO_OUT])
def test_a_run_of_so_many_rounds_costs_its_blocks_of_poisson_rounds(rounds, relation):
    ledger, blocks = Ledger().add(EVENT, rounds), Ledger().add(BLOCK, math.ceil(rounds / BANDS))
    for of in (account, account_renyi):
        assert of(ledger, delta=1e-6, relation=relation).epsilon == of(blocks, delta=1e-6, relation=relation).epsilon
    assert delta_at(ledger, epsilon=1.0, relation=relation) == delta_at(blocks, epsilon=1.0, relation=relation)


def test_rounds_added_one_by_one_are_one_entry_and_survive_their_file(tmp_path):
    ledger = Ledger()
    for index in range(10):
        ledger = ledger.add(EVENT.at(index))
    assert ledger == Ledger().add(EVENT, 10)
    assert len(ledger.entries) == 1
    assert [event.index for event in ledger] == list(range(10))
    lines = [ledger_line(place, event) for place, event in enumerate(ledger)]
    path = tmp_path / "ledger.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    assert Ledger.read(path) == ledger
    path.write_text("".join(f"{line}\n" for line in lines[1:]), encoding="utf-8")
    with pytest.raises(RunError, match="round=1 must be 0"):
        Ledger.read(path)


def test_two_trainings_or_one_that_began_its_noise_anew_share_no_block():
    first, second = Ledger().add(EVENT, 5), Ledger().add(EVENT, 7)
    together = first
    for event in second:
        together = together.add(event)
    assert together.costs == {BLOCK: 2 + 2}  # ceil(5 / 4) + ceil(7 / 4), where ceil(12 / 4) would be 3
    assert together.events == {EVENT: 12}
    assert together.add(BLOCK).costs == {BLOCK: 5}  # a plain round of the same rate costs what it always does
    assert Ledger().add(EVENT, 3).add(EVENT.at(3), 5) == Ledger().add(EVENT, 8)


@pytest.mark.parametrize("killed", [5, 6, 8])
@pytest.mark.parametrize("resumed", [3, 4, 5])
def test_no_user_takes_part_more_often_than_a_run_with_two_noises_pays_for(killed, resumed):
    """Killed after so many rounds, and run again from an earlier one on with other noise, out of step with groups."""
    last = 14
    ledger = Ledger().add(EVENT, killed)
    for index in range(last - resumed):
        ledger = ledger.add(EVENT.at(index))
    (paid,) = ledger.costs.values()
    first, second = range(killed), range(resumed, last)
    for group in range(BANDS):
        comes = [[t for t in noise if t % BANDS == group] for noise in (first, second)]
        assert len(comes[0]) + len(comes[1]) <= paid
        assert all(later - earlier >= BANDS for rounds in comes for earlier, later in itertools.pairwise(rounds))
    assert paid == math.ceil(killed / BANDS) + math.ceil((last - resumed) / BANDS)


def test_groups_as_large_as_a_cohort_are_no_sampling():
    ledger = Ledger().add(GaussianEvent(GroupedPoissonSampling(1.0, BANDS), 2.0), 10)
    plain = Ledger().add(GaussianEvent(NoSampling(), 2.0), 3)
    found, expected = (account(one, delta=1e-6, relation=ADD_OR_REMOVE).epsilon for one in (ledger, plain))
    assert found == pytest.approx(expected, rel=1e-6)


def test_lines_that_are_doubled_missing_or_out_of_order_never_cost_less():
    rng = random.Random(0)
    for _ in range(300):
        rounds = rng.randrange(1, 30)
        true = math.ceil(rounds / BANDS)
        lines = [EVENT.at(index) for index in range(rounds)]
        doubled = lines + rng.choices(lines, k=rng.randrange(5))
        rng.shuffle(doubled)
        dropped = [line for line in lines if line.index == rounds - 1 or rng.random() < 0.8]  # all but the last block's
        blocks = {line.index // BANDS for line in dropped}
        for changed, least in ((doubled, true), (sorted(doubled, key=lambda e: e.index), true), (dropped, len(blocks))):
            ledger = Ledger()
            for event in changed:
                ledger = ledger.add(event)
            assert ledger.costs[BLOCK] >= least


def test_the_most_rounds_within_a_budget_are_whole_blocks():
    terms = {"epsilon": 8.0, "delta": 1e-6, "relation": ADD_OR_REMOVE}
    rounds = rounds_within(EVENT, **terms)
    assert rounds == BANDS * rounds_within(BLOCK, **terms)
    spent = Ledger().add(EVENT, 6)  # within a block that is paid for already
    assert rounds_within(EVENT.at(6), after=spent, **terms) == rounds - 6
    assert rounds_within(EVENT, after=spent, **terms) == rounds - 8  # noise that begins anew
    assert rounds_within(EVENT.at(6), after=spent, at_most=3, **terms) == 3


@pytest.mark.parametrize("relation", [Relation.REPLACE_ONE, Relation.PAPER])
def test_a_relation_that_may_change_the_group_is_refused(relation):
    for of in (account, account_renyi):
        with pytest.raises(SettingError, match=f"relation='{relation}' cannot be accounted"):
            of(Ledger().add(EVENT, 8), delta=1e-6, relation=relation)
    with pytest.raises(SettingError, match="cannot be accounted"):
        account_search(Ledger().add(EVENT, 8), PoissonRuns(3), delta=1e-6, relation=relation)


def test_one_round_alone_or_a_statistic_as_one_is_refused():
    with pytest.raises(SettingError, match="cannot be accounted round by round"):
        dominating_pair(EVENT, ADD_OR_REMOVE)
    with pytest.raises(SettingError, match="that of a single release"):
        GaussianEvent(GroupedPoissonSampling(0.1, 4), 1.0, Statistic("mean", "0f"))


def test_searches_charge_every_run_for_its_own_blocks():
    ledger, blocks = Ledger().add(EVENT, 6), Ledger().add(BLOCK, 2)
    terms = {"delta": 1e-6, "relation": ADD_OR_REMOVE}
    assert account_grid(ledger, 3, **terms).epsilon == account(Ledger().add(BLOCK, 6), **terms).epsilon
    found, expected = (account_search(one, PoissonRuns(3), **terms).epsilon for one in (ledger, blocks))
    assert found == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [((1.01, 4), "rate=1.01"), ((0.0, 4), "rate=0"), ((0.1, 0), "bands=0"), ((0.1, 2.5), "bands=2.5"),
     ((0.1, 4, -1), "index=-1")],
)  # fmt: skip
def test_a_sampling_in_groups_that_cannot_be_is_refused(settings, message):
    with pytest.raises(SettingError, match=message):
        GroupedPoissonSampling(*settings)


def test_a_guarantee_names_groups_and_rounds():
    text = str(account(Ledger().add(EVENT, 10), delta=1e-6, relation=ADD_OR_REMOVE))
    assert "Poisson sampling from groups in turn, banded noise, 10 rounds" in text
    mixed = account(Ledger().add(EVENT, 10).add(GaussianEvent(NoSampling(), 9.0)), delta=1e-6, relation=ADD_OR_REMOVE)
    assert (mixed.sampler, mixed.rounds) == ("mixed", 11)
