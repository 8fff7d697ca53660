"""Draws in the background are those of `PlainDraws`, to the last bit: they come earlier, and nothing else differs."""

import copy
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from samples import LOCAL, Observer, StopAfter, cross_entropies, flat_training, linear_model, one_round, population_of

from clipline import FixedClip, QuantileClip
from clipline.engine import prefetch
from clipline.engine.prefetch import BackgroundNoise, Prefetch
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.single import SingleProcess
from clipline.errors import RunError
from clipline.federated.draws import PART, NoiseNow, PlainDraws
from clipline.federated.sampling import FixedSizeSampler, PoissonSampler
from clipline.random.streams import Streams

COUNT = 3 * PART + 5


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, PART, COUNT])
def test_numbers_drawn_by_any_number_of_threads_are_those_drawn_now(count, threads):
    with ThreadPoolExecutor(threads) as pool:
        drawn = BackgroundNoise(Streams(4).noise(0), count, threads=pool).numbers()
    assert drawn.dtype == torch.float64
    assert torch.equal(drawn, NoiseNow(Streams(4).noise(0), count).numbers())


@pytest.fixture
def begun(monkeypatch):
    """Of all noise: the key of its generator, and how many numbers."""
    seen = []

    def counted(rng, count, device, **how):
        seen.append((rng.bit_generator.state["state"]["key"].tolist(), count))
        return BackgroundNoise(rng, count, device, **how)

    monkeypatch.setattr(prefetch, "BackgroundNoise", counted)
    return seen


def keys(rounds, seed=5):
    return [Streams(seed).noise(t).bit_generator.state["state"]["key"].tolist() for t in rounds]


def test_every_round_draws_once_from_its_own_stream_and_none_that_does_not_come(begun, monkeypatch):
    monkeypatch.setattr("clipline.federated.mechanism.NoiseNow", None)  # not drawn a second time on release
    small_training(rounds=4).run()
    assert begun == [(key, 16 * 3 + 1) for key in keys(range(4))]
    begun.clear()
    run = small_training(max_epsilon=small_training(rounds=2).planned.epsilon)
    assert len(run.run().reports) == 2  # the budget allows no third
    assert [key for key, _ in begun] == keys(range(2))


def test_what_was_begun_is_taken_and_only_one_round_is_held(begun):
    draws = Prefetch(PoissonSampler(100, 10), Streams(5), 18, "cpu", until=3)
    draws.prefetch(1)
    draws.take(1)
    draws.prefetch(2)
    draws.prefetch(3)  # does not come
    draws.take(2)
    assert [key for key, _ in begun] == keys([1, 2])
    draws.prefetch(1)
    draws.prefetch(2)
    assert len(draws._drawn) == 1


# Cohort and noise of a round ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [1, 18, PART - 1, PART, 2 * PART + 3])  # below, at and above one part
@pytest.mark.parametrize("sampler", [PoissonSampler(1000, 50), FixedSizeSampler(1000, 50)], ids=["poisson", "fixed"])
def test_cohorts_and_noise_are_those_of_plain_draws_to_the_last_bit(sampler, dim):
    ours, plain = Prefetch(sampler, Streams(3), dim, "cpu", until=10), PlainDraws(sampler, Streams(3), dim)
    for t in range(3):
        (cohort, noise), (expected, numbers) = ours.take(t), plain.take(t)
        ours.prefetch(t + 1)
        plain.prefetch(t + 1)
        assert np.array_equal(cohort.users, expected.users)
        assert cohort.sampling == expected.sampling
        found = noise.numbers()
        assert found.dtype == torch.float64
        assert torch.equal(found, numbers.numbers())
        for one in (noise, numbers):
            with pytest.raises(RunError, match="noise was asked for twice but hides one release only"):
                one.numbers()


def small_training(**changes):
    settings = {"rounds": 6, "cohort_size": 9, "seed": 5, "local": LOCAL, "noise_multiplier": 0.5, **changes}
    population = population_of([3] * 40, features=16)
    return flat_training(linear_model(16), cross_entropies, population, **settings)


class Watching:
    """A backend that notes who comes."""

    def __init__(self, inner):
        self.inner, self.size, self.came = inner, inner.size, []

    def running(self):
        return self.inner.running()

    def sums(self, requests):
        self.came += [(one.round_index, one.cohort.users.tolist()) for one in requests]
        return self.inner.sums(requests)


@pytest.mark.parametrize("source", ["seed", "system"])
def test_every_round_trains_a_cohort_of_its_own_once(source):
    training, keys = small_training(noise_source=source), []
    training.backend = watching = Watching(training.backend)
    training.run([Observer(lambda report, state: keys.append(training.key.unprivate_bytes))])
    assert [t for t, _ in watching.came] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(users) for _, users in watching.came}) == 6
    sampler, streams = training.algorithm.sampler, training.problem.runs[0].streams
    streams.key.restore(keys[0])
    anew = [(t, sampler.draw(streams.sampling(t)).users.tolist()) for t in range(6)]
    assert watching.came == anew  # under the same key too


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("clip", [QuantileClip(), FixedClip(0.5)])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_is_what_its_rounds_are_one_at_a_time_without_anything_ahead(uncompiled, clip, compiled):
    """From the parameters that the server has just made, and clipped by the clip that the round before has made."""

    def made():
        training = small_training(clip=clip, noise_multiplier=0.3)
        training.backend = SingleProcess(Stacked(training.one_by_one, 9, block_size=48, compiled=compiled))
        return training

    result, plain = made().run(), made()
    state = plain.init()
    for _ in range(6):
        state, _ = one_round(plain, state)
    assert torch.equal(result.state.params, state.params)
    assert result.state.clip == state.clip


@pytest.mark.parametrize("callbacks", [[], [StopAfter(3)]], ids=["to the end", "stopped"])
def test_a_training_keeps_nothing_of_what_its_run_has_drawn(callbacks):
    training = small_training()
    result = training.run(callbacks)
    assert len(result.reports) == (3 if callbacks else 6)
    again = copy.deepcopy(training)  # the threads that draw could not be copied
    assert torch.equal(again.run(state=result.state).state.params, training.run(state=result.state).state.params)
    assert torch.equal(training.run().state.params, again.run().state.params)
