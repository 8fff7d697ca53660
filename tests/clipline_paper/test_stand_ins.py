"""Stand-ins can be learned: a simple guess from other users' examples beats the commonest answer."""

import numpy as np
import pytest

from clipline_paper.paper_task import TEST_FIRST
from clipline_paper.stand_ins import emnist_users, shakespeare_users, so_lr_users, so_nwp_users


def test_the_word_before_says_more_than_the_commonest_word():
    """Three words of ten follow from the one before, so that the best table of successors is right about as often."""
    seen, asked = (
        so_nwp_users(first, users).fields["tokens"].astype(int) for first, users in ((0, 150), (TEST_FIRST, 8))
    )
    before, after = seen[:, :-1].ravel(), seen[:, 1:].ravel()
    word = (after > 0) & (after < 10_001)
    commonest = np.bincount(after[word]).argmax()
    pairs, times = np.unique(before[word] * 10_004 + after[word], return_counts=True)
    pairs = pairs[np.lexsort((times, pairs // 10_004))]
    guess = np.full(10_004, commonest)
    guess[pairs // 10_004] = pairs % 10_004  # of each word's successors the last, which is the commonest
    before, after = asked[:, :-1].ravel(), asked[:, 1:].ravel()
    word = (after > 0) & (after < 10_001)
    assert (after[word] == commonest).mean() < 0.1
    assert 0.2 < (guess[before[word]] == after[word]).mean() < 0.4


GENERATORS = {
    "emnist": lambda first, users: emnist_users(first, users, mean_examples=10),
    "shakespeare": shakespeare_users,
    "so_nwp": so_nwp_users,
    "so_lr": so_lr_users,
}


@pytest.mark.parametrize("name", GENERATORS)
def test_users_do_not_depend_on_how_many_there_are_and_test_users_are_others(name):
    make = GENERATORS[name]
    few, many, later = make(0, 3), make(0, 6), make(2, 1)
    for field in few.fields:
        for user in range(3):
            np.testing.assert_array_equal(few.of(user)[field], many.of(user)[field])
        np.testing.assert_array_equal(later.of(0)[field], few.of(2)[field])
    field = next(iter(few.fields))
    test = {row.tobytes() for row in make(TEST_FIRST, 6).fields[field]}
    shared = [row.tobytes() in test for row in many.fields[field]]
    assert np.mean(shared) < 0.02  # the shortest sentences meet by chance
