"""Normal numbers made from words are NumPy's to the last bit, and normal as far as millions of them can show."""

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from scipy import stats

from clipline.errors import RunError
from clipline.random import normal_numbers
from clipline.random.normal_numbers import KeyedNormal, SystemNormal, from_words, numpy_layers, words_for


def one_after_the_other(words, count):
    """The ziggurat as Marsaglia and Tsang describe it, a number at a time, with NumPy's layout of a word."""
    layers, numbers, source = numpy_layers(), [], iter(words.tolist())

    def uniform():
        return (next(source) >> 11) / 2**53

    while len(numbers) < count:
        word = next(source)
        layer, negative, whole = word & 255, word >> 8 & 1, word >> 9 & (2**52 - 1)
        x = whole * layers.units[layer]
        if whole < layers.limits[layer]:
            numbers.append(-x if negative else x)
        elif layer == 0:
            while True:
                beyond, height = -math.log1p(-uniform()) / layers.tail, -math.log1p(-uniform())
                if 2 * height > beyond**2:
                    break
            numbers.append((layers.tail + beyond) * (-1 if whole >> 8 & 1 else 1))
        else:
            low, high = layers.heights[layer], layers.heights[layer - 1]
            if low + uniform() * (high - low) < math.exp(-0.5 * x * x):
                numbers.append(-x if negative else x)
    return np.array(numbers)


@pytest.mark.parametrize("count", [0, 1, 2, 19, 1000, 1 << 17, (1 << 17) + 1])
def test_numbers_from_words_are_those_of_numpy_to_the_last_bit(count):
    drawn = from_words(np.random.Philox(key=count).random_raw(words_for(count)), count)
    np.testing.assert_array_equal(drawn, np.random.Generator(np.random.Philox(key=count)).standard_normal(count))
    assert count < 1 << 17 or (np.abs(drawn) > numpy_layers().tail).sum() > 10  # of the tail


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_attempts_of_many_words_are_told_apart_wherever_they_touch(share):
    """Words that need more words stand side by side here, 30% or 90% of them, instead of 1.5%."""
    rng = np.random.Generator(np.random.Philox(key=6))
    words = rng.bit_generator.random_raw(40_000)
    slow = rng.random(len(words)) < share
    slow_words = words | np.uint64(2**61 - 2**49)  # the whole number within 2^-12 of its largest
    of_layer_0 = rng.random(len(words)) < 0.3
    words = np.where(slow, np.where(of_layer_0, slow_words & np.uint64(2**64 - 256), slow_words), words)
    np.testing.assert_allclose(from_words(words, 2000), one_after_the_other(words, 2000), rtol=1e-15, atol=0)


def test_words_that_end_too_soon_are_noticed():
    with pytest.raises(AssertionError, match="too few words"):
        from_words(np.random.Philox(key=1).random_raw(1000), 1000)


def test_the_layers_are_a_ziggurat():
    layers = numpy_layers()
    ends = layers.units[:256] * 2.0**52
    assert layers.tail == ends[-1] == pytest.approx(3.6541528853610088, rel=1e-15)  # Marsaglia and Tsang, 2000
    area = 0.00492867323399  # of each layer, the same
    assert ends[1:] * (layers.heights[:-1] - layers.heights[1:]) == pytest.approx(np.full(255, area), rel=1e-9)
    tail = math.sqrt(math.pi / 2) * math.erfc(layers.tail / math.sqrt(2))
    assert layers.tail * layers.heights[-1] + tail == pytest.approx(area, rel=1e-9)
    assert ends[0] * layers.heights[-1] == pytest.approx(area, rel=1e-9)
    assert layers.limits[2:256] * 2.0**-52 == pytest.approx(ends[1:-1] / ends[2:], abs=1e-13)
    np.testing.assert_array_equal(layers.units[256:], -layers.units[:256])


def test_another_way_of_drawing_is_refused_instead_of_used(monkeypatch):
    usual = normal_numbers._numpy_with_chosen_words()
    other = lambda word: (usual(word)[0] * (1 + 1e-9 * (word & 255)), 1)  # noqa: E731
    monkeypatch.setattr(normal_numbers, "_numpy_with_chosen_words", lambda: other)
    numpy_layers.cache_clear()
    with pytest.raises(RunError, match=r"NumPy .* does not draw normal numbers by the ziggurat that clipline knows"):
        numpy_layers()
    monkeypatch.undo()
    numpy_layers.cache_clear()
    assert numpy_layers().limits[1] == 0


def test_the_tail_goes_as_far_as_is_said():
    """The height is at most 53 ln 2, and must be above half the square of what is beyond 3.65."""
    most = math.sqrt(2 * 53 * math.log(2))  # 8.57
    words = np.full(600, 2**64 - 512, np.uint64)  # an attempt in the tail, then the greatest height
    numbers = []
    for beyond in (most - 1e-3, most + 1e-3):
        words[1] = int((1 - math.exp(-beyond * numpy_layers().tail)) * 2**53) << 11
        numbers.append(abs(from_words(words, 1)[0]))
    assert numbers[0] == pytest.approx(12.225, abs=0.02)
    assert not numbers[1] > 12.3  # refused


# The law --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many():
    """2^23 numbers from words of another generator with a fixed seed."""
    words = np.random.Generator(np.random.SFC64(7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(normal_numbers, "_random_bytes", words.bytes)
        return SystemNormal().standard_normal(1 << 23)


def test_moments_are_those_of_the_normal_law(many):
    # Means of powers deviate by sqrt((E x^2k - (E x^k)^2) / n); 6 deviations: once in 5e8, four times.
    power = np.ones(1 << 21)
    for mean, variance in ((0, 1), (1, 2), (0, 15), (3, 96)):
        power *= many[: len(power)]
        assert abs(power.mean() - mean) < 6 * math.sqrt(variance / len(power))


def test_the_whole_law_is_normal(many):
    assert stats.kstest(many[: 1 << 19], "norm").pvalue > 1e-6  # Kolmogorov and Smirnov


def test_tails_are_as_heavy_as_they_should_be(many):
    """4.8 of 2^23 numbers are expected beyond 5 deviations, 531 beyond 4; a false alarm once in a million each."""
    far = many[np.abs(many) > 3]
    for found, expected in [
        *(((np.abs(far) > beyond).sum(), 2 * stats.norm.sf(beyond)) for beyond in (3.0, 3.6, 3.7, 4.0, 4.5, 5.0)),
        *(((sign * far > beyond).sum(), stats.norm.sf(beyond)) for sign in (1, -1) for beyond in (3.0, 3.7, 4.0)),
    ]:
        assert stats.poisson.cdf(found, expected * len(many)) > 5e-7
        assert stats.poisson.sf(found - 1, expected * len(many)) > 5e-7


def test_a_number_tells_nothing_of_those_near_it(many):
    part = many[: 1 << 20]
    for apart in (1, 2, 3, 4, 8, 127, 128, 8192):
        first, second = part[:-apart], part[apart:]
        for one, other in ((first, second), (first**2 - 1, second**2 - 1), (first, second**2 - 1)):
            product = one * other
            assert abs(product.mean()) < 6 * product.std() / math.sqrt(len(product))  # 24 times once in 5e8


# From the system ------------------------------------------------------------------------------------------------------


def test_noise_of_the_system_is_normal_and_never_the_same():
    first, again = SystemNormal().standard_normal(50_000), SystemNormal().standard_normal(50_000)
    assert not np.isin(first, again).any()
    for drawn in (first, again):  # not from a seed: 8 deviations fail once in 1e15 runs
        assert abs(drawn.mean()) < 8 / math.sqrt(50_000)
        assert abs((drawn**2).mean() - 1) < 8 * math.sqrt(2 / 50_000)


def test_noise_of_the_system_fills_what_it_is_given_from_several_threads():
    numbers = np.full(100_000, np.nan)
    source = SystemNormal()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: source.standard_normal(out=part), np.split(numbers, 4)))
    assert np.isfinite(numbers).all()
    assert len(np.unique(numbers)) == len(numbers)
    assert SystemNormal().part(3).standard_normal().shape == (1,)
    assert SystemNormal().standard_normal(0).shape == (0,)


# From a key -----------------------------------------------------------------------------------------------------------


def test_words_from_a_key_are_those_of_shake_256_and_the_numbers_numpys_of_them():
    """The first block is FIPS 202's example of 1600 bits 0xA3, by which the implementation is known to be right."""
    assert hashlib.shake_256(b"\xa3" * 200).hexdigest(16) == "cd8a920ed141aa0407a22d59288652e9"
    key = bytes(range(32))
    text = key + (5).to_bytes(8, "little") + (1).to_bytes(8, "little")  # key, part, number of the call
    source = KeyedNormal(key).part(5)
    source.words(3)
    np.testing.assert_array_equal(source.words(9), np.frombuffer(hashlib.shake_256(text).digest(72), np.uint64))
    words = KeyedNormal(key).words(words_for(2000))
    np.testing.assert_array_equal(KeyedNormal(key).standard_normal(2000), from_words(words, 2000))


def test_noise_from_a_key_is_normal_and_that_of_another_part_or_key_is_another():
    key, changed = bytes(32), bytes(31) + b"\1"
    drawn = [one.standard_normal(50_000) for one in (KeyedNormal(key), KeyedNormal(key, 1), KeyedNormal(changed))]
    for numbers in drawn:  # fixed keys: 5 deviations
        assert stats.kstest(numbers, "norm").pvalue > 1e-6
        assert abs(numbers.mean()) < 5 / math.sqrt(50_000)
    assert len(np.unique(np.concatenate(drawn))) == 150_000
    np.testing.assert_array_equal(KeyedNormal(key).standard_normal(50_000), drawn[0])
