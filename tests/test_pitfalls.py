"""Mistakes that public libraries of this method have made, each with the test that would have caught it."""

import math

import numpy as np
import pytest
import torch
from samples import (
    LOCAL,
    cross_entropy,
    flat_training,
    linear_model,
    one_round,
    population_of,
    request,
    small_population,
    summed,
    without,
)

from clipline import Evaluate, FixedClip, LocalSGD, Population, QuantileClip, SettingError
from clipline.engine.trial_warnings import ValueRangeWarning
from clipline.federated.clipping import ClippedSum
from clipline.privacy.events import GaussianEvent, PoissonSampling
from clipline.random.streams import Streams

SAMPLING = PoissonSampling(0.01)


def training(population=None, model=None, loss=cross_entropy, **changes):
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5, **changes}
    return flat_training(model or linear_model(dtype=torch.float32), loss, population or small_population(), **settings)


def test_pitfall_weighted_mean_under_privacy():
    """A user with ten thousand examples moves the mean no further than a user with one."""
    ids = np.array([0] + [1] * 10_000)
    x = np.where(ids == 0, 1.0, -1.0)
    population = Population.from_arrays(ids, x=x)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)

    def pull(model, batch):
        return -(model.weight[0, 0] * batch["x"]).mean()

    run = training(
        population, model, pull, sampling="fixed", cohort_size=2, noise_multiplier=0, clip=FixedClip(0.01), rounds=1,
        delta=0.1, local=LocalSGD(0.1, batch_size=20),
    )  # fmt: skip
    _, release = one_round(run)
    assert float(release.mean[0]) == pytest.approx(0.0, abs=1e-8)


def test_pitfall_accountant_fed_z_delta_instead_of_z():
    """The update alone gets more noise than z, and the ledger still says z."""
    run = training(noise_multiplier=0.9, count_stddev=0.5)
    delta_noise = run.algorithm.mechanism.delta_noise_multiplier
    assert float(delta_noise) == pytest.approx((0.9**-2 - 1) ** -0.5)  # 2.06
    with pytest.raises(SettingError, match="of the whole round, not of its updates"):
        GaussianEvent(SAMPLING, delta_noise)
    assert {event.noise_multiplier for event in run.run().state.ledger} == {0.9}


def test_pitfall_unnoised_side_channels():
    """A report holds released numbers and held-out metrics; what is not released says so in its name."""
    result = training().run([Evaluate(lambda model: {"accuracy": 0.5}, every=1)])
    names = "round_index clip fraction_within account_now accounted metrics unprivate_seconds"
    assert set(vars(result.reports[0])) == set(names.split())
    noiseless = training(noise_multiplier=0.0).run()
    # With noise the reported fraction is not the true one, which is a multiple of 1/20 shifted by the cohort.
    fractions = np.array([report.fraction_within for report in result.reports]) * 40
    assert np.abs(fractions - fractions.round()).min() > 1e-6
    exact = np.array([report.fraction_within for report in noiseless.reports]) * 40
    assert np.abs(exact - exact.round()).max() < 1e-9
    total = ClippedSum(torch.tensor([42.0, 1.0]), 1.0, SAMPLING)
    assert "42" not in f"{total!r} {total}"


class Counter(torch.nn.Module):
    """A linear model with an integer buffer and a frozen weight, neither of which is trained."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.linear.bias.requires_grad_(False)
        self.register_buffer("version", torch.tensor(7, dtype=torch.int64))

    def forward(self, x):
        return self.linear(x)


def test_pitfall_noise_on_things_that_are_not_weights():
    model = Counter()
    trained = training(model=model, noise_multiplier=1.5).run().model
    assert int(trained.version) == 7
    assert torch.equal(trained.linear.bias, model.linear.bias)
    assert not torch.equal(trained.linear.weight, model.linear.weight)


def test_pitfall_float_and_rng():
    """Seed 0 is a seed; noise, sampling and users draw from unrelated streams; no global generator is touched."""
    assert torch.equal(training(seed=0).run().state.params, training(seed=0).run().state.params)
    zero, one = Streams(0), Streams(1)
    assert zero.noise(0).random() != zero.sampling(0).random()
    assert zero.noise(0).random() != zero.noise(1).random()
    assert zero.user_key("order/0", 3, 5) != one.user_key("order/0", 3, 5)
    run = training(seed=9)
    np.random.seed(0)  # noqa: NPY002 (the global generator is what must stay untouched)
    expected = np.random.random()  # noqa: NPY002
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    before = torch.get_rng_state()
    run.run()
    assert np.random.random() == expected  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), before)
    _, released = one_round(run)
    assert released.mean.dtype == torch.float64


@pytest.mark.parametrize("quantile", [0.1, 0.9])
def test_pitfall_text_says_one_thing_axis_another(quantile):
    """`quantile` is the share of users whose update is within: at 0.9 nearly all are, at 0.1 hardly any."""
    users = population_of([4] * 300)  # all of a size, which trains fast
    result = training(
        users, rounds=150, cohort_size=150, noise_multiplier=1.0, clip=QuantileClip(quantile=quantile)
    ).run()
    tail = [report.fraction_within for report in result.reports[-50:]]
    assert np.mean(tail) == pytest.approx(quantile, abs=0.05)


# Mistakes of our own engine, found by attacking it. tests/adversarial goes through many more forms of them.


def private_sum(made, ids, round_index=0, clip=0.05):
    """What the mechanism would add noise to, with exactly these users in the cohort."""
    places = {name: place for place, name in enumerate(made.population.user_ids.tolist())}
    users = sorted(places[name] for name in ids)
    return summed(made, made.problem.model.initial + 0.1, users, round_index, clip)


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_pitfall_position_is_not_identity(engine):
    """A user who is not even sampled goes: nothing about the others' batches or dropout may change."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)).double()
    everybody = small_population()
    sums = [
        private_sum(training(people, model, engine=engine), range(20, 40))
        for people in (everybody, without(everybody, 3))
    ]
    assert torch.equal(*sums)


def test_pitfall_a_trial_is_not_a_proof():
    """Batch statistics behind a head that starts at zero look harmless at first: widths must not depend on others."""
    head = torch.nn.Linear(8, 3)
    torch.nn.init.zeros_(head.weight)
    layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8, track_running_stats=False), head
    everybody = small_population()
    largest = int(np.argmax(np.diff(everybody.offsets)))
    others = [user for user in range(60) if user != largest]
    made = [
        training(people, torch.nn.Sequential(*layers).double(), engine="stacked")
        for people in (everybody, without(everybody, largest))
    ]
    assert torch.equal(*(private_sum(one, others) for one in made))
    moved = private_sum(made[0], [*others, largest]) - private_sum(made[0], others)
    assert float(moved[:-1].norm()) <= 0.05 * (1 + 1e-9)


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_pitfall_a_norm_rounded_by_company(engine):
    """Users of one norm, and a clip of just that norm: if company moved a norm by an ulp, all bits would flip."""
    cohorts = [np.arange(users) for users in (1, 2, 7, 19, 20, 40, 63, 64)]
    for seed in range(4):
        x = np.random.default_rng(seed).normal(size=400).astype(np.float32)
        alike = Population.from_arrays(np.arange(64), x=np.repeat(x[None], 64, axis=0), y=np.zeros(64, np.int64))
        made = training(alike, linear_model(400, 10, dtype=torch.float32), engine=engine, population_size=64)
        params = made.problem.model.initial
        found = [next(iter(made.trainer.train([request(params, users)])))[0].norms() for users in cohorts]
        norm = max(float(norms.max()) for norms in found)
        for clip, bit in ((norm, 0.5), (math.nextafter(norm, 0.0), -0.5)):
            counts = [float(summed(made, params, users, clip=clip)[-1]) for users in cohorts]
            assert counts == [bit * len(users) for users in cohorts]


@pytest.mark.parametrize("engine", ["one-by-one", "stacked"])
def test_pitfall_the_abort_is_an_output(engine):
    population = small_population()
    population.fields["y"][int(population.offsets[4])] = 77  # no such class
    assert population.size(4) > 0
    with pytest.warns(ValueRangeWarning):  # told to who has the data, before any round
        made = training(population, engine=engine)
    moved = private_sum(made, range(10)) - private_sum(made, [user for user in range(10) if user != 4])
    assert not moved[:-1].any()
    assert moved[-1] == -0.5


def test_pitfall_time_is_an_output():
    from clipline.training.run_directory import round_json

    report = training().run().reports[0]
    assert report.unprivate_seconds > 0
    assert "unprivate_seconds" not in round_json(report)
