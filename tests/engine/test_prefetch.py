"""Draws in the background are those of `PlainDraws`, to the last bit: they come earlier, and nothing else differs."""

import copy
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from samples import (
    LOCAL,
    cross_entropies,
    cross_entropy,
    flat_training,
    linear_model,
    one_round,
    population_of,
    small_population,
)

from clipline import FixedClip, QuantileClip
from clipline.engine import prefetch
from clipline.engine.prefetch import BackgroundNoise, Prefetch
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.single import SingleProcess
from clipline.errors import RunError
from clipline.federated.draws import PART, NoiseNow, PlainDraws
from clipline.federated.sampling import FixedSizeSampler, PoissonSampler
from clipline.random.streams import Streams
from clipline.training import loop
from clipline.training.callbacks import Callback

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


# Cohort and noise of a round ------------------------------------------------------------------------------------------


def draws(kind, sampler, seed=3, dim=18, until=10):
    plain = PlainDraws(sampler, Streams(seed), dim)
    return plain if kind == "plain" else Prefetch(sampler, Streams(seed), dim, "cpu", until)


@pytest.mark.parametrize("dim", [1, 18, PART - 1, PART, 2 * PART + 3])  # below, at and above one part
@pytest.mark.parametrize("sampler", [PoissonSampler(1000, 50), FixedSizeSampler(1000, 50)], ids=["poisson", "fixed"])
def test_cohorts_and_noise_are_those_of_plain_draws_to_the_last_bit(sampler, dim):
    ours, plain = (draws(kind, sampler, dim=dim) for kind in ("prefetch", "plain"))
    for t in range(3):
        (cohort, noise), (expected, numbers) = ours.take(t), plain.take(t)
        ours.prefetch(t + 1)
        plain.prefetch(t + 1)
        assert np.array_equal(cohort.users, expected.users)
        assert cohort.sampling == expected.sampling
        found = noise.numbers()
        assert found.dtype == torch.float64
        assert torch.equal(found, numbers.numbers())


@pytest.mark.parametrize("kind", ["prefetch", "plain"])
def test_the_numbers_of_a_round_are_given_out_once(kind):
    made = draws(kind, PoissonSampler(100, 10))
    made.prefetch(2)
    _, noise = made.take(2)
    noise.numbers()
    with pytest.raises(RunError, match="noise was asked for twice but hides one release only"):
        noise.numbers()


def test_what_was_drawn_for_a_round_is_given_out_once(begun):
    made = draws("prefetch", PoissonSampler(100, 10), seed=0)
    made.prefetch(2)
    (first, noise), (again, other) = made.take(2), made.take(2)
    assert len(begun) == 2  # a second taker gets a drawing of its own
    assert noise is not other
    assert np.array_equal(first.users, again.users)
    assert torch.equal(noise.numbers(), other.numbers())


@dataclass(frozen=True)
class Watched:
    """A sampler that counts its draws."""

    inner: PoissonSampler
    drawn: list = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def draw(self, rng, round_index):
        cohort = self.inner.draw(rng, round_index)
        self.drawn.append(cohort.users.tolist())
        return cohort


def small_training(**changes):
    settings = {"rounds": 6, "cohort_size": 9, "seed": 5, "local": LOCAL, "noise_multiplier": 0.5, **changes}
    population = population_of([3] * 40, features=16)
    return flat_training(linear_model(16), cross_entropies, population, **settings)


@pytest.mark.parametrize("until", [4, 6])
def test_nothing_is_drawn_for_a_round_that_does_not_come(begun, until):
    watched = Watched(PoissonSampler(100, 10))
    made = Prefetch(watched, Streams(0), 18, "cpu", until)
    for t in range(until):
        made.take(t)
        made.prefetch(t + 1)
    assert len(watched.drawn) == len(begun) == until
    assert not made._drawn


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
def test_every_round_trains_the_cohort_that_was_drawn_for_it_once(source):
    training = small_training(noise_source=source)
    watched = Watched(training.algorithm.sampler)
    training.algorithm = replace(training.algorithm, sampler=watched)
    training.backend = watching = Watching(training.backend)
    training.run()
    assert watching.came == list(enumerate(watched.drawn))
    assert [t for t, _ in watching.came] == [0, 1, 2, 3, 4, 5]
    assert len({tuple(users) for _, users in watching.came}) == 6
    sampler, streams = watched.inner, training.problem.runs[0].streams
    anew = [(t, sampler.draw(streams.sampling(t)).users.tolist()) for t in range(6)]
    assert (watching.came == anew) == (source == "seed")


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


def test_a_round_from_another_state_draws_the_cohort_and_noise_of_that_round():
    training = small_training()
    streams = training.problem.runs[0].streams
    shared = Prefetch(training.algorithm.sampler, streams, training.dim, "cpu", training.rounds)
    states = [training.init()]
    for _ in range(4):
        states.append(one_round(training, states[-1])[0])
    for number in (0, 1, 2, 0, 3, 1, 1, 2):  # each has prefetched for the round after it, whether that comes or not
        state, release = loop.one_round(training.algorithm, states[number], shared, training.backend)
        assert torch.equal(state.params, states[number + 1].params)
        assert state.clip == states[number + 1].clip
        assert release.fraction_within is not None


class StopAfter(Callback):
    """Asks the run to stop after a round."""

    stop_requested = False

    def __init__(self, round_index):
        self._last = round_index

    def on_round(self, report, state):
        self.stop_requested = report.round_index >= self._last


@pytest.mark.parametrize("callbacks", [[], [StopAfter(2)]], ids=["to the end", "stopped"])
def test_a_training_keeps_nothing_of_what_its_run_has_drawn(callbacks):
    training = small_training()
    result = training.run(callbacks)
    assert len(result.reports) == (3 if callbacks else 6)
    again = copy.deepcopy(training)  # the threads that draw could not be copied
    assert torch.equal(again.run(state=result.state).state.params, training.run(state=result.state).state.params)
    assert torch.equal(training.run().state.params, again.run().state.params)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_forked_process_draws_with_threads_of_its_own():
    expected = NoiseNow(Streams(4).noise(0), COUNT).numbers()
    BackgroundNoise(Streams(4).noise(0), COUNT).numbers()  # threads that a child does not have
    reader, writer = os.pipe()
    child = multiprocessing.get_context("fork").Process(
        target=lambda: os.write(
            writer, bytes([torch.equal(BackgroundNoise(Streams(4).noise(0), COUNT).numbers(), expected)])
        )
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert os.read(reader, 1) == bytes([True])


# Threads --------------------------------------------------------------------------------------------------------------


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


def test_noise_by_itself_ends_its_own_threads():
    before = noise_threads()
    BackgroundNoise(Streams(0).noise(0), COUNT).numbers()
    until = time.monotonic() + 10
    while noise_threads() != before and time.monotonic() < until:
        time.sleep(0.01)
    assert noise_threads() == before
