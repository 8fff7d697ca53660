"""The instrument itself: it is silent on sums that keep users apart, and each kind of leak makes it speak."""

import hashlib

import numpy as np
import pytest
import torch
from adversarial import neighbours
from adversarial.neighbours import CLIP, Case, Refused, findings
from adversarial.zoo import ZOO

from clipline.errors import ModuleError, SettingError

PLAIN = Case(ZOO["no randomness but the order of batches"], "one-by-one")


def own_vector(training, params, user, round_index, size=0.9):
    """A vector that hangs on parameters, round, id and the user's own data alone; within the clip."""
    data = b"".join(np.ascontiguousarray(field).tobytes() for field in training.population.of(user).values())
    key = f"{training.population.user_ids[user]} {round_index} {float(params.sum())} ".encode() + data
    rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))
    vector = torch.from_numpy(rng.normal(size=len(params) + 1))
    vector[:-1] *= (size if data else 0.0) * CLIP / vector[:-1].norm()
    vector[-1] = 0.5 if size <= 1 else -0.5
    return vector


def kept_apart(training, params, users, round_index, size=0.9):
    own = (own_vector(training, params, user, round_index, size) for user in users)
    return sum(own, torch.zeros(len(params) + 1, dtype=torch.float64))


def at(place, value, params):
    """A vector with one number in it."""
    vector = torch.zeros(len(params) + 1, dtype=torch.float64)
    vector[place] = value
    return vector


def last_user_added_to_the_next(training, params, users, round_index):
    vectors = [own_vector(training, params, user, round_index)[:-1] for user in users][:-1]
    added = sum((1e-6 * vector for vector in vectors), torch.zeros(len(params), dtype=torch.float64))
    return kept_apart(training, params, users, round_index) + torch.cat([added, torch.zeros(1)])


def left_from_the_round_before(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    before = getattr(training, "before", torch.zeros_like(total))
    training.before = total
    return total + 1e-9 * before


def writes(choose):
    def made(training, params, users, round_index):
        total, (owner, place) = kept_apart(training, params, users, round_index), choose(training, params)
        owner[place] += 1e-9
        return total

    return made


def beside(spoil):
    """What `spoil` adds to the right sum, which may be an error."""
    return lambda training, params, users, t: kept_apart(training, params, users, t) + spoil(training, params, users)


def raises(error, when=lambda training: True):
    def made(training, params, users):
        if when(training):
            raise error
        return 0.0

    return beside(made)


def has_nan(training):
    return np.isnan(training.population.fields["x"]).any()


def largest(training, users):
    return max((training.population.size(user) for user in users), default=0)


LEAKS = {
    "longer than the clip": lambda *given: kept_apart(*given, size=1.001),
    "last user added to the next": last_user_added_to_the_next,
    "keyed by position": beside(lambda training, params, users: at(0, 1e-6 * CLIP * float(users.sum()), params)),
    "width of the largest": beside(
        lambda training, params, users: at(0, 1e-6 * CLIP * largest(training, users), params)
    ),
    "mode by anybody's NaN": lambda training, *given: kept_apart(training, *given) * (1 + 1e-15 * has_nan(training)),
    "left from the round before": left_from_the_round_before,
    "bit of somebody else": beside(lambda training, params, users: at(-1, len(users) % 2, params)),
    "parameters written to": writes(lambda training, params: (params, 0)),
    "data written to": writes(lambda training, params: (training.population.fields["x"], (0, 0))),
    "traceback": raises(ValueError("label 7 is out of range")),
    "refused for one user": raises(ModuleError("the loss is not a number: mend it"), has_nan),
    "refused without a name": raises(SettingError("something is wrong: do something else")),
}


def test_sums_that_keep_users_apart_are_accepted(monkeypatch):
    monkeypatch.setattr(neighbours, "private_sum", kept_apart)
    assert findings(PLAIN) == []


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_every_kind_of_leak_is_found(monkeypatch, leak):
    monkeypatch.setattr(neighbours, "private_sum", leak)
    found = findings(PLAIN)
    assert not isinstance(found, Refused)
    assert found


def test_the_size_of_a_leak_is_told_in_clips(monkeypatch):
    constant = beside(lambda training, params, users: at(0, 3 * CLIP * len(training.population), params))
    monkeypatch.setattr(neighbours, "private_sum", constant)
    removed = [one.clips for one in findings(PLAIN, ["first and largest user removed"]) if "without" in one.what]
    assert removed == [pytest.approx(3.0)]


def test_a_refusal_by_all_in_one_sentence_is_accepted(monkeypatch):
    refused = raises(ModuleError("layer 'weight' keeps statistics: use another"))
    monkeypatch.setattr(neighbours, "private_sum", refused)
    assert isinstance(findings(PLAIN), Refused)


def test_users_of_the_instrument_are_uneven_and_some_have_nothing():
    sizes = {name: len(user["y"]) for name, user in neighbours.everybody().items()}
    ordered = [sizes[name] for name in sorted(sizes)]
    assert ordered[0] == max(ordered)  # first and largest
    assert min(ordered) == 0
    added = max(len(user["y"]) for one in neighbours.neighbours() for user in one.users.values())
    assert {-(-size // neighbours.LOCAL.batch_size) for size in [*ordered, added]} == {0, 1, 2, 3}
