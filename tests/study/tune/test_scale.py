import re
from dataclasses import replace

import pytest

from clipline.privacy.accountant import account
from clipline.privacy.banded_noise import model_noise
from clipline.privacy.events import GaussianEvent, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation
from clipline.study.tune.question import Target, Unreachable, scale_up, target_for

MILLION = 1_000_000


def spent(cohort, z, *, users, rounds, delta=None):
    """Epsilon by the accountant alone, from numbers."""
    ledger = Ledger().add(GaussianEvent(PoissonSampling(cohort / users), z), rounds)
    return account(ledger, delta=users**-1.1 if delta is None else delta, relation=Relation.ADD_OR_REMOVE).epsilon


@pytest.mark.parametrize(("epsilon", "users", "z"), [(4.0, MILLION, 0.1), (1.0, 200_000, 0.3), (8.0, 30_000, 0.05)])
def test_the_scale_meets_the_target_and_one_user_less_does_not(epsilon, users, z):
    found = scale_up(Target(epsilon, 1e-6, users, 150, 100), z)
    terms = {"users": users, "rounds": 150, "delta": 1e-6}
    assert spent(found.cohort_size, z * found.cohort_size / 100, **terms) <= epsilon
    assert found.guarantee.epsilon <= epsilon
    assert found.cohort_size > 100
    assert spent(found.cohort_size - 1, z * (found.cohort_size - 1) / 100, **terms) > epsilon


def test_a_trial_that_meets_the_target_is_not_scaled():
    target = Target(4.0, None, MILLION, 150, 100)
    enough = target.enough_noise()
    assert spent(100, enough, users=MILLION, rounds=150) <= 4.0 < spent(100, 0.999 * enough, users=MILLION, rounds=150)
    assert scale_up(target, enough).alpha == 1
    assert scale_up(target, 2 * enough).cohort_size == 100


def refused(target, z, losses=()):
    with pytest.raises(Unreachable) as caught:
        scale_up(target, z, losses)
    found = {one.change.split(" ")[0]: one.change.split(" ")[-1] for one in caught.value.alternatives}
    return str(caught.value), found


def test_a_cohort_above_the_users_is_refused_with_what_would_do():
    target = Target(2.0, None, 3_000, 150, 100)
    message, found = refused(target, 0.1)
    assert "epsilon=2" in message
    assert "3,000 users" in message
    assert "m=100, z=0.1" in message
    for change in found:
        assert change in message
    users, rounds = int(found["--users"]), int(found["--rounds"])
    epsilon = float(found["--epsilon"])
    # Each number by the accountant alone: it does, and a little less does not.
    assert spent(users, 0.1 * users / 100, users=users, rounds=150) <= 2.0
    assert spent(users - 1, 0.1 * (users - 1) / 100, users=users - 1, rounds=150) > 2.0
    assert spent(3_000, 3.0, users=3_000, rounds=rounds) <= 2.0 < spent(3_000, 3.0, users=3_000, rounds=rounds + 1)
    assert spent(3_000, 3.0, users=3_000, rounds=150) <= epsilon < 1.01 * spent(3_000, 3.0, users=3_000, rounds=150)
    # And the command would accept each.
    for accepted in ((2.0, users, 150), (epsilon, 3_000, 150), (2.0, 3_000, rounds)):
        target = Target(accepted[0], None, accepted[1], accepted[2], 100)
        assert scale_up(target, 0.1).cohort_size <= target.population_size


def test_more_degradation_is_offered_where_a_trial_bears_enough_noise_with_it():
    target = Target(2.0, None, 3_000, 150, 100)
    _, found = refused(target, 0.03)
    assert "--degradation" not in found
    needed = float(re.search(r"z = ([0-9.]+) at m = 100", refused(target, 0.03)[0])[1])
    assert scale_up(target, needed).cohort_size <= 3_000
    # z = 1 suffices and lost 8%; but z = 0.3, below it, lost 10%, which has to be allowed first.
    _, found = refused(target, 0.03, [(0.01, 0.0), (0.03, 0.02), (0.3, 0.1), (1.0, 0.08)])
    assert found["--degradation"] == "10%"
    # A loss that has more than doubled is none that --degradation can allow: it is below 100%.
    for much in (1.4, 0.998):
        message, found = refused(target, 0.03, [(0.01, 0.0), (1.0, much)])
        assert "--degradation" not in found
        assert "a model that bears" in message


def banded(epsilon=4.0, users=100_000, relation=Relation.ADD_OR_REMOVE):
    return Target(epsilon, None, users, 300, 100, relation, banded=True)


def test_banded_noise_meets_the_target_with_fewer_users_a_round_and_leaves_as_much_noise_in_the_models():
    target, z = banded(), 0.05
    found, alone = scale_up(target, z), scale_up(replace(target, banded=False), z)
    assert found.bands > 1
    assert found.cohort_size < alone.cohort_size
    share = model_noise(300, found.bands) / model_noise(300, 1)
    assert found.noise_multiplier * share == pytest.approx(z * found.cohort_size / 100)
    # By the accountant alone, from numbers: a run of 300 rounds is so many Poisson rounds at the rate of a group.
    rate, blocks = found.bands * found.cohort_size / 100_000, -(-300 // found.bands)
    ledger = Ledger().add(GaussianEvent(PoissonSampling(rate), found.noise_multiplier), blocks)
    spent = account(ledger, delta=100_000**-1.1, relation=Relation.ADD_OR_REMOVE).epsilon
    assert spent == found.guarantee.epsilon <= 4.0
    assert found.settings["noise"] == "banded"
    # Fewer users by a tenth would not do, with any bands.
    fewer = int(0.9 * found.cohort_size)
    assert target.least_noise(fewer) > z * fewer / 100
    assert target.least_noise(fewer) < replace(target, banded=False).least_noise(fewer)


def test_a_trial_that_meets_the_target_with_bands_is_not_scaled():
    target = banded()
    found = scale_up(target, target.enough_noise() * 1.001)
    assert (found.alpha, found.bands > 1) == (1, True)
    assert found.guarantee.epsilon <= 4.0


def test_banded_noise_is_left_out_of_a_target_that_it_cannot_be_accounted_for():
    assert target_for(4.0, None, 100_000, 300, 100, "add-or-remove", banded=True).banded
    assert not target_for(4.0, None, 100_000, 300, 100, "replace-one", banded=True).banded
