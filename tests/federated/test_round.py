import gc
import math
import weakref
from dataclasses import dataclass, replace
from types import GeneratorType

import numpy as np
import pytest
import torch
from samples import aggregate, small_population

from clipline import FixedClip, QuantileClip, ServerSGD
from clipline.engine.core.updates import Dense, Updates
from clipline.federated.clip_controllers import ClipState
from clipline.federated.draws import PlainDraws
from clipline.federated.mechanism import GaussianMechanism, Release
from clipline.federated.round import Algorithm, TrainState
from clipline.federated.sampling import PoissonSampler
from clipline.privacy.events import GaussianEvent, PoissonSampling
from clipline.random.streams import Streams, user_order

DIM, COHORT, NOISE, START = 18, 20, 0.3, 0.02
STREAMS = Streams(7)


def algorithm(population_size=60, **changes):
    parts = {
        "sampler": PoissonSampler(population_size, COHORT),
        "mechanism": GaussianMechanism(COHORT, NOISE, COHORT / 20),
        "server": ServerSGD(0.7, 0.9),
        "controller": QuantileClip(0.5, START, 0.2),
    }
    return Algorithm(**{**parts, **changes})


def draws_of(made):
    return PlainDraws(made.sampler, STREAMS, DIM)


def params():
    return torch.zeros(DIM, dtype=torch.float64)


def summed(request, deltas, clip=None):
    """What a backend gives for these updates, (users, DIM)."""
    clip = request.clip if clip is None else clip
    return aggregate([Updates([Dense(0, deltas)])], clip, DIM, request.cohort.sampling)


def some(request):
    """Updates of the cohort's users that depend on the parameters and the user alone."""
    rng = np.random.default_rng(0)
    table = torch.from_numpy(rng.normal(size=(1000, DIM))) / 50
    return table[request.cohort.users] - request.params / 10


def ended(going, total):
    """What a round returns once it has its sum."""
    with pytest.raises(StopIteration) as end:
        going.send(total)
    return end.value.value


def rounds(made, count, deltas=some):
    """States and releases of so many rounds."""
    state, draws = made.init(params()), draws_of(made)
    for _ in range(count):
        going = made.round(state, draws)
        request = next(going)
        state, release = ended(going, summed(request, deltas(request)))
        yield request, state, release


@pytest.mark.parametrize("rule", ["geometric", "linear"])
def test_rounds_with_sums_made_by_hand_are_those_of_the_plain_algorithm(reference, rule):
    """No engine: the users of each request train in NumPy, so that only the round itself is compared."""
    population = small_population()
    data = [tuple(population.of(user).values()) for user in range(len(population))]

    def gradient(params, x, y):
        return reference.softmax_gradient(params, x, y, 3)

    def order(t, user, count):
        return user_order(STREAMS.user_key("order/0", t, int(user)), count)

    def deltas(request):
        begin, t = request.params.numpy(), request.round_index
        own = [
            reference.fed_avg(begin, data[user], gradient, order, t, user, 0.2, 8, math.inf)[0]
            for user in request.cohort.users
        ]
        return torch.from_numpy(np.array(own).reshape(-1, DIM))

    def noise(t):
        numbers = STREAMS.noise(t).standard_normal(DIM + 1)
        numbers[:-1] *= 1 + 2 * (16 * COHORT + 2100) * 2**-53 * (16 * COHORT + 1000)  # it covers the rounding of sums
        return numbers

    made = algorithm(controller=QuantileClip(0.5, START, 0.2, rule=rule))
    expected, history = reference.algorithm1(
        np.zeros(DIM), data, gradient, rounds=12, cohort_size=COHORT, draw_order=order, draw_noise=noise,
        draw_cohort=lambda t: made.sampler.draw(STREAMS.sampling(t)).users, noise_multiplier=NOISE,
        count_stddev=COHORT / 20, clip=START, clip_lr=0.2, rule=rule, client_lr=0.2, batch_size=8, server_lr=0.7,
    )  # fmt: skip
    ours = list(rounds(made, 12, deltas))
    assert np.abs(expected).max() > 0.05  # something was learnt
    np.testing.assert_allclose(ours[-1][1].params.numpy(), expected, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose([request.clip for request, _, _ in ours], [clip for clip, _ in history], rtol=1e-10)
    fractions = [release.fraction_within for _, _, release in ours]
    np.testing.assert_allclose(fractions, [fraction for _, fraction in history], rtol=1e-9)


def test_a_round_asks_for_exactly_one_sum_and_returns_the_next_state():
    made = algorithm()
    state = made.init(params())
    going = made.round(state, draws_of(made))
    assert isinstance(going, GeneratorType)
    request = next(going)
    assert request.params is state.params
    assert (request.round_index, request.clip) == (0, START)
    np.testing.assert_array_equal(request.cohort.users, made.sampler.draw(STREAMS.sampling(0)).users)
    after, release = ended(going, summed(request, some(request)))  # and asks for nothing more
    assert isinstance(after, TrainState)
    assert isinstance(release, Release)
    assert after.round_index == 1
    assert list(after.ledger) == [release.event] == [made.event] == [GaussianEvent(PoissonSampling(1 / 3), NOISE)]


def test_a_round_alters_nothing_that_it_was_given():
    made = algorithm()
    state = made.init(params())
    going = made.round(state, draws_of(made))
    request = next(going)
    ended(going, summed(request, some(request)))
    assert not state.params.any()
    assert not any(tensor.any() for tensor in state.server.values())
    assert (state.round_index, state.clip, len(list(state.ledger))) == (0, ClipState(START), 0)


def test_the_noise_is_made_for_the_clip_that_clipped():
    """The sum says at which clip it was clipped; the clip of the request, or the next one, is not asked."""
    made = algorithm()
    for bound in (1.0, 1e3, 1e6):
        going = made.round(made.init(params()), draws_of(made))
        request = next(going)
        _, release = ended(going, summed(request, torch.zeros(0, DIM), clip=bound))
        numbers = torch.from_numpy(STREAMS.noise(0).standard_normal(DIM + 1))[:-1]
        stddev = (NOISE**-2 - (2 * COHORT / 20) ** -2) ** -0.5 * bound  # Theorem 1, times the clip
        torch.testing.assert_close(release.mean, stddev * numbers / COHORT, rtol=1e-5, atol=1e-5 * bound / COHORT)


@dataclass(frozen=True, eq=False)
class LoggedDraws:
    """Notes when it is asked for something."""

    inner: PlainDraws
    log: list[str]

    def take(self, round_index):
        self.log.append(f"take {round_index}")
        return self.inner.take(round_index)

    def prefetch(self, round_index):
        self.log.append(f"prefetch {round_index}")

    def close(self):
        pass


@dataclass(frozen=True, eq=False)
class LoggedController:
    """Notes when it computes a clip."""

    inner: QuantileClip
    log: list[str]

    @property
    def needs_fraction(self):
        return True

    def init(self):
        self.log.append("clip of round 0")
        return self.inner.init()

    def update(self, state, release):
        self.log.append(f"clip of round {state.round_index + 1}")
        return self.inner.update(state, release)


def test_the_clip_is_read_late_and_each_is_computed_once():
    log = []
    made = algorithm(controller=LoggedController(QuantileClip(), log))
    state, draws = made.init(params()), LoggedDraws(draws_of(made), log)
    for t in range(3):
        going = made.round(state, draws)
        request = next(going)
        log.append(f"sum {t}")
        total = summed(request, some(request))
        assert request.clip == state.clip.clip == request.clip
        state, _ = ended(going, total)
    assert log == [
        *("take 0", "sum 0", "clip of round 0", "prefetch 1"),
        *("take 1", "sum 1", "clip of round 1", "prefetch 2"),
        *("take 2", "sum 2", "clip of round 2", "prefetch 3"),
    ]
    assert state.clip.round_index == 3  # whoever wants it computes it
    assert log[-1] == "clip of round 3"


def test_a_round_whose_clip_nobody_may_read_yet_still_says_what_it_wants_summed():
    made = algorithm()

    def not_yet():
        raise AssertionError("the clip was read before the sum was asked for")

    state = replace(made.init(params()), read_clip=not_yet)
    request = next(made.round(state, draws_of(made)))
    with pytest.raises(AssertionError, match="before the sum was asked for"):
        _ = request.clip


@pytest.mark.parametrize("controller", [FixedClip(0.5), QuantileClip()])
def test_old_states_are_not_kept_alive(controller):
    """Each next clip is computed from the state before; once it has been, nothing holds that state."""
    made = algorithm(controller=controller)
    seen, kept = [], None
    for request, state, _ in rounds(made, 50):
        seen.append(weakref.ref(state.params))
        kept = state
        del request, state
    gc.collect()
    assert [ref() is not None for ref in seen[:-2]] == [False] * 48
    assert kept.params is seen[-1]()
    _ = kept.clip
    gc.collect()
    assert seen[-2]() is None
