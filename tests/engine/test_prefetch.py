import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from samples import LOCAL, cross_entropy, flat_training, linear_model, small_population

from clipline import PoissonSampler
from clipline.engine import prefetch
from clipline.engine.prefetch import BackgroundNoise, Prefetch
from clipline.federated.draws import PART, NoiseNow
from clipline.streams import Streams

COUNT = 3 * PART + 5


@pytest.mark.parametrize("count", [0, 1, 19, PART, COUNT])
def test_numbers_drawn_in_the_background_are_those_drawn_now(count):
    drawn = BackgroundNoise(Streams(4).noise(0), count).numbers()
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn, NoiseNow(Streams(4).noise(0), count).numbers())


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_numbers_do_not_depend_on_the_number_of_threads(threads):
    expected = NoiseNow(Streams(4).noise(0), COUNT).numbers()
    with ThreadPoolExecutor(threads) as pool:
        assert torch.equal(BackgroundNoise(Streams(4).noise(0), COUNT, threads=pool).numbers(), expected)


@pytest.fixture
def begun(monkeypatch):
    """Of all noise: the key of its generator, and how many numbers."""
    seen = []

    def counted(rng, count, device, **how):
        seen.append((rng.bit_generator.state["state"]["key"].tolist(), count))
        return BackgroundNoise(rng, count, device, **how)

    monkeypatch.setattr(prefetch, "BackgroundNoise", counted)
    return seen


def keys(rounds, seed=0):
    return [Streams(seed).noise(t).bit_generator.state["state"]["key"].tolist() for t in rounds]


def test_every_round_draws_once_and_from_its_own_stream(begun, monkeypatch):
    monkeypatch.setattr("clipline.federated.mechanism.NoiseNow", None)  # not drawn a second time on release
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5}
    flat_training(linear_model(), cross_entropy, small_population(), **settings).run()
    assert [count for _, count in begun] == [19] * 4  # none for a round that does not come
    assert [key for key, _ in begun] == keys(range(4))


def test_a_round_that_the_budget_does_not_allow_is_not_drawn(begun):
    settings = {"rounds": 6, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5}
    limit = flat_training(linear_model(), cross_entropy, small_population(), **{**settings, "rounds": 2}).planned
    run = flat_training(linear_model(), cross_entropy, small_population(), **settings, max_epsilon=limit.epsilon)
    assert len(run.run().reports) == 2
    assert [key for key, _ in begun] == keys(range(2))


def test_what_was_begun_is_taken_and_only_one_round_is_held(begun):
    draws = Prefetch(PoissonSampler(100, 10), Streams(0), 18, "cpu", until=3)
    draws.prefetch(1)
    draws.take(1)
    draws.prefetch(2)
    draws.prefetch(3)  # does not come
    draws.take(2)
    assert [key for key, _ in begun] == keys([1, 2])
    draws.prefetch(1)
    draws.prefetch(2)
    assert len(draws._drawn) == 1


def noise_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("clipline-noise")]


def test_threads_start_with_the_first_draw_and_end_when_the_draws_are_closed():
    before = noise_threads()
    draws = Prefetch(PoissonSampler(100, 10), Streams(0), COUNT, "cpu", until=3)
    assert noise_threads() == before
    _, noise = draws.take(0)
    draws.prefetch(1)
    assert len(noise_threads()) > len(before)
    draws.close()
    assert noise_threads() == before
    assert len(noise.numbers()) == COUNT + 1  # what was taken before is still there


def test_noise_alone_ends_its_own_threads():
    before = noise_threads()
    BackgroundNoise(Streams(0).noise(0), COUNT).numbers()
    until = time.monotonic() + 10
    while noise_threads() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert noise_threads() == before
