"""Single steps with shared weights equal one user after the other, for every kind of layer."""

import random
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from engine.stacked.models import MODELS, SHARED, USERS, Recurrent, plain_trainer
from samples import cross_entropies, flat_training, one_by_one, opened, population_of, request, small_population
from torch import nn

from clipline import FixedClip, LocalSGD, Population, ServerSGD
from clipline.engine.choose import choose_trainer
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.stacked import single_step
from clipline.engine.stacked.probe import CannotStack, WrongStack
from clipline.engine.stacked.single_step import NotShared, SingleStep, takes_single_steps
from clipline.engine.stacked.trainer import Stacked
from clipline.engine.workers.single import SingleProcess
from clipline.random.streams import Streams


def rows_by_user(trainer, users, round_index=0):
    """user -> update; users without examples come first."""
    sizes = np.diff(trainer.problem.population.offsets)[users]
    order = np.concatenate([users[sizes == 0], users[sizes > 0]]) if isinstance(trainer, SingleStep) else users
    asked = request(trainer.problem.model.initial, users, round_index)
    rows = torch.cat([updates.dense(trainer.problem.model.dim) for updates, _ in trainer.train([asked])])
    return dict(zip(order.tolist(), rows, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_updates_sums_and_bits_equal_those_of_one_user_after_the_other(name):
    plain = plain_trainer(MODELS[name])
    single = SingleStep(plain, 20)
    assert single._step.shared == SHARED[name]
    wanted, found = rows_by_user(plain, USERS, 3), rows_by_user(single, USERS, 3)
    assert wanted.keys() == found.keys()
    for user in USERS.tolist():
        torch.testing.assert_close(found[user], wanted[user], rtol=1e-11, atol=1e-13)
    norms = torch.stack([*wanted.values()]).norm(dim=1)
    clip = 1.001 * float(norms.median())  # half of the users are within, and nobody at the border
    asked = [request(plain.problem.model.initial, USERS, 3, clip=clip)]
    sums = [opened(SingleProcess(trainer).sums(asked)[0]) for trainer in (plain, single)]
    torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-12)
    assert sums[0][-1] == sums[1][-1] == (norms <= clip).sum() - 15


def test_a_user_rounds_alike_whoever_else_trains():
    for name in ("mlp", "convolutional", "words"):
        single = SingleStep(plain_trainer(MODELS[name], dtype=torch.float32), 30, block_size=96)
        assert single.widths == [32, 64, 96]
        everybody, rng = rows_by_user(single, USERS), np.random.default_rng(1)
        for size in (1, 2, 7, 12, 23):
            for user, row in rows_by_user(single, np.sort(rng.choice(30, size, replace=False))).items():
                assert torch.equal(row, everybody[user]), (name, size, user)


def test_a_user_who_fails_adds_nothing_and_moves_nobody_else():
    population = population_of([1] * 30, features=16)
    spoiled = {name: field.copy() for name, field in population.fields.items()}
    spoiled["y"][11], spoiled["x"][5] = 99, np.nan  # an error for the whole block, and a loss that is no number
    others = Population(population.offsets, spoiled, column_options={"missing": "zero-update"})
    clean, failing = (
        rows_by_user(SingleStep(plain_trainer(MODELS["mlp"], population=one), 30), USERS)
        for one in (population, others)
    )
    assert [user for user, row in failing.items() if not row.isfinite().all()] == [5, 11]
    assert all(torch.equal(row, clean[user]) for user, row in failing.items() if user not in (5, 11))
    single = SingleStep(plain_trainer(MODELS["mlp"], population=others), 30)
    total = opened(SingleProcess(single).sums([request(single.problem.model.initial, USERS, clip=1e9)])[0])
    torch.testing.assert_close(total[:-1], sum(row for user, row in clean.items() if user not in (5, 11)))
    assert total[-1] == 28 - 15


def test_what_a_user_leaves_who_fails_on_the_way_is_put_back():
    def busy(model, batch):
        model.busy = True
        losses = cross_entropies(model, batch)
        model.busy = False
        return losses

    population, model = population_of([1] * 30, features=16), MODELS["mlp"]()
    population.fields["y"][11], model.busy = 99, False
    single = SingleStep(plain_trainer(lambda: model, loss=busy, population=population), 30)
    assert [user for user, row in rows_by_user(single, USERS).items() if not row.isfinite().all()] == [11]


@pytest.mark.parametrize("model", [Recurrent, lambda: nn.Sequential(nn.LayerNorm(16), nn.Flatten())])
def test_a_model_without_a_weight_to_share_is_left_to_the_other_engines(model):
    plain = plain_trainer(model)
    with pytest.raises(CannotStack):
        SingleStep(plain, 20)
    assert not isinstance(choose_trainer("auto", plain, 20), SingleStep)


def test_a_weight_that_is_used_otherwise_later_is_refused():
    penalty = []

    def loss(model, batch):
        losses = cross_entropies(model, batch)
        return losses + model.weight.square().sum() if penalty else losses

    plain = plain_trainer(MODELS["logistic"], loss=loss)
    single = SingleStep(plain, 20)
    penalty.append(1)
    with pytest.raises(NotShared, match=r"parameter 'weight' is used otherwise.*FastParts\(single_step=False\)"):
        list(single.train([request(plain.problem.model.initial, USERS)]))


def test_auto_takes_it_for_one_plain_step_on_one_example_unless_switched_off():
    def chosen(**changes):
        return choose_trainer("auto", plain_trainer(MODELS["logistic"], **changes), 20)

    assert isinstance(chosen(), SingleStep)
    assert isinstance(chosen(fast=FastParts(single_step=False)), Stacked)
    assert isinstance(choose_trainer("one-by-one", plain_trainer(MODELS["logistic"]), 20), OneByOne)
    assert isinstance(choose_trainer("stacked", plain_trainer(MODELS["logistic"]), 20), Stacked)
    assert isinstance(chosen(precision="bf16"), Stacked)


def test_what_takes_a_single_step_is_known_without_looking_at_users_sizes():
    lonely, marked = population_of([1, 1]), Population.one_each(x=np.zeros((2, 3)))
    assert not takes_single_steps(LocalSGD(0.1), lonely)
    assert takes_single_steps(LocalSGD(0.1, max_examples=1), lonely)
    assert takes_single_steps(LocalSGD(0.1), marked)
    assert not takes_single_steps(LocalSGD(0.1, epochs=2), marked)


def test_a_run_is_that_of_dp_sgd_in_plain_numpy():
    """Logistic regression without noise, from the definition: clip each example's gradient, add up, step."""
    rng = np.random.default_rng(0)
    x, y, clip, rate = rng.normal(size=(50, 4)), rng.integers(0, 3, 50), 0.7, 0.5
    model = nn.Linear(4, 3, bias=False).double()
    training = flat_training(
        model, cross_entropies, Population.one_each(x=x, y=y), rounds=4, cohort_size=50, local=LocalSGD(1.0),
        clip=FixedClip(clip), sampling="fixed", noise_multiplier=0.0, seed=0, server=ServerSGD(rate, momentum=0.0),
    )  # fmt: skip
    assert training.engine.startswith("single step: blocks of 56 users, one example each, share the weights weight")
    weight = model.weight.detach().numpy().copy()
    for _ in range(4):
        scores = np.exp(x @ weight.T)
        errors = scores / scores.sum(axis=1, keepdims=True) - np.eye(3)[y]
        gradients = errors[:, :, None] * x[:, None, :]
        norms = np.linalg.norm(gradients, axis=(1, 2))
        weight -= rate * (gradients * np.minimum(1, clip / norms)[:, None, None]).mean(axis=0)
    np.testing.assert_allclose(training.run().model.weight.detach().numpy(), weight, rtol=1e-9)


def test_a_wrong_gradient_is_found_before_any_training(monkeypatch):
    plain = plain_trainer(MODELS["mlp"])
    monkeypatch.setattr(
        single_step, "FactoredUpdates", lambda start, inputs, outputs: single_step.Dense(start, 0 * outputs.flatten(1))
    )
    with pytest.raises(WrongStack, match="another gradient than a plain one"):
        single_step.shared_step(plain.problem, plain.made_up)


def test_a_rounding_that_depends_on_the_place_is_found(monkeypatch):
    plain = plain_trainer(MODELS["mlp"], dtype=torch.float32)
    step = single_step.shared_step(plain.problem, plain.made_up)
    assert single_step.equal_widths(plain.problem, plain.made_up, step, [32, 64, 96]) == [32, 64, 96]

    class Tilted(single_step.FactoredUpdates):
        def __init__(self, start, inputs, outputs):
            super().__init__(start, inputs, outputs * (1 + 1e-6 * torch.arange(len(outputs))[:, None]))

    monkeypatch.setattr(single_step, "FactoredUpdates", Tilted)
    with pytest.raises(CannotStack, match="rounded otherwise at another place"):
        single_step.equal_widths(plain.problem, plain.made_up, step, [8, 16])


class Clamped(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


def slope(model, batch):
    (found,) = torch.autograd.grad(cross_entropies(model, batch).sum(), model[0].weight, create_graph=True)
    return found.square().sum()


@pytest.mark.parametrize(
    ("layer", "factor", "words"),
    [
        (nn.Linear, lambda *_: random.random(), None),
        (nn.Linear, lambda *_: np.random.rand(), None),  # noqa: NPY002
        (nn.Linear, lambda *_: float(torch.rand(())), None),
        (nn.Linear, slope, None),
        (Clamped, lambda *_: 1.0, "writes into a parameter"),
    ],
    ids=["Python's draw", "NumPy's draw", "torch's draw", "gradient inside the loss", "write into a parameter"],
)
def test_what_users_would_share_is_refused(layer, factor, words):
    def loss(model, batch):
        return cross_entropies(model, batch) * factor(model, batch)

    plain = plain_trainer(lambda: nn.Sequential(layer(16, 3)), loss=loss)
    with pytest.raises(CannotStack, match=words):
        single_step.shared_step(plain.problem, plain.made_up)


def test_the_memory_of_a_user_holds_all_activations():
    plain = plain_trainer(lambda: nn.Sequential(nn.Linear(16, 1000), nn.Tanh(), nn.Linear(1000, 3)))
    step = single_step.shared_step(plain.problem, plain.made_up)
    taken = single_step.bytes_a_user(plain.problem, plain.made_up, step)
    assert 2 * 8000 < taken < 40_000 * 8  # the hidden layer is kept twice at least; weights are few beside it


def test_why_users_do_not_train_in_single_steps_is_said(monkeypatch):
    refused = CannotStack("no layer of the model has a weight that users could share")
    monkeypatch.setattr("clipline.engine.choose.SingleStep", Mock(side_effect=refused))
    population = Population.one_each(**small_population().fields)
    plain = one_by_one(nn.Linear(6, 3), cross_entropies, population, LocalSGD(0.1), Streams(0))
    assert choose_trainer("auto", plain, 3).in_words.endswith(
        "; not in single steps: no layer of the model has a weight that users could share"
    )
