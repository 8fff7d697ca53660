import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from clipline import SettingError
from clipline.engine.prefetch import BackgroundNoise
from clipline.errors import RunError
from clipline.federated.clipping import ClippedSum
from clipline.federated.draws import NoiseNow
from clipline.federated.mechanism import GaussianMechanism, grid_of, rounding_slack
from clipline.privacy.events import FixedSizeSampling, GaussianEvent
from clipline.random.streams import Streams

SAMPLING = FixedSizeSampling(100, 10_000)


def zero_sum(dim, bound):
    return ClippedSum(torch.zeros(dim + 1, dtype=torch.float64), bound, SAMPLING)


def test_the_released_noise_has_the_stated_deviation():
    mechanism = GaussianMechanism(cohort_size=100, noise_multiplier=1.0, count_stddev=5.0)
    bound, dim, draws = 0.37, 400, 500
    streams = Streams(2)
    releases = [mechanism.release(zero_sum(dim, bound), streams.noise(t)) for t in range(draws)]
    means = torch.stack([release.mean for release in releases]).numpy()
    stated = 1.00503781525921 * 0.37 / 100  # z_delta of Theorem 1 (hand arithmetic), the clip, the cohort
    # Standard error of a deviation from k draws is stddev / sqrt(2k); 5 of them fail by chance once in a million.
    assert means.std() == pytest.approx(stated, rel=5 / math.sqrt(2 * draws * dim))
    assert means.mean() == pytest.approx(0, abs=5 * stated / math.sqrt(draws * dim))
    fractions = np.array([release.fraction_within for release in releases])
    assert fractions.std() == pytest.approx(5.0 / 100, rel=5 / math.sqrt(2 * draws))
    assert fractions.mean() == pytest.approx(0.5, abs=5 * 0.05 / math.sqrt(draws))


def test_noise_of_coordinates_of_rounds_and_of_the_bit_is_independent():
    mechanism = GaussianMechanism(cohort_size=10, noise_multiplier=0.5, count_stddev=2.0)
    streams = Streams(4)
    rows = [mechanism.release(zero_sum(3, 1.0), streams.noise(t)) for t in range(3000)]
    table = np.array([[*row.mean.tolist(), row.fraction_within] for row in rows])
    neighbours = np.hstack([table[:-1], table[1:]])
    correlation = np.corrcoef(neighbours.T) - np.eye(8)
    # 28 correlations with deviation 1/sqrt(2999): the largest stays below 5 deviations, but once in 60,000 runs
    assert np.abs(correlation).max() < 5 / math.sqrt(2999)


@pytest.mark.parametrize("kind", [NoiseNow, partial(BackgroundNoise, threads=ThreadPoolExecutor(2))])
def test_noise_begun_before_is_the_noise_that_the_generator_would_give(kind):
    mechanism, zeros = GaussianMechanism(10, 0.5, 2.0), torch.zeros(8, dtype=torch.float64)
    total = ClippedSum(zeros, 1.3, SAMPLING)
    at_once = mechanism.release(total, Streams(4).noise(2))
    begun = mechanism.release(total, kind(Streams(4).noise(2), 8))
    numbers = Streams(4).noise(2).standard_normal(8)
    assert torch.equal(begun.mean, at_once.mean)
    assert begun.fraction_within == at_once.fraction_within == pytest.approx(0.5 + 2.0 * numbers[7] / 10, abs=2e-7)
    stddev = (0.5**-2 - 4.0**-2) ** -0.5 * 1.3  # Theorem 1, times the clip: 0.655, so that the grid is 2^-21
    np.testing.assert_allclose(begun.mean.numpy(), stddev * numbers[:7] / 10, rtol=0, atol=2**-22 / 10 + 1e-15)
    assert not zeros.any()  # and the sum itself is as it was


def test_without_noise_the_release_is_the_plain_mean_and_fraction():
    total = ClippedSum(torch.tensor([8.0, -4.0, 3.0], dtype=torch.float64), 1.0, SAMPLING)
    release = GaussianMechanism(20, 0.0, 0.0).release(total, Streams(0).noise(0))
    assert release.mean.tolist() == [0.4, -0.2]
    assert release.fraction_within == pytest.approx(3 / 20 + 0.5)
    assert release.event == GaussianEvent(SAMPLING, 0.0)


def test_a_long_sum_is_released_as_a_short_one_and_is_not_altered():
    dim = 3 * 65_536 + 7  # several parts and a rest
    total = torch.randn(dim + 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, mechanism = total.clone(), GaussianMechanism(cohort_size=7, noise_multiplier=0.5, count_stddev=2.0)
    release = mechanism.release(ClippedSum(total, 0.3, SAMPLING), Streams(5).noise(0))
    assert torch.equal(total, before)
    numbers = NoiseNow(Streams(5).noise(0), dim + 1).numbers()
    stddev = float(mechanism.delta_noise_multiplier) * 0.3  # about 0.15, so that the grid is 2^-23
    expected = (total[:-1] + stddev * numbers[:-1]) / 7
    torch.testing.assert_close(release.mean, expected, rtol=1e-9, atol=2**-24 / 7 + 1e-9)
    fraction = float(total[-1] + 2.0 * numbers[-1]) / 7 + 0.5
    assert release.fraction_within == pytest.approx(fraction, abs=2**-20 / 7 + 1e-14)


@pytest.mark.parametrize(
    ("stddev", "grid"), [(1.0, 2**-20), (1.999, 2**-20), (0.5, 2**-21), (3.0, 2**-19), (1e-9, 2**-50)]
)
def test_a_release_is_a_multiple_of_a_power_of_two_just_below_a_millionth_of_the_noise(stddev, grid):
    assert grid_of(stddev) == grid
    total = torch.randn(1000, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * stddev
    mechanism = GaussianMechanism(cohort_size=8, noise_multiplier=stddev)  # without a count, all of it on the updates
    release = mechanism.release(ClippedSum(total, 1.0, SAMPLING), Streams(2).noise(0))
    steps = release.mean * 8 / grid
    assert torch.equal(steps, steps.round())
    assert len(steps.unique()) == len(steps)  # fine enough to tell all of them apart
    count = GaussianMechanism(8, 0.1, 4.0).release(zero_sum(2, 1.0), Streams(2).noise(0))
    assert ((count.fraction_within - 0.5) * 8 * 2**18).is_integer()  # noise of 4 users: 2^2 times 2^-20


def test_values_that_only_one_neighbour_could_produce_do_not_occur():
    # Without a grid the low bits of most releases tell whether 0 or a third was under the noise.
    draws, grid = np.random.default_rng(0).standard_normal(2000), grid_of(1.0)
    for own in (0.0, 1 / 3):
        total = ClippedSum(torch.full((2001,), own, dtype=torch.float64), 1.0, SAMPLING)
        mean = GaussianMechanism(1, 1.0).release(total, np.random.default_rng(0)).mean.numpy()
        assert (np.mod(mean, grid) == 0).all()
        assert np.abs(mean - own - draws).max() <= grid / 2 + 1e-8


def test_a_fixed_clip_releases_no_bit_and_spends_all_of_z_on_the_update():
    mechanism = GaussianMechanism(20, 0.8)
    assert float(mechanism.delta_noise_multiplier) == 0.8
    assert mechanism.release(zero_sum(4, 1.0), Streams(0).noise(0)).fraction_within is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GaussianMechanism(100, 10.0, 5.0), "raise count_stddev or cohort_size, or lower noise_multiplier"),
        (lambda: GaussianMechanism(100, -1.0), "noise_multiplier=-1.0 must be a finite number at least 0"),
        (lambda: GaussianMechanism(100, math.nan), "noise_multiplier=nan"),
        (lambda: GaussianMechanism(0, 1.0), "cohort_size=0"),
        (lambda: GaussianMechanism(100, 1.0, -2.0), "count_stddev=-2.0"),
        (lambda: GaussianMechanism(100, 1e-310, 1e-300), "count_stddev=1e-300 must be a finite number at least 1e-200"),
    ],
)
def test_a_mechanism_refuses_what_makes_no_sense(make, words):
    with pytest.raises(SettingError) as error:
        make()
    assert words in str(error.value)


def test_noise_for_an_infinite_clip_does_not_exist():
    with pytest.raises(SettingError, match="clip=inf must be finite where noise is added"):
        GaussianMechanism(10, 1.0).release(zero_sum(2, math.inf), Streams(0).noise(0))
    release = GaussianMechanism(10, 0.0).release(zero_sum(2, math.inf), Streams(0).noise(0))
    assert release.mean.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("noise_multiplier", "bound", "stddev"),
    [(1.0, 1e-310, "1e-310"), (1e-200, 0.5, "5e-201"), (5e-324, 1e-30, "0.0"), (1e300, 1e30, "inf")],
)
def test_noise_that_would_vanish_or_overflow_is_refused_before_it_is_drawn(noise_multiplier, bound, stddev):
    class Untouched:
        def numbers(self):
            raise AssertionError("noise was drawn")

    mechanism = GaussianMechanism(10, noise_multiplier)
    with pytest.raises(SettingError) as error:
        mechanism.release(zero_sum(2, bound), Untouched())
    assert f"delta_noise_multiplier * clip={stddev} must be a finite number at least 1e-200" in str(error.value)


def test_the_smallest_clip_still_has_noise():
    """20 releases of one sum at the smallest clip are 20 different numbers, of the stated size."""
    mechanism, streams = GaussianMechanism(10, 1.0), Streams(0, "system")
    means = [float(mechanism.release(zero_sum(1, 1e-30), streams.noise(t)).mean[0]) for t in range(20)]
    assert len(set(means)) == 20
    assert np.std(means) == pytest.approx(1e-31, rel=0.8)  # 5 standard errors of 20 draws: once in a million


def test_noise_hides_one_release_and_must_be_as_long_as_the_sum():
    mechanism, noise = GaussianMechanism(9, 1.0), NoiseNow(Streams(0).noise(0), 6)
    mechanism.release(zero_sum(5, 1.0), noise)
    with pytest.raises(RunError, match="asked for twice"):
        mechanism.release(zero_sum(5, 1.0), noise)
    with pytest.raises(SettingError, match="noise=2 must be 6 numbers"):
        mechanism.release(zero_sum(5, 1.0), NoiseNow(Streams(0).noise(1), 2))


def test_no_count_lies_behind_a_release_without_one():
    total = ClippedSum(torch.arange(1.0, 5.0, dtype=torch.float64), 1.0, SAMPLING)
    release = GaussianMechanism(10, 1.0, None).release(total, np.random.default_rng(0))
    memory = torch.frombuffer(bytearray(release.mean.untyped_storage()), dtype=torch.float64)
    assert len(memory) == 4  # that of the count is there, as what is saved with a tensor is all of its memory
    assert memory[-1] == 0.0


def test_noise_covers_what_rounding_adds_to_the_distance_of_two_sums():
    # 100 users: up to 2600 of them in a sum, each number of which is rounded at most 3700 times, by 2^-53 of the sum.
    assert rounding_slack(100) == pytest.approx(2 * 3700 * 2600 / 2**53)
    mechanism = GaussianMechanism(100, 1.0)
    assert mechanism.delta_stddev(0.3) == pytest.approx(0.3 * (1 + 2.14e-9), rel=1e-11)
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(2600, 50))
    updates /= np.linalg.norm(updates, axis=1, keepdims=True)
    exact = np.array([math.fsum(column) for column in updates.T])
    for order in (np.arange(2600), rng.permutation(2600), np.argsort(np.abs(updates[:, 0]))):
        one_by_one = np.zeros(50)
        for user in order:
            one_by_one += updates[user]
        assert np.linalg.norm(one_by_one - exact) < rounding_slack(100) / 2
