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


def recall_at_5(scores, tags):
    top = np.argsort(-scores, axis=1)[:, :5]
    return ((top[:, :, None] == tags[:, None, :]) & (tags[:, None, :] >= 0)).sum() / (tags >= 0).sum()


def test_words_say_more_of_tags_than_the_commonest_tags():
    """Each word votes, by its weight, for the tags that it was seen with."""
    seen, asked = so_lr_users(0, 40).fields, so_lr_users(TEST_FIRST, 6).fields
    votes = np.zeros((10_001, 500))
    for column in seen["tags"].T:
        tagged = column >= 0
        words, tags = seen["words"][tagged], np.repeat(column[tagged][:, None], 128, axis=1)
        np.add.at(votes, (words.ravel().astype(int), tags.ravel().astype(int)), seen["weights"][tagged].ravel())
    popularity = votes.sum(axis=0)
    votes /= np.maximum(votes.sum(axis=1, keepdims=True), 1e-9)
    rows = slice(0, 600)
    scores = np.einsum("nk,nkt->nt", asked["weights"][rows], votes[asked["words"][rows].astype(int)], optimize=True)
    tags = asked["tags"][rows].astype(int)
    assert recall_at_5(np.tile(popularity, (len(tags), 1)), tags) < 0.2
    assert recall_at_5(scores, tags) > 0.5


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
