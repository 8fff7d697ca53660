"""One vector a user: its norm, what removing a user changes, the noise, and the grid."""

import math

import numpy as np
import pytest
import torch

from clipline import Population, PrivateStatistics
from clipline.data.private_statistics import (
    _GRID,
    dense,
    histogram_vectors,
    key_vectors,
    keys_by_user,
    moment_vectors,
    noisy_sum,
    user_blocks,
)
from clipline.federated.mechanism import grid_of
from clipline.privacy import GaussianEvent, NoSampling


def total(blocks, dim):
    """The sum as the mechanism would find it, and every user's own vector."""
    totals, users = torch.zeros(1, dim, dtype=torch.float64), []
    for block in blocks:
        block.add_to(totals, torch.ones(len(block), dtype=torch.float64))
        own = np.zeros((len(block), dim))
        np.add.at(own, (block.owners, block.places), block.weights)
        np.testing.assert_allclose(block.norms().numpy(), np.linalg.norm(own, axis=1), atol=1e-15)
        users.append(own)
    return totals[0].numpy(), np.concatenate(users)


def population(seed, users=7):
    rng = np.random.default_rng(seed)
    sizes = np.append(rng.integers(0, 6, users - 1), 1)  # some have no example
    rows = int(sizes.sum())
    x = rng.normal(0, 3, rows)
    x[rng.random(rows) < 0.1] = np.inf * rng.choice([-1, 1])  # clipped like any other
    x[:1] = np.nan  # one user adds nothing
    v = rng.choice([-2.0, 2.0, 0.5], (rows, 2))
    x[-1], v[-1] = 9.0, (2.0, -2.0)  # the last user is at the ends of all ranges: the longest vector there is
    return Population.from_arrays(
        np.repeat(np.arange(users), sizes), x=x, v=v, known_users=np.arange(users), missing="zero-update"
    )


RANGES = {"x": (-1.5, 2.0), "v": (-2.0, 2.0)}
DIM = 3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("vectors", "dim"),
    [
        (lambda people: moment_vectors(people, RANGES), 1 + 2 * DIM),
        (lambda people: histogram_vectors(people, RANGES, 5), 5 * DIM),
    ],
    ids=["moments", "ranges"],
)
def test_removing_any_user_moves_the_sum_by_that_users_own_vector_of_norm_at_most_1(seed, vectors, dim):
    people = population(seed)
    whole, own = total(vectors(people), dim)
    assert (np.linalg.norm(own, axis=1) <= 1).all()
    assert np.linalg.norm(own, axis=1).max() > 1 - 1e-6  # the bound is attained
    assert (own / _GRID == np.rint(own / _GRID)).all()  # multiples of a power of two: sums are exact
    present = np.flatnonzero(np.diff(people.offsets))
    for user in range(len(people)):
        rest, _ = total(vectors(people.subset(np.delete(np.arange(len(people)), user))), dim)
        mine = own[list(present).index(user)] if user in present else np.zeros(dim)
        assert (whole - rest == mine).all()  # to the last bit


def test_removing_any_user_from_a_vocabulary_moves_it_by_norm_1_at_most():
    rng = np.random.default_rng(1)
    ids, words = rng.integers(0, 6, 40), rng.choice(list("abcdefgh"), 40)
    places = {word: place for place, word in enumerate("abcdefgh")}
    whole, _ = total(key_vectors(keys_by_user(ids, words, 3, None), places, 3), 8)
    for user in range(6):
        chosen = keys_by_user(ids[ids != user], words[ids != user], 3, None)
        rest, _ = total(key_vectors(chosen, places, 3), 8)
        moved = whole - rest
        assert 0 < np.linalg.norm(moved) <= 1
        assert np.count_nonzero(moved) <= 3
        assert np.allclose(moved[moved > 0], 1 / math.sqrt(3), atol=_GRID)


def test_moments_of_one_user_by_hand():
    people = Population.from_arrays([0, 0], x=[0.0, 30.0])  # in 0 to 20: clipped to 0 and 20, so u = -1 and 1
    _, own = total(moment_vectors(people, {"x": (0.0, 20.0)}), 3)
    np.testing.assert_allclose(own, [[1 / math.sqrt(3), 0, 1 / math.sqrt(3)]], atol=2 * _GRID)  # means 0 and 1


def test_blocks_change_nothing(monkeypatch):
    people = population(3, users=40)
    whole, _ = total(moment_vectors(people, RANGES), 1 + 2 * DIM)
    monkeypatch.setattr("clipline.data.private_statistics._BLOCK", 1)
    assert len(list(user_blocks(people, 1))) == np.count_nonzero(np.diff(people.offsets))
    one_by_one, _ = total(moment_vectors(people, RANGES), 1 + 2 * DIM)
    assert (whole == one_by_one).all()


def test_noise_has_the_stated_scale_and_hides_the_low_digits():
    noisy, event = noisy_sum([dense(np.zeros((1, 20_000)))], 20_000, 3.0, np.random.default_rng(0))
    assert event == GaussianEvent(NoSampling(), 3.0)
    # The standard deviation of 20,000 draws is off by 0.5%: 2.5% is five of those, missed once in two million seeds.
    assert noisy.std() == pytest.approx(3.0, rel=0.025)
    assert abs(noisy.mean()) < 5 * 3 / math.sqrt(20_000)
    assert (noisy / grid_of(3.0) == np.rint(noisy / grid_of(3.0))).all()


def test_a_vector_that_is_too_long_is_clipped_and_one_that_is_not_finite_adds_nothing():
    long = dense(np.array([[3.0, 4.0], [np.nan, 1.0], [np.inf, 0.0]]))
    noisy, _ = noisy_sum([long], 2, 1e-6, np.random.default_rng(0))
    np.testing.assert_allclose(noisy, [0.6, 0.8], atol=1e-5)


def test_noise_of_statistics_is_no_rounds_noise_and_each_has_its_own():
    people = Population.from_arrays(np.arange(50), x=np.linspace(0, 1, 50))
    ask = {"ranges": {"x": (0, 1)}, "noise_multiplier": 2.0}
    first, again = PrivateStatistics(seed=5), PrivateStatistics(seed=5)
    assert first.moments(people, **ask).mean["x"] == again.moments(people, **ask).mean["x"]
    assert first.moments(people, **ask).mean["x"] != PrivateStatistics(seed=5).moments(people, **ask).mean["x"]
    system = [PrivateStatistics().moments(people, **ask).mean["x"] for _ in range(2)]
    assert system[0] != system[1]
    identities = [event.statistic.identity for event in (*first, *again)]
    assert identities[0] == identities[2] != identities[1]  # the same release, and another one
