import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from clipline.federated.noise import _PART, Noise
from samples import LOCAL, cross_entropy, linear_model, small_population

from clipline import Training
from clipline.federated import noise as noise_module
from clipline.streams import Streams

COUNT = 3 * _PART + 5


def numbers(round_index=0, count=COUNT):
    return Noise(Streams(4).noise(round_index), count).numbers()


@pytest.mark.parametrize("count", [0, 1, 19, _PART - 1, _PART])
def test_few_numbers_are_those_that_the_generator_would_draw(count):
    drawn = numbers(count=count)
    assert drawn.dtype == torch.float64
    np.testing.assert_array_equal(drawn.numpy(), Streams(4).noise(0).standard_normal(count))


def test_every_further_part_comes_from_the_generator_so_many_jumps_ahead():
    drawn = numbers().numpy()
    assert len(drawn) == COUNT
    for part in range(4):
        length = min(_PART, COUNT - part * _PART)
        ahead = np.random.Generator(Streams(4).noise(0).bit_generator.jumped(part))
        np.testing.assert_array_equal(drawn[part * _PART :][:length], ahead.standard_normal(length))


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_numbers_do_not_depend_on_the_number_of_threads(threads, monkeypatch):
    expected = numbers()
    with ThreadPoolExecutor(threads) as pool:
        monkeypatch.setattr(noise_module, "_threads", lambda: pool)
        assert torch.equal(numbers(), expected)


def test_no_number_is_missed_or_repeated_and_rounds_differ():
    drawn = numbers()
    assert drawn.isfinite().all()
    assert len(drawn.unique()) > COUNT - 5  # of 53-bit numbers hardly two are equal
    assert not (drawn == numbers(1)).any()


def test_the_numbers_are_standard_normal_in_every_part():
    for part in numbers()[: 3 * _PART].view(3, _PART):
        # means of k numbers deviate by 1/sqrt(k), squares by sqrt(2/k), fourth powers by sqrt(96/k): 6 deviations
        assert abs(float(part.mean())) < 6 / math.sqrt(_PART)
        assert abs(float(part.square().mean()) - 1) < 6 * math.sqrt(2 / _PART)
        assert abs(float(part.pow(4).mean()) - 3) < 6 * math.sqrt(96 / _PART)


def test_parts_are_unrelated_also_where_one_is_shifted():
    parts = numbers()[: 3 * _PART].view(3, _PART)
    for first, second in ((0, 1), (0, 2), (1, 2)):
        for shift in (0, 1, 2, 1000):
            product = parts[first, shift:] * parts[second, : _PART - shift]
            assert abs(float(product.mean())) < 6 / math.sqrt(len(product))


def test_a_generator_that_has_made_noise_does_not_draw_it_again():
    rng = Streams(4).noise(0)
    drawn = Noise(rng, 50).numbers()
    assert not np.isin(rng.standard_normal(200), drawn.numpy()).any()


def test_every_round_draws_once_and_from_its_own_stream(monkeypatch):
    begun = []

    class Counted(Noise):
        def __init__(self, rng, count, device):
            begun.append((rng.bit_generator.state["state"]["key"].tolist(), count))
            super().__init__(rng, count, device)

    monkeypatch.setattr("clipline.federated.draws.Noise", Counted)
    monkeypatch.setattr("clipline.federated.mechanism.Noise", None)  # not drawn a second time on release
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5}
    run = Training(linear_model(), cross_entropy, small_population(), **settings)
    run.run()
    assert [count for _, count in begun] == [19] * 4  # none for a round that does not come
    keys = [Streams(0).noise(t).bit_generator.state["state"]["key"].tolist() for t in range(4)]
    assert [key for key, _ in begun] == keys
