import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch

from clipline.engine.prefetch import BackgroundNoise, Prefetch
from clipline.errors import RunError
from clipline.federated.draws import PART, NoiseNow, PlainDraws
from clipline.federated.sampling import FixedSizeSampler, PoissonSampler
from clipline.random.streams import Streams

COUNT = 3 * PART + 5


def numbers(round_index=0, count=COUNT):
    return NoiseNow(Streams(4).noise(round_index), count).numbers()


@pytest.mark.parametrize("count", [0, 1, 19, PART - 1, PART])
def test_few_numbers_are_those_that_the_generator_would_draw(count):
    drawn = numbers(count=count)
    assert drawn.dtype == torch.float64
    np.testing.assert_array_equal(drawn.numpy(), Streams(4).noise(0).standard_normal(count))


def test_every_further_part_comes_from_the_generator_so_many_jumps_ahead():
    drawn = numbers().numpy()
    assert len(drawn) == COUNT
    for part in range(4):
        length = min(PART, COUNT - part * PART)
        ahead = np.random.Generator(Streams(4).noise(0).bit_generator.jumped(part))
        np.testing.assert_array_equal(drawn[part * PART :][:length], ahead.standard_normal(length))


def test_a_generator_that_cannot_jump_so_far_draws_all_numbers_itself():
    drawn = NoiseNow(np.random.default_rng(3), COUNT).numbers()
    np.testing.assert_array_equal(drawn.numpy(), np.random.default_rng(3).standard_normal(COUNT))


def test_the_numbers_are_standard_normal_in_every_part():
    for part in numbers()[: 3 * PART].view(3, PART):
        # means of k numbers deviate by 1/sqrt(k), squares by sqrt(2/k), fourth powers by sqrt(96/k): 6 deviations
        assert abs(float(part.mean())) < 6 / math.sqrt(PART)
        assert abs(float(part.square().mean()) - 1) < 6 * math.sqrt(2 / PART)
        assert abs(float(part.pow(4).mean()) - 3) < 6 * math.sqrt(96 / PART)


def test_parts_are_unrelated_also_where_one_is_shifted():
    parts = numbers()[: 3 * PART].view(3, PART)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for shift in (0, 1, 2, 1000):
            product = parts[first, shift:] * parts[second, : PART - shift]
            assert abs(float(product.mean())) < 6 / math.sqrt(len(product))


# Every kind of noise and of draws -------------------------------------------------------------------------------------

NOISE = [NoiseNow, partial(BackgroundNoise, threads=ThreadPoolExecutor(2))]
SAMPLER = PoissonSampler(1000, 50)
DRAWS = [
    lambda sampler=SAMPLER: PlainDraws(sampler, Streams(4), 18),
    lambda sampler=SAMPLER: Prefetch(sampler, Streams(4), 18, "cpu", until=10),
]


@pytest.mark.parametrize("kind", NOISE)
def test_noise_is_given_out_once_and_its_generator_does_not_draw_it_again(kind):
    rng = Streams(4).noise(0)
    noise = kind(rng, 50)
    drawn = noise.numbers()
    assert not np.isin(rng.standard_normal(200), drawn.numpy()).any()
    with pytest.raises(RunError, match="noise was asked for twice but hides one release only"):
        noise.numbers()


@pytest.mark.parametrize("make", DRAWS)
@pytest.mark.parametrize("sampler", [SAMPLER, FixedSizeSampler(1000, 50)])
def test_cohort_and_noise_are_those_of_the_rounds_own_streams(make, sampler):
    draws = make(sampler)
    for t in (0, 1, 5, 9):
        cohort, noise = draws.take(t)
        expected = sampler.draw(Streams(4).sampling(t))
        np.testing.assert_array_equal(cohort.users, expected.users)
        assert cohort.sampling == expected.sampling
        np.testing.assert_array_equal(noise.numbers().numpy(), Streams(4).noise(t).standard_normal(19))


@pytest.mark.parametrize("make", DRAWS)
@pytest.mark.parametrize("ahead", [(), (3,), (3, 3), (4,), (4, 3), (0, 9, 3), (10, 3), (3, 10)])
def test_whatever_was_begun_before_a_round_draws_the_same(make, ahead):
    draws = make()
    for t in ahead:
        draws.prefetch(t)
    cohort, noise = draws.take(3)
    np.testing.assert_array_equal(cohort.users, SAMPLER.draw(Streams(4).sampling(3)).users)
    np.testing.assert_array_equal(noise.numbers().numpy(), Streams(4).noise(3).standard_normal(19))


@pytest.mark.parametrize("make", DRAWS)
def test_a_round_that_is_drawn_again_has_the_same_cohort_and_new_noise_to_give(make):
    draws = make()
    (first, noise), (again, other) = draws.take(2), draws.take(2)
    np.testing.assert_array_equal(first.users, again.users)
    assert noise is not other
    assert torch.equal(noise.numbers(), other.numbers())


@pytest.mark.parametrize("kind", [PlainDraws, lambda *args: Prefetch(*args, "cpu", until=10)])
def test_system_noise_is_never_drawn_again(kind):
    draws = kind(SAMPLER, Streams(4, "system"), 18)
    draws.take(0)[1].numbers()
    with pytest.raises(RunError, match="the noise of round 0 was drawn before"):
        draws.take(0)[1].numbers()
