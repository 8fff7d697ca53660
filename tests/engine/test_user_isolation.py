"""Ways in which a user's data could have reached others or the release: each was open once."""

import numpy as np
import pytest
import torch
from samples import cross_entropies, linear_model, population_of, rows_of, small_population
from torch import nn

from clipline import LocalSGD, Population, Training, run_together
from clipline.engine.one_by_one import OneByOne
from clipline.engine.stacked.trainer import Stacked
from clipline.errors import ModuleError, RunError, SettingError
from clipline.federated.clipping import ClippedSum, aggregate
from clipline.federated.mechanism import GaussianMechanism
from clipline.federated.noise import Noise
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling
from clipline.streams import Streams
from clipline.training.side_by_side import SharedNoiseWarning

HEIGHT = 40
SMALL = small_population()


class Bag(nn.Module):
    def __init__(self, penalty=0.0):
        super().__init__()
        self.emb, self.out = nn.Embedding(HEIGHT, 5), nn.Linear(5, 3)
        self.penalty = penalty

    def forward(self, words):
        return self.out(self.emb(words).mean(dim=1)) + self.penalty * self.emb.weight.square().sum()


def posts(sizes=(4, 0, 7, 1)):
    rng = np.random.default_rng(0)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    words = rng.integers(0, HEIGHT, (offsets[-1], 3)).astype(np.int16)
    return Population(offsets, {"words": words, "y": rng.integers(0, 3, offsets[-1])})


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["words"].long()), batch["y"], reduction="none")


def bags(penalty=0.0, dtype=torch.float64, row_fields=None):
    torch.manual_seed(0)
    local, rows = LocalSGD(0.5, batch_size=4), {"emb.weight": "words"} if row_fields is None else row_fields
    return one_by_one(Bag(penalty).to(dtype), loss, posts(), local, Streams(0), row_fields=rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_users_who_touch_few_rows_train_as_if_they_sent_all(dtype):
    users, tolerance = np.arange(4), 1e-12 if dtype == torch.float64 else 1e-5
    expected = rows_of(bags(dtype=dtype, row_fields={}), users)
    sparse = bags(dtype=dtype)
    for clients in (sparse, Stacked(sparse, 4), Stacked(sparse, 4, block_size=2)):
        torch.testing.assert_close(rows_of(clients, users), expected, rtol=tolerance, atol=tolerance)
    assert (expected.norm(dim=1) > 0).tolist() == [True, False, True, True]


def test_the_norm_of_rows_is_that_of_the_update_and_no_contribution_is_longer_than_the_clip():
    stack = Stacked(bags(), 4)
    dim = stack.problem.model.dim
    for user in (0, 2, 3):
        cohort = Cohort(np.array([user]), PoissonSampling(0.5))
        (updates,) = stack.train(stack.problem.model.initial, cohort, 0)
        assert float(updates.norms()[0]) == pytest.approx(float(updates.dense(dim).norm()), rel=1e-12)
        total = aggregate(stack.train(stack.problem.model.initial, cohort, 0), 0.01, cohort, dim)
        assert float(total.total[:-1].norm()) <= 0.01


def test_a_loss_that_uses_rows_which_no_field_names_is_refused():
    with pytest.raises(ModuleError, match=r"rows of 'emb\.weight' that field 'words' does not name"):
        bags(penalty=0.1)


def test_row_numbers_below_0_are_refused():
    population = posts()
    population.fields["words"][0, 0] = -1
    with pytest.raises(ModuleError, match="holds a number below 0"):
        one_by_one(Bag(), loss, population, LocalSGD(0.1), Streams(0), row_fields={"emb.weight": "words"})


@pytest.mark.filterwarnings("ignore")
def test_what_former_users_left_in_a_recorded_block_reaches_nobody(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda traced, **options: traced)

    def rounds(poison):
        population = population_of([6, 2, 3])
        fields = {name: field.copy() for name, field in population.fields.items()}
        fields["x"][:6] = poison
        plain = one_by_one(
            nn.Linear(6, 3).double(),
            cross_entropies,
            Population(population.offsets, fields),
            LocalSGD(0.3, 4),
            Streams(0),
        )
        stack = Stacked(plain, 3, block_size=3, compiled=True)
        torch.manual_seed(0)
        rows_of(stack, np.array([0]))
        return rows_of(stack, np.array([1, 2]), 1, plain.problem.model.initial * 0)

    quiet, loud = rounds(1.0), rounds(np.inf)
    assert torch.equal(quiet, loud)
    assert quiet.isfinite().all()


def test_a_frozen_parameter_that_training_moves_is_refused():
    class Average(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.ema = nn.Parameter(torch.zeros(6), requires_grad=False)

        def forward(self, x):
            self.ema.data.mul_(0.9).add_(0.1 * x.detach().mean(dim=0))
            return super().forward(x) + self.ema.sum()

    with pytest.raises(ModuleError, match="frozen parameter 'ema'"):
        one_by_one(Average().double(), cross_entropies, population_of([4, 5]), LocalSGD(0.1, 4), Streams(0))


def training(seed, model=None, **changes):
    usual = {"rounds": 2, "cohort_size": 20, "local": LocalSGD(0.1, 8), "seed": seed, "noise_multiplier": 0.5}
    return Training(model or linear_model(), cross_entropies, SMALL, **{**usual, **changes})


def test_private_runs_that_share_their_noise_are_warned_of():
    with pytest.warns(SharedNoiseWarning, match="2 private runs have the seed 1"):
        run_together([training(1), training(1, local=LocalSGD(0.2, 8)), training(2)])
    run_together([training(1, noise_multiplier=0.0), training(1, noise_multiplier=0.0, local=LocalSGD(0.2, 8))])


def test_runs_that_differ_in_what_is_not_trained_do_not_run_side_by_side():
    def model(seed):
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
        layers[0].requires_grad_(False)
        return layers

    with pytest.raises(SettingError, match="what is not trained in the model of training 1"):
        run_together([training(1, model(1)), training(2, model(2))])


def test_noise_hides_one_release_and_must_be_as_long_as_the_sum():
    total, mechanism = (
        ClippedSum(torch.zeros(6, dtype=torch.float64), 1.0, PoissonSampling(0.5)),
        GaussianMechanism(9, 1.0),
    )
    noise = Noise(Streams(0).noise(0), 6)
    mechanism.release(total, noise)
    with pytest.raises(RunError, match="asked for twice"):
        mechanism.release(total, noise)
    with pytest.raises(SettingError, match="noise=2 must be 6 numbers"):
        mechanism.release(total, Noise(Streams(0).noise(1), 2))


def test_who_measures_a_model_cannot_change_the_training():
    def spoil(model):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        return {"zero": 0.0}

    quiet = training(1, evaluate=lambda model: {"zero": 0.0}, evaluate_every=1).run()
    loud = training(1, evaluate=spoil, evaluate_every=1).run()
    assert torch.equal(quiet.state.params, loud.state.params)
    assert quiet.state.params.any()


def test_measuring_beside_the_training_does_not_disturb_what_draws_from_torchs_generator():
    class Loose(nn.Linear):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    def run(evaluate):
        torch.manual_seed(0)
        model = Loose(6, 3).double()
        return training(1, model, rounds=6, evaluate=evaluate, evaluate_every=1, engine="one-by-one").run().state.params

    quiet = run(lambda model: {"nothing": 0.0})
    for _ in range(3):
        assert torch.equal(run(lambda model: {"noise": float(torch.rand(2000).sum())}), quiet)
