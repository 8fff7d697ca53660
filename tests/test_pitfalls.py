"""Mistakes that public libraries of this method have made, each with the test that would have caught it."""

import math

import numpy as np
import pytest
import torch
from samples import (
    LOCAL,
    aggregate,
    cross_entropy,
    flat_training,
    linear_model,
    one_round,
    population_of,
    request,
    rows_of,
    small_population,
    summed,
)

from clipline import Evaluate, FixedClip, LocalAdam, LocalSGD, Population, QuantileClip, SettingError
from clipline.engine.core.updates import Dense, Updates
from clipline.engine.value_ranges import ValueRangeWarning
from clipline.errors import ModuleError
from clipline.federated.clipping import ClippedSum, clip_rows, join_bit
from clipline.federated.mechanism import GaussianMechanism
from clipline.federated.sampling import FixedSizeSampler, PoissonSampler
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, PoissonSampling
from clipline.random.streams import Streams

SAMPLING = PoissonSampling(0.01)


def training(population=None, model=None, loss=cross_entropy, **changes):
    settings = {"rounds": 4, "cohort_size": 20, "local": LOCAL, "seed": 0, "noise_multiplier": 0.5, **changes}
    return flat_training(model or linear_model(dtype=torch.float32), loss, population or small_population(), **settings)


@pytest.mark.parametrize("start", [0.1, 5.0])
@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
def test_pitfall_wrong_direction(start, quantile):
    """Norms log-normal(0, 1), 100 users, count noise 5: the clip ends at the quantile and does not run away."""
    from clipline_paper.study.without_training import track_quantile

    truth = math.exp({0.1: -1.28155, 0.5: 0.0, 0.9: 1.28155}[quantile])
    end = track_quantile(log_mean=0.0, log_stddev=1.0, quantile=quantile, seed=0, rounds=300, start=start)[-1]
    assert truth / 1.6 < end < truth * 1.6  # a flipped sign ends at 1e-14 or 1e+5


def test_pitfall_noise_scaled_by_the_next_rounds_clip():
    """Every update is within, so the clip falls by exp(-1.8); the noise of the round still belongs to the old clip."""
    run = training(
        small_population(400), rounds=1, cohort_size=50, noise_multiplier=1.0, count_stddev=3.0,
        clip=QuantileClip(quantile=0.1, start=1e6, lr=2.0),
    )  # fmt: skip
    streams = run.problem.runs[0].streams
    state, release = one_round(run)
    split = float(GaussianMechanism(50, 1.0, 3.0).delta_noise_multiplier)
    expected = split * 1e6 * streams.noise(0).standard_normal(19)[:-1] / 50
    assert state.clip.clip < 0.5e6
    np.testing.assert_allclose(
        release.mean.numpy(), expected, atol=5.0
    )  # the updates themselves are below 1 in each coordinate


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


def test_pitfall_realised_versus_declared_count():
    """Whatever number of users came, sum and count are divided by the declared cohort size."""
    for count in (0, 3, 50):
        updates = Updates([Dense(0, torch.full((count, 1), 0.5))])
        total = aggregate([updates] if count else [], 1.0, 1, SAMPLING)
        release = GaussianMechanism(10, 0.0, 0.0).release(total, Streams(0).noise(0))
        assert float(release.mean[0]) == pytest.approx(0.5 * count / 10)
        assert release.fraction_within == pytest.approx(0.5 + 0.5 * count / 10)


def test_pitfall_accountant_fed_z_delta_instead_of_z():
    """The update alone gets more noise than z, and the ledger still says z."""
    run = training(noise_multiplier=0.9, count_stddev=0.5)
    delta_noise = run.algorithm.mechanism.delta_noise_multiplier
    assert float(delta_noise) == pytest.approx((0.9**-2 - 1) ** -0.5)  # 2.06
    with pytest.raises(SettingError, match="of the whole round, not of its updates"):
        GaussianEvent(SAMPLING, delta_noise)
    assert {event.noise_multiplier for event in run.run().state.ledger} == {0.9}


def test_pitfall_uncentred_bit_with_the_centred_formula():
    """Adding any user moves the joint vector by at most the clip in the update and exactly 1/2 in the bit."""
    deltas = torch.tensor([[30.0, 40.0], [0.0, 0.1], [math.nan, 0.0]])
    joint = join_bit(*clip_rows(deltas, 2.0))
    assert joint[:, -1].abs().tolist() == [0.5, 0.5, 0.5]
    assert (joint[:, :-1].norm(dim=1) <= 2.0).all()


def test_pitfall_unnoised_side_channels():
    """A report holds released numbers and held-out metrics; what is not released says so in its name."""
    result = training().run([Evaluate(lambda model: {"accuracy": 0.5}, every=1)])
    names = set(vars(result.reports[0]))
    assert names == {
        "round_index",
        "clip",
        "fraction_within",
        "account_now",
        "accounted",
        "metrics",
        "unprivate_seconds",
    }
    noiseless = training(noise_multiplier=0.0).run()
    # With noise the reported fraction is not the true one, which is a multiple of 1/20 shifted by the cohort.
    fractions = np.array([report.fraction_within for report in result.reports]) * 40
    assert np.abs(fractions - fractions.round()).min() > 1e-6
    exact = np.array([report.fraction_within for report in noiseless.reports]) * 40
    assert np.abs(exact - exact.round()).max() < 1e-9
    total = ClippedSum(torch.tensor([42.0, 1.0]), 1.0, SAMPLING)
    assert "42" not in f"{total!r} {total}"


def test_pitfall_sampler_does_not_match_accountant():
    """No user twice in a cohort, and the event is the sampler's own description of itself."""
    for kind, event in ((FixedSizeSampler, FixedSizeSampling(40, 50)), (PoissonSampler, PoissonSampling(0.8))):
        for t in range(100):
            cohort = kind(50, 40).draw(Streams(1).sampling(t))
            assert len(np.unique(cohort.users)) == len(cohort.users)
            assert cohort.sampling == event
    assert list(training(sampling="fixed", rounds=1).run().state.ledger) == [
        GaussianEvent(FixedSizeSampling(20, 60), 0.5)
    ]


def test_pitfall_per_layer_or_wrong_norm_clipping():
    """One Euclidean norm over all layers: 3-4-12 has norm 13, not 4 + 12 and not clipped piece by piece."""
    deltas = torch.tensor([[3.0, 4.0, 12.0]])
    clipped, _ = clip_rows(deltas, 6.5)
    assert clipped[0].tolist() == pytest.approx([1.5, 2.0, 6.0], rel=1e-6)
    assert clip_rows(deltas, 13.0)[1].tolist() == [True]
    assert clip_rows(deltas, 12.999)[1].tolist() == [False]


def test_pitfall_noise_that_vanishes_or_replaces_the_model():
    """Round after round the noise has its stated size, and it is added to the mean, not put in its place."""
    mechanism, streams = GaussianMechanism(10, 1.0, 2.0), Streams(0)
    stddev = float(mechanism.delta_noise_multiplier) * 0.5 / 10
    total = ClippedSum(torch.full((10_001,), 100.0, dtype=torch.float64), 0.5, SAMPLING)
    for t in range(60):
        mean = mechanism.release(total, streams.noise(t)).mean
        # 5 standard errors of a deviation from 10,000 draws: fails by chance once in 30,000 runs of all rounds
        assert float(mean.std()) == pytest.approx(stddev, rel=5 / math.sqrt(2 * 10_000))
        assert float(mean.mean()) == pytest.approx(10.0, abs=5 * stddev / 100)


def test_pitfall_zero_and_non_finite_norms():
    """A zero update is no division by zero and is not scaled up; a broken one has a defined bit."""
    deltas = torch.tensor([[0.0, 0.0], [math.inf, 1.0], [1e-30, 0.0]])
    clipped, within = clip_rows(deltas, 1.0)
    assert clipped.isfinite().all()
    assert within.tolist() == [True, False, True]
    assert torch.equal(clipped[[0, 2]], deltas[[0, 2]].double())


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


def test_pitfall_lower_bound_on_the_clip():
    """Norms of 1e-4 are tracked as well as norms of 1."""
    from clipline_paper.study.without_training import track_quantile

    end = track_quantile(log_mean=math.log(1e-4), log_stddev=0.1, quantile=0.5, seed=0, rounds=300)[-1]
    assert end == pytest.approx(1e-4, rel=0.1)


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


def without(population, user):
    """The same users with the same data but for one who is gone."""
    owners = np.repeat(population.user_ids, np.diff(population.offsets))
    kept = owners != user
    fields = {name: field[kept] for name, field in population.fields.items()}
    known = population.user_ids[population.user_ids != user]
    return Population.from_arrays(owners[kept], known_users=known, **fields)


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


def test_pitfall_a_module_remembers():
    class Cosine(torch.nn.Linear):
        def forward(self, x):
            self.weight.data = torch.nn.functional.normalize(self.weight.data)
            return super().forward(x)

    with pytest.raises(ModuleError, match="parameter 'weight' of the model was replaced"):
        training(model=Cosine(6, 3).double())


def test_pitfall_n_is_data():
    """The neighbour is sampled at the same rate and charged at the same delta, or n is public and printed as such."""
    made = [
        training(people, population_size=60, cohort_size=60)
        for people in (small_population(), without(small_population(), 3))
    ]
    assert made[0].algorithm.event == made[1].algorithm.event
    assert made[0].delta == made[1].delta
    assert "the number of users is public" in str(training().planned)


def test_pitfall_same_noise_other_data():
    corrected = small_population()
    corrected.fields["x"][0, 0] += 1e-9
    assert corrected.fingerprint() != small_population().fingerprint()  # which a resume compares


def test_pitfall_the_lattice_shows():
    total = ClippedSum(torch.full((101,), 1 / 3, dtype=torch.float64), 1.0, SAMPLING)
    mean = GaussianMechanism(1, 1.0).release(total, np.random.default_rng(0)).mean
    assert torch.equal(mean * 2**20, (mean * 2**20).round())


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


class OfASlice(torch.nn.Module):
    """Reads sixteen of its 75 numbers from the `begin`th on, by a layer that may be frozen."""

    def __init__(self, frozen, begin, hidden):
        super().__init__()
        self.begin = begin
        self.first, self.second = torch.nn.Linear(16, hidden), torch.nn.Linear(hidden, 3)
        self.first.requires_grad_(not frozen)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x[:, self.begin : self.begin + 16])))


@pytest.mark.parametrize("frozen", [False, True])
def test_pitfall_a_product_rounded_by_the_users_place(frozen):
    """A slice, however wide, lies where it lies; and a product over all users' rows is rounded by their number."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 24, 13)
        x = rng.normal(size=(sizes.sum(), 75)).astype(np.float32)
        people = Population.from_arrays(np.repeat(np.arange(13), sizes), x=x, y=rng.integers(0, 3, len(x)))
        torch.manual_seed(seed)
        model = OfASlice(frozen, int(rng.integers(1, 9)), int(rng.integers(3, 70)))
        local = LocalSGD(5.0, int(rng.integers(3, 20)), 2)
        made = training(people, model, engine="stacked", population_size=13, local=local, cohort_size=13)
        users = np.arange(13)
        together = rows_of(made.trainer, users)
        for left in (0, 6, 12):
            others = np.delete(users, left)
            assert torch.equal(rows_of(made.trainer, others), together[others])


@pytest.mark.parametrize("kind", ["activation", "optimiser", "activation of single steps"])
def test_pitfall_the_end_of_an_array_rounded_otherwise(kind):
    """What is left after whole vector registers has another routine: the last users of a stack got other bits."""
    alike = {"activation": (1, 20), "optimiser": (51, 4), "activation of single steps": (1, 20)}
    examples, seeds = alike[kind]
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        x = np.tile(rng.normal(size=(1, 5)), (64 * examples, 1))
        people = Population.from_arrays(np.repeat(np.arange(64), examples), x=x, y=np.zeros(len(x), np.int64))
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.Mish(), torch.nn.Linear(1, 3))
        local = LocalSGD(1.0, 1, max_examples=1 if "single" in kind else None)
        if kind == "optimiser":
            model, local = torch.nn.Linear(5, 3).double(), LocalAdam(0.1, 1)
        made = training(people, model, population_size=64, local=local, cohort_size=64, engine="auto")
        assert not made.engine.startswith("one by one")
        for users in (64, 63, 17, 16, 5):
            rows = rows_of(made.trainer, np.arange(users))
            assert torch.equal(rows, rows[:1].expand_as(rows))


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
