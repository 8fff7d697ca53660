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


def kept_apart(training, params, users, round_index):
    total = torch.zeros(len(params) + 1, dtype=torch.float64)
    for user in users:
        total += own_vector(training, params, user, round_index)
    return total


def longer_than_the_clip(training, params, users, round_index):
    return sum((own_vector(training, params, user, round_index, size=1.001) for user in users), torch.zeros(()))


def last_user_added_to_the_next(training, params, users, round_index):
    total, last = kept_apart(training, params, users, round_index), 0.0
    for user in users:
        total[:-1] += 1e-6 * last
        last = own_vector(training, params, user, round_index)[:-1]
    return total


def keyed_by_position(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    total[0] += 1e-6 * CLIP * float(users.sum())
    return total


def width_of_the_largest(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    total[0] += 1e-6 * CLIP * max((training.population.size(user) for user in users), default=0)
    return total


def mode_by_anybodys_nan(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    return total * (1 + 1e-15) if np.isnan(training.population.fields["x"]).any() else total


def left_from_the_round_before(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    before = getattr(training, "before", torch.zeros_like(total))
    training.before = total
    return total + 1e-9 * before


def bit_of_somebody_else(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    total[-1] += len(users) % 2
    return total


def parameters_written_to(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    params[0] += 1e-9
    return total


def data_written_to(training, params, users, round_index):
    total = kept_apart(training, params, users, round_index)
    training.population.fields["x"][0, 0] += 1e-9
    return total


def traceback(training, params, users, round_index):
    raise ValueError("label 7 is out of range")


def refused_for_one_user(training, params, users, round_index):
    if np.isnan(training.population.fields["x"]).any():
        raise ModuleError("the loss is not a number: mend it")
    return kept_apart(training, params, users, round_index)


def refused_without_a_name(training, params, users, round_index):
    raise SettingError("something is wrong: do something else")


LEAKS = [
    longer_than_the_clip,
    last_user_added_to_the_next,
    keyed_by_position,
    width_of_the_largest,
    mode_by_anybodys_nan,
    left_from_the_round_before,
    bit_of_somebody_else,
    parameters_written_to,
    data_written_to,
    traceback,
    refused_for_one_user,
    refused_without_a_name,
]


def test_sums_that_keep_users_apart_are_accepted(monkeypatch):
    monkeypatch.setattr(neighbours, "private_sum", kept_apart)
    assert findings(PLAIN) == []


@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_every_kind_of_leak_is_found(monkeypatch, leak):
    monkeypatch.setattr(neighbours, "private_sum", leak)
    found = findings(PLAIN)
    assert not isinstance(found, Refused)
    assert found


def test_the_size_of_a_leak_is_told_in_clips(monkeypatch):
    def constant(training, params, users, round_index):
        total = kept_apart(training, params, users, round_index)
        total[0] += 3 * CLIP * len(training.population)
        return total

    monkeypatch.setattr(neighbours, "private_sum", constant)
    removed = [one.clips for one in findings(PLAIN, ["first and largest user removed"]) if "without" in one.what]
    assert removed == [pytest.approx(3.0)]


def test_a_refusal_by_all_in_one_sentence_is_accepted(monkeypatch):
    def refused(training, params, users, round_index):
        raise ModuleError("layer 'weight' keeps statistics: use another")

    monkeypatch.setattr(neighbours, "private_sum", refused)
    assert isinstance(findings(PLAIN), Refused)


def test_users_of_the_instrument_are_uneven_and_some_have_nothing():
    sizes = {name: len(user["y"]) for name, user in neighbours.everybody().items()}
    ordered = [sizes[name] for name in sorted(sizes)]
    assert ordered[0] == max(ordered)  # first and largest
    assert min(ordered) == 0
    added = max(len(user["y"]) for one in neighbours.neighbours() for user in one.users.values())
    assert {-(-size // neighbours.LOCAL.batch_size) for size in [*ordered, added]} == {0, 1, 2, 3}
