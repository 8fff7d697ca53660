"""The torch path and the paper in plain NumPy, on the same random streams, must agree."""

import ast
import functools

import numpy as np
import pytest
import torch
from samples import LOCAL, ROOT, cross_entropies, cross_entropy, flat_training, linear_model, small_population

from clipline import QuantileClip, ServerSGD
from clipline.federated.sampling import sampler_named
from clipline.random.streams import Streams, user_order

SEED, ROUNDS, COHORT, NOISE, START = 7, 6, 20, 0.3, 0.3
FEATURES, CLASSES = 6, 3


@functools.cache  # for every type and engine that is compared with it
def run_reference(reference, *, sampling, quantile, rule, clip_lr, momentum):
    population = small_population()
    streams = Streams(SEED)
    sampler = sampler_named(sampling, len(population), COHORT)

    def to_torch_layout(vector):  # the reference holds (features, classes), nn.Linear (classes, features)
        return vector.reshape(FEATURES, CLASSES).T.ravel()

    def draw_noise(t):
        noise = streams.noise(t).standard_normal(FEATURES * CLASSES + 1)
        weights = noise[:-1].reshape(CLASSES, FEATURES).T.ravel()
        weights *= 1 + 2 * (16 * COHORT + 2100) * 2**-53 * (16 * COHORT + 1000)  # it covers the rounding of sums
        return np.append(weights, noise[-1])

    params, history = reference.algorithm1(
        np.zeros(FEATURES * CLASSES),
        [tuple(population.of(user).values()) for user in range(len(population))],
        lambda params, x, y: reference.softmax_gradient(params, x, y, CLASSES),
        draw_cohort=lambda t: sampler.draw(streams.sampling(t)).users,
        draw_order=lambda t, user, count: user_order(streams.user_key("order/0", t, int(user)), count),
        draw_noise=draw_noise, noise_multiplier=NOISE, count_stddev=COHORT / 20, rounds=ROUNDS, cohort_size=COHORT,
        quantile=quantile, clip=START, clip_lr=clip_lr, rule=rule, client_lr=LOCAL.lr, batch_size=LOCAL.batch_size,
        server_lr=0.7, server_momentum=momentum,
    )  # fmt: skip
    return to_torch_layout(params), history


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 2e-4)])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("rule", "clip_lr"), [("geometric", 0.2), ("linear", 0.05)])
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_training_equals_the_plain_algorithm(reference, quantile, rule, clip_lr, momentum, sampling, dtype, tolerance):
    compare(reference, quantile, rule, clip_lr, momentum, sampling, dtype, tolerance)


@pytest.mark.parametrize("loss", [cross_entropy, cross_entropies])
@pytest.mark.parametrize(
    ("quantile", "rule", "clip_lr", "momentum", "sampling"),
    [
        (0.5, "geometric", 0.2, 0.9, "poisson"),
        (0.9, "linear", 0.05, 0.0, "fixed"),
        (0.1, "geometric", 0.2, 0.9, "fixed"),
    ],
)
@pytest.mark.parametrize("engine", ["stacked", "one-by-one"])
def test_every_engine_equals_the_plain_algorithm(reference, engine, quantile, rule, clip_lr, momentum, sampling, loss):
    compare(reference, quantile, rule, clip_lr, momentum, sampling, torch.float64, 1e-10, loss=loss, engine=engine)


def compare(
    reference, quantile, rule, clip_lr, momentum, sampling, dtype, tolerance, loss=cross_entropy, engine="auto"
):
    expected, history = run_reference(
        reference, sampling=sampling, quantile=quantile, rule=rule, clip_lr=clip_lr, momentum=momentum
    )
    result = flat_training(
        linear_model(FEATURES, CLASSES, dtype), loss, small_population(), rounds=ROUNDS, cohort_size=COHORT,
        local=LOCAL, seed=SEED, noise_multiplier=NOISE, count_stddev=COHORT / 20, sampling=sampling, engine=engine,
        clip=QuantileClip(quantile=quantile, start=START, lr=clip_lr, rule=rule), server=ServerSGD(0.7, momentum),
    ).run()  # fmt: skip
    assert np.abs(expected).max() > 0.05  # something was learnt: the comparison is not of zeros
    np.testing.assert_allclose(result.state.params.double().numpy(), expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose([r.clip for r in result.reports], [clip for clip, _ in history], rtol=tolerance)
    np.testing.assert_allclose(
        [r.fraction_within for r in result.reports], [fraction for _, fraction in history], rtol=1e-9, atol=1e-12
    )


def test_the_plain_algorithm_fits_its_promise_of_120_lines_and_stands_alone():
    text = (ROOT / "examples" / "algorithm1.py").read_text()
    assert len(text.splitlines()) < 120
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert {alias.name for node in imported for alias in node.names} == {"math", "numpy"}
