import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from clipline import ServerAdam, ServerNormalised, ServerSGD, ServerYogi, SettingError
from clipline.federated.mechanism import MeanNoise, Release
from clipline.federated.server_optimisers import AVERAGE, AveragedServer, for_rounds, largest_fan_in, scheduled
from clipline.privacy.events import GaussianEvent, PoissonSampling

EVENT = GaussianEvent(PoissonSampling(0.1), 1.0)
OPTIMISERS = [
    ServerSGD(0.5), ServerSGD(1.0, momentum=0.0), ServerAdam(0.1), ServerYogi(0.1), ServerNormalised(0.1),
    scheduled(ServerNormalised(), rounds=9), AveragedServer(ServerNormalised(0.1)),
]  # fmt: skip


def release(mean, noise=None):
    return Release(torch.tensor(mean, dtype=torch.float64), lambda: None, lambda: True, EVENT, noise)


def run(optimiser, means, start=(0.0, 1.0), noises=None):
    params = torch.tensor(start, dtype=torch.float64)
    state = optimiser.init(params)
    for mean, noise in zip(means, noises or [None] * len(means), strict=True):
        params, state = optimiser.update(params, state, release(mean, noise))
    return params, state


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_model_moves_along_the_released_mean(optimiser):
    params, _ = run(optimiser, [[1.0, -1.0]])
    assert params[0] > 0
    assert params[1] < 1


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_an_update_alters_nothing_it_was_given(optimiser):
    params = torch.tensor([1.0, 2.0])
    state = optimiser.init(params)
    before = {name: tensor.clone() for name, tensor in state.items()}
    optimiser.update(params, state, release([1.0, 1.0]))
    assert params.tolist() == [1.0, 2.0]
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_momentum_by_hand():
    # momentum 1, then 0.9 * 1 + 2 = 2.9, then 0.9 * 2.9 - 1 = 1.61; params 0.5 * (1 + 2.9 + 1.61)
    params, state = run(ServerSGD(0.5, 0.9), [[1.0, 0.0], [2.0, 0.0], [-1.0, 0.0]])
    assert params.tolist() == pytest.approx([2.755, 1.0], rel=1e-12)
    assert state["momentum"].tolist() == pytest.approx([1.61, 0.0], rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_momentum_of_a_long_model_is_that_of_each_parameter(dtype):
    rng = torch.Generator().manual_seed(0)
    params, before = torch.randn(2, 2 * 65_536 + 3, generator=rng).to(dtype)  # several parts and a rest
    mean = torch.randn(len(params), generator=rng, dtype=torch.float64)
    seen = Release(mean, lambda: None, lambda: True, EVENT)
    moved, state = ServerSGD(0.5, 0.9).update(params, {"momentum": before}, seen)
    momentum = 0.9 * before + mean.to(dtype)
    assert torch.equal(state["momentum"], momentum)
    assert torch.equal(moved, params + 0.5 * momentum)


def test_adam_equals_torch_adam_on_the_negated_mean():
    means = [[1.0, -0.5], [0.2, 0.1], [-3.0, 0.0]]
    params, _ = run(ServerAdam(0.1, 0.9, 0.99, 1e-3), means)
    weight = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    peer = torch.optim.Adam([weight], lr=0.1, betas=(0.9, 0.99), eps=1e-3)
    for mean in means:
        weight.grad = -torch.tensor(mean, dtype=torch.float64)
        peer.step()
    assert params.tolist() == pytest.approx(weight.tolist(), rel=1e-12)


def test_yogi_by_hand():
    # second: 0 -> 0.01 * 4 = 0.04; unbiased 4. Then square 1 > 0.04: 0.04 + 0.01 = 0.05, unbiased 0.05 / 0.0199
    params, state = run(ServerYogi(0.1, 0.9, 0.99, 1e-3), [[2.0, 0.0], [1.0, 0.0]])
    first = 0.1 * 2.0 / (2.0 + 1e-3)
    second = 0.1 * ((0.9 * 0.2 + 0.1) / 0.19) / ((0.05 / 0.0199) ** 0.5 + 1e-3)
    assert params.tolist() == pytest.approx([first + second, 1.0], rel=1e-12)
    assert state["second"].tolist() == pytest.approx([0.05, 0.0], rel=1e-12)


def test_the_normalised_server_by_hand():
    # u = mean / clip = (3, 4), then (0, 2); momentum 0.1 u = (.3, .4), then (.27, .36 + .2); s^2 = 25, then
    # (.99 * .25 + .01 * 4) / .0199; steps lr sqrt(2) momentum / s
    noises = [MeanNoise(2.0, 0.0, 0.0), MeanNoise(0.5, 0.0, 0.0)]
    params, state = run(ServerNormalised(0.1), [[6.0, 8.0], [0.0, 1.0]], noises=noises)
    s = math.sqrt((0.99 * 0.25 + 0.01 * 4) / 0.0199)
    first, second = (0.1 * math.sqrt(2) * length for length in (1 / 5, 1 / s))
    assert params.tolist() == pytest.approx([0.3 * first + 0.27 * second, 1 + 0.4 * first + 0.56 * second], rel=1e-12)
    assert state["momentum"].tolist() == pytest.approx([0.27, 0.56], rel=1e-12)


def test_of_noise_that_cancels_the_normalised_server_counts_what_stays():
    # |u|^2 = 25; of 2 * 3^2 = 18 noise 2 * 0.5^2 stay: 7.5. Then |u|^2 = 2 is less than the noise: 0.5
    banded = MeanNoise(1.0, 3.0, 0.5)
    params, state = run(ServerNormalised(1.0), [[3.0, 4.0], [1.0, 1.0]], (0.0, 0.0), [banded] * 2)
    assert float(state["square"] / state["weight"]) == pytest.approx((0.99 * 0.075 + 0.01 * 0.5) / 0.0199, rel=1e-12)
    second = math.sqrt(2 / ((0.99 * 0.075 + 0.005) / 0.0199))
    assert float(params[0]) == pytest.approx(math.sqrt(2 / 7.5) * 0.3 + second * 0.37, rel=1e-12)


def test_the_normalised_servers_rate_follows_from_the_rounds_and_not_from_the_scale_of_updates():
    assert scheduled(ServerNormalised(), rounds=100).lr == pytest.approx(0.037, rel=1e-12)
    assert scheduled(ServerNormalised(0.2), rounds=100).lr == 0.2
    means = [[1.0, -2.0], [0.5, 0.5], [-1.0, 3.0]]
    small, large = (run(ServerNormalised(0.1), [[k * x for x in mean] for mean in means])[0] for k in (1e-9, 1e9))
    assert small.tolist() == pytest.approx(large.tolist(), rel=1e-9)
    with pytest.raises(SettingError, match="lr=None must be given where no training says how many rounds"):
        run(ServerNormalised(), [[1.0, 1.0]])


@pytest.mark.parametrize(
    ("layers", "fan_in"),
    [
        ([nn.Linear(9, 4), nn.Linear(4, 7)], 9),
        ([nn.Conv2d(8, 5, 3), nn.GroupNorm(1, 5), nn.Linear(60, 2)], 72),  # 8 channels of 3 x 3
        ([nn.Conv2d(8, 6, 3, groups=2), nn.Linear(20, 2)], 36),
        ([nn.Embedding(90, 5), nn.LSTM(5, 3)], 5),
        ([nn.Linear(900, 2), nn.GroupNorm(1, 2)], 1),  # linear
        ([nn.Linear(900, 2).requires_grad_(False), nn.Linear(8, 2), nn.Linear(3, 2)], 8),
        ([nn.GroupNorm(1, 2)], 1),
        ([nn.ParameterList([torch.zeros(1, 100, 6)]), nn.Linear(6, 2), nn.Linear(2, 2)], 6),  # of places
    ],
)
def test_the_largest_fan_in_is_that_of_the_layers_that_train(layers, fan_in):
    assert largest_fan_in(nn.ModuleList(layers)) == fan_in


def test_wide_layers_lower_the_rate_that_nobody_gave():
    assert for_rounds(ServerNormalised(), 100, 9216).lr == pytest.approx(5 / 96 / 10, rel=1e-12)
    assert for_rounds(ServerNormalised(), 100, 182).lr == pytest.approx(0.037, rel=1e-12)  # 5 / sqrt(182) = 0.3706
    assert for_rounds(ServerNormalised(0.2), 100, 9216).lr == 0.2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mean", [0.0, 1e-60])  # exactly zero, and zero once it is rounded to float32
def test_where_nobody_moved_the_model_the_normalised_server_does_not_either(dtype, mean):
    server, nothing = ServerNormalised(0.1), release([mean, mean], MeanNoise(math.inf, 0.0, 0.0))  # not clipped either
    params = torch.tensor([0.0, 1.0], dtype=dtype)
    state = server.init(params)
    for _ in range(3):
        params, state = server.update(params, state, nothing)
    assert torch.allclose(params, torch.tensor([0.0, 1.0], dtype=dtype), atol=1e-20)
    params, _ = server.update(params, state, release([3.0, -4.0]))
    assert params.isfinite().all()  # the next update moves it
    assert params[0] > 0


def test_the_average_of_models_by_hand():
    # models 1, 2, 4: weights 0.81, 0.9 and 1 times 0.1, over their sum
    params, state = run(AveragedServer(ServerSGD(1.0, momentum=0.0)), [[1.0], [1.0], [2.0]], (0.0,))
    assert params.tolist() == [4.0]
    assert state[AVERAGE].tolist() == pytest.approx([(0.81 * 1 + 0.9 * 2 + 4) / 2.71], rel=1e-12)
    first = run(AveragedServer(ServerSGD(1.0)), [[0.1]], (0.3,))
    assert torch.equal(first[1][AVERAGE], first[0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ServerNormalised(momentum=1.0), "server_momentum=1.0"),
        (lambda: ServerSGD(0.0), "server_lr=0.0"),
        (lambda: ServerSGD(1.0, 1.0), "server_momentum=1.0 must be a finite number at least 0 and below 1"),
        (lambda: ServerAdam(beta1=1.5), "server_beta1=1.5"),
        (lambda: ServerAdam(epsilon=0.0), "server_epsilon=0.0"),
    ],
)
def test_rates_outside_their_limits_are_refused(make, words):
    with pytest.raises(SettingError) as error:
        make()
    assert words in str(error.value)


@pytest.mark.parametrize("kind", [ServerSGD, ServerAdam, ServerYogi, ServerNormalised])
def test_a_schedule_scales_each_rounds_step_and_nothing_else(kind):
    means = [[1.0, -2.0], [0.5, 0.5], [-1.0, 3.0], [2.0, 0.0]]
    halves = scheduled(kind(0.5, lr_schedule="step:2:0.5"), rounds=4)
    steps = []
    for optimiser in (kind(0.5), halves):
        ends = [run(optimiser, means[:count])[0] for count in range(5)]
        steps.append([after - before for before, after in pairwise(ends)])
    for usual, smaller, factor in zip(*steps, [1.0, 1.0, 0.5, 0.5], strict=True):
        assert smaller.tolist() == pytest.approx((factor * usual).tolist(), rel=1e-12)
    assert scheduled(kind(0.5), rounds=4) == kind(0.5)  # nothing is wrapped without need
    stopped, _ = run(scheduled(kind(0.5, lr_schedule=lambda t: 0.0), rounds=4), means)
    assert stopped.tolist() == pytest.approx([0.0, 1.0], abs=1e-300)


@pytest.mark.parametrize("kind", [ServerSGD, ServerAdam, ServerYogi, ServerNormalised])
def test_a_function_is_asked_once_a_round_and_before_the_first(kind):
    asked = []
    optimiser = scheduled(kind(0.5, lr_schedule=lambda t: asked.append(t) or 1.0), rounds=3)
    first, second = (run(optimiser, [[1.0, 2.0]] * 3)[0] for _ in range(2))
    assert asked == [0, 1, 2]
    assert torch.equal(first, second)
    with pytest.raises(SettingError, match=r"lr_schedule gave 1e\+300 in round 1, a rate above 1e\+30"):
        scheduled(kind(0.5, lr_schedule=lambda t: 1e300 if t == 1 else 1.0), rounds=3)
