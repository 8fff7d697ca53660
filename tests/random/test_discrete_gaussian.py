"""Draws of the discrete Gaussian have its law, and the comparisons that decide them are exact."""

from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats

from clipline import SettingError
from clipline.random.discrete_gaussian import LARGEST_STDDEV, coins, discrete_gaussian, geometric, words_of
from clipline.random.normal_numbers import SystemNormal


def seeded(key):
    return words_of(np.random.Generator(np.random.Philox(key=key)))


def chosen(*values):
    """A source that gives these words in turn, and fails when there are no more."""
    left = [np.asarray(value, np.uint64).reshape(-1) for value in values]
    return lambda count: left.pop(0)[:count]


def law(stddev):
    """The numbers that are not rare, and their probabilities, by a sum over all numbers with mpmath."""
    far = int(12 * stddev) + 10
    with mpmath.workprec(100):
        weights = [mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * mpmath.mpf(stddev) ** 2)) for k in range(-far, far + 1)]
        total = mpmath.fsum(weights)
        return np.arange(-far, far + 1), np.array([float(weight / total) for weight in weights])


def counted(draws, numbers, expected):
    """Observed and expected counts of the numbers expected 8 times or more; rarer ones go to the nearest of these."""
    often = numbers[expected >= 8]
    kept, counted_as = np.clip(draws, often[0], often[-1]), np.clip(numbers, often[0], often[-1])
    seen = np.array([np.count_nonzero(kept == number) for number in often])
    return seen, np.array([expected[counted_as == number].sum() for number in often])


@pytest.mark.parametrize("stddev", [0.3, 0.7, 1.0, 1.7, 2.5, 5.0, 11.3, 40.25])
@pytest.mark.parametrize("source", ["seed", "system"])
def test_draws_have_the_exact_law(stddev, source):
    words = seeded(int(stddev * 1000)) if source == "seed" else words_of(SystemNormal())
    draws = discrete_gaussian(200_000, stddev, words)
    numbers, probabilities = law(stddev)
    seen, expected = counted(draws, numbers, probabilities * len(draws))
    # A good sampler falls below this p once in a million times.
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-6


@pytest.mark.parametrize("stddev", [512.0, 700.0, 2.0**20, 3.0 * 2**30, LARGEST_STDDEV])
def test_wide_draws_are_nearly_normal(stddev):
    draws = discrete_gaussian(100_000, stddev, seeded(7))
    steps = np.random.Generator(np.random.Philox(key=1)).random(len(draws)) - 0.5  # fills the gaps between numbers
    assert stats.kstest((draws + steps) / stddev, "norm").pvalue > 1e-6


def test_neighbouring_draws_are_independent():
    draws = discrete_gaussian(400_000, 20.0, seeded(3)) / 20.0
    for lag in (1, 2, 5):
        assert abs(np.mean(draws[lag:] * draws[:-lag])) < 5 / np.sqrt(len(draws))  # once in a million by chance


def test_one_seed_gives_the_same_draws_and_another_gives_others():
    first, again, other = (discrete_gaussian(1000, 9.0, seeded(key)) for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9


def exact_chance(g, bits):
    """exp(-g) 2^bits, rounded down."""
    with mpmath.workprec(bits + 100):
        return int(mpmath.floor(mpmath.exp(-mpmath.mpf(g.numerator) / g.denominator) * mpmath.mpf(2) ** bits))


@pytest.mark.parametrize("past", [-3, -1, 0, 1, 3])
def test_a_coin_whose_word_is_next_to_the_chance_falls_as_exact_arithmetic_says(past):
    rng = np.random.Generator(np.random.Philox(key=8))
    for g in [Fraction(int(n), 2**20) for n in rng.integers(1, 30 * 2**20, 200)]:
        edge = exact_chance(g, 64)
        second = exact_chance(g, 128) & (2**64 - 1)  # the bits behind those of the word
        coin = coins(np.array([float(g)]), lambda i, g=g: g, chosen(edge + past, [second - 1], [0]))
        assert coin.tolist() == [past <= 0]
        if past == 0:  # decided by the second word alone, in both directions
            above = coins(np.array([float(g)]), lambda i, g=g: g, chosen(edge, [second + 1]))
            assert above.tolist() == [False]


def test_a_coin_that_two_words_do_not_decide_takes_a_third():
    g = Fraction(3, 7)
    third = exact_chance(g, 192) & (2**64 - 1)
    words = [exact_chance(g, 64), exact_chance(g, 128) & (2**64 - 1)]
    for last, falls in ((third - 1, True), (third + 1, False)):
        assert coins(np.array([float(g)]), lambda i: g, chosen(*words, last)).tolist() == [falls]


def test_a_certain_coin_always_falls():
    assert coins(np.zeros(3), lambda i: Fraction(0), chosen([0, 2**64 - 1, 2**63])).all()


@pytest.mark.parametrize("power", range(1, 45))
def test_a_geometric_number_at_an_edge_is_decided_by_the_next_word(power):
    edge, second = exact_chance(Fraction(power), 64), exact_chance(Fraction(power), 128) & (2**64 - 1)
    assert geometric(1, chosen(edge, second - 1)).tolist() == [power]  # just below exp(-power)
    assert geometric(1, chosen(edge, second + 1)).tolist() == [power - 1]
    assert geometric(1, chosen(edge + 1, 0)).tolist() == [power - 1]


def test_the_smallest_word_goes_on_as_far_as_further_bits_say():
    for power in (45, 60, 80):  # one number is compared with every power, and not a new one with each
        after = exact_chance(Fraction(power), 128)
        assert geometric(1, chosen(0, after - 1)).tolist() == [power]
        assert geometric(1, chosen(0, after + 1)).tolist() == [power - 1]


@pytest.mark.parametrize("stddev", [0.0, -1.0, float("nan"), float("inf"), 2.0**41])
def test_a_deviation_that_cannot_be_drawn_is_refused(stddev):
    with pytest.raises(SettingError, match="stddev"):
        discrete_gaussian(1, stddev, seeded(0))


@pytest.mark.parametrize("stddev", [0.7, 3.0, 12.5])
def test_opendp_draws_from_the_same_law(stddev):
    dp = pytest.importorskip("opendp.prelude", reason="opendp is not installed")
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=int)), dp.l2_distance(T=float)
    theirs = np.array(dp.m.make_gaussian(*space, scale=stddev)([0] * 20_000))
    ours = discrete_gaussian(20_000, stddev, seeded(5))
    numbers, expected = law(stddev)
    often = numbers[expected * 20_000 >= 8]
    table = [[np.count_nonzero(draws == number) for number in often] for draws in (ours, theirs)]
    assert stats.chi2_contingency(table).pvalue > 1e-6
