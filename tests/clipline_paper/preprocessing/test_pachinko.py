import numpy as np
import pytest

from clipline.errors import PopulationError
from clipline_paper.preprocessing import pachinko_labels

COARSE = np.arange(100) // 5


def rng(seed=0):
    return np.random.default_rng(seed)


def test_cifar_100_is_given_out_to_the_last_image_and_none_twice():
    taken = pachinko_labels(np.full(100, 50), COARSE, users=50, examples_per_user=100, rng=rng())
    assert taken.shape == (50, 100)
    assert np.bincount(taken.ravel()).tolist() == [50] * 100


def test_marginals_with_plenty_of_images_are_those_of_two_dirichlets():
    """Two examples of a user share the coarse label with probability (0.1 + 1) / (20 * 0.1 + 1), and given that the

    fine one with (10 + 1) / (5 * 10 + 1). 2000 users: standard errors below 0.006 and 0.002; five of them allowed.
    """
    pairs = pachinko_labels(np.full(100, 10**9), COARSE, users=2000, examples_per_user=20, rng=rng(1))
    first, second = pairs[:, :10], pairs[:, 10:]
    same_coarse = COARSE[first] == COARSE[second]
    assert same_coarse.mean() == pytest.approx(1.1 / 3, abs=0.03)
    assert (first == second)[same_coarse].mean() == pytest.approx(11 / 51, abs=0.02)
    assert np.bincount(COARSE[pairs].ravel(), minlength=20) / pairs.size == pytest.approx(1 / 20, abs=0.02)


def test_the_same_generator_gives_the_same_users():
    first, again, other = (pachinko_labels(np.full(100, 9), COARSE, 9, 100, rng(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_more_than_there_is_cannot_be_given():
    with pytest.raises(PopulationError, match="10 users of 100 examples need 1000 but there are 900"):
        pachinko_labels(np.full(100, 9), COARSE, 10, 100, rng())
