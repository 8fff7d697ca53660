import numpy as np

from clipline import Population
from clipline.study.tune.question import shared_users


def people(first, users, seed, dtype=np.int64):
    """Three rows a user, in an order of no matter."""
    ids = np.repeat(np.arange(first, first + users), 3)
    return Population.from_arrays(ids.astype(dtype), x=np.random.default_rng(seed).normal(size=(len(ids), 2)))


def test_users_with_the_same_rows_are_the_same_users_however_they_are_stored(tmp_path):
    private = people(0, 40, seed=1)
    private.save(tmp_path / "store")
    assert shared_users(private, Population.open(tmp_path / "store")) is None
    assert shared_users(private.subset(range(5, 15)), private) is None  # a part of the private data
    as_text = people(0, 40, seed=1, dtype=str)  # in another order, as text is sorted otherwise
    assert shared_users(as_text, private) is None


def test_ids_that_recur_with_other_rows_are_counted():
    assert shared_users(people(0, 40, seed=1), people(30, 40, seed=2)) == 10
    assert shared_users(people(0, 40, seed=1), people(100, 40, seed=1)) == 0
