"""What one user's data might reach past the clip: shared weights written to, users lost, numbers behind a release."""

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from samples import cross_entropies, linear_model, population_of, rows_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from clipline import FixedClip, LocalSGD, Population, Training
from clipline.engine.one_by_one import OneByOne
from clipline.engine.sparse import native
from clipline.engine.sparse.recorded_weight import Ledger, bag
from clipline.engine.sparse.row_fields import together
from clipline.engine.updates import Dense, Rows, Updates
from clipline.errors import ModuleError
from clipline.federated.clipping import ClippedSum, aggregate
from clipline.federated.mechanism import GaussianMechanism
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling
from clipline.streams import Streams

HEIGHT, WIDTH, USERS = 50, 8, 16
DOUBLE = torch.float64


class Bagging(nn.Module):
    """Words to classes, with something else done beside the product."""

    def __init__(self, use):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(HEIGHT, WIDTH, dtype=DOUBLE))
        self.use = use

    def forward(self, words, values):
        if self.use == "lookup that shortens rows":
            return F.embedding(words.long(), self.weight, max_norm=1.0).sum(dim=1)
        if self.use == "writes":
            with torch.no_grad():
                self.weight[words.long()] *= 0.9
        if self.use == "by one user" and bool((values > 0.995).any()):
            return bag(words, self.weight, values) + self.weight[words[:, 0].long()]
        if self.use == "copied":
            copy.deepcopy(self)
        if self.use == "checkpoint":
            return checkpoint(lambda: bag(words, self.weight, values).tanh(), use_reentrant=False)
        out = bag(words, self.weight, values)
        if self.use == "in place":
            out += 1.0
            out = torch.relu_(out)
        return out


def loss(model, batch):
    return F.cross_entropy(model(batch["words"], batch["values"]), batch["y"], reduction="none")


def words():
    rng = np.random.default_rng(0)
    fields = {
        "words": rng.integers(0, HEIGHT, (3 * USERS, 4)),
        "values": 0.9 * rng.random((3 * USERS, 4)),
        "y": rng.integers(0, WIDTH, 3 * USERS),
    }
    fields["values"][3 * 8, 0] = 0.999  # of user 8
    return Population(np.arange(0, 3 * USERS + 1, 3), fields)


def engine(use, row_fields):
    return one_by_one(Bagging(use), loss, words(), LocalSGD(0.5, 2, 2), Streams(1), row_fields=row_fields)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("use", ["lookup that shortens rows", "writes"])
def test_a_model_that_writes_into_its_weight_does_not_reach_the_model_of_all(use, workers):
    training = Training(
        Bagging(use), loss, words(), rounds=1, cohort_size=8, local=LocalSGD(0.5, 2), seed=0, noise_multiplier=0.1,
        clip=FixedClip(1e-6), row_fields={"weight": "words"}, workers=workers, sampling="fixed",
    )  # fmt: skip
    first = Bagging(use).weight.detach().flatten()
    assert torch.equal(training.plain.problem.model.initial, first)  # the trials of the engine have not moved it
    after = training.run().state.params
    assert 0 < float((after - first).abs().max()) < 1e-5


@pytest.mark.parametrize("use", ["once", "copied", "checkpoint", "in place", "by one user"])
def test_however_the_weight_is_used_the_updates_are_those_of_dense_rows(use):
    users = np.arange(USERS)
    ours, expected = (rows_of(engine(use, rows), users) for rows in ({"weight": "words"}, {}))
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    assert (ours.norm(dim=1) > 0).all()


def test_nobody_of_a_block_is_lost_where_one_uses_the_weight_otherwise():
    made, cohort = engine("by one user", {"weight": "words"}), Cohort(np.arange(USERS), PoissonSampling(0.5))
    blocks = list(made.train(made.problem.model.initial, cohort, 0))
    assert sum(map(len, blocks)) == USERS
    assert made.recorded == {"weight"}  # for the others nothing is different
    total = aggregate(iter(blocks), 1e9, cohort, made.problem.model.dim).total
    assert total[-1] == USERS / 2  # all within
    with pytest.raises(TypeError, match="different kinds"):
        together([Updates([Dense(0, torch.ones(1, 6))]), Updates([Rows(0, 3, torch.zeros(1, 1), torch.ones(1, 1, 2))])])


def test_no_count_lies_behind_a_release_without_one():
    total = ClippedSum(torch.arange(1.0, 5.0, dtype=DOUBLE), 1.0, PoissonSampling(0.1))
    release = GaussianMechanism(10, 1.0, None).release(total, np.random.default_rng(0))
    stored = io.BytesIO()
    torch.save(release.mean, stored)
    assert release.mean.untyped_storage().nbytes() // 8 == 4
    assert torch.frombuffer(bytearray(release.mean.untyped_storage()), dtype=DOUBLE)[-1] == 0.0


@pytest.mark.parametrize("values", [(1, 4), (3, 1), (3,)])
def test_features_and_values_of_different_shapes_are_refused_before_memory_is_read(values):
    weight = torch.ones(5, 2, dtype=DOUBLE)
    for given in (weight, Ledger(weight, 0.1).noted()):
        with pytest.raises(ModuleError, match="must both be"):
            bag(torch.zeros(3, 4, dtype=torch.int64), given, torch.ones(values, dtype=DOUBLE))


@pytest.mark.parametrize(
    "script", ["exit 1", "exit 0", 'echo "int main;" > x.c', 'cc -shared -o "$6" -x c /dev/null 2>/dev/null || exit 1']
)
def test_a_compiler_that_is_none_is_done_without(tmp_path, monkeypatch, script):
    compiler = tmp_path / "broken-cc"
    compiler.write_text(f"#!/bin/sh\ncd {tmp_path}\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    native.compiled.cache_clear()
    assert native.compiled(torch.float64) is None
    native.compiled.cache_clear()


def test_many_small_steps_on_a_tall_weight_stay_few_parts():
    ledger, weight = Ledger(torch.zeros(1000, 2, dtype=DOUBLE), 0.5), torch.zeros(1000, 2, dtype=DOUBLE)
    for step in range(100):
        features, values = torch.tensor([[step % 7, 3]]), torch.tensor([[1.0, 2.0]], dtype=DOUBLE)
        out = bag(features, ledger.noted(), values)
        torch.testing.assert_close(out.detach(), values @ weight[features[0]], rtol=1e-12, atol=1e-12)
        (product,) = ledger.products()
        gradient = torch.full((1, 2), 0.01 * step, dtype=DOUBLE)
        ledger.step([gradient])
        for feature, value in zip(features[0].tolist(), values[0].tolist(), strict=True):
            weight[feature] -= 0.5 * value * gradient[0]
        assert product.shape == (1, 2)
        assert len(ledger.terms()) <= 33


def test_nothing_drawn_ahead_is_kept_after_a_run():
    training = Training(
        linear_model(), cross_entropies, population_of([3] * 20), rounds=2, cohort_size=10, seed=0,
        local=LocalSGD(0.1, 4), noise_multiplier=0.5,
    )  # fmt: skip
    before = training.run().state.params
    assert not training.algorithm.ahead._drawn
    assert torch.equal(copy.deepcopy(training).run().state.params, before)
