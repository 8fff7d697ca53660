"""The trial refuses what would train wrongly."""

import random

import numpy as np
import pytest
import torch
from engine.stacked.models import MODELS, plain_trainer
from samples import cross_entropies, one_by_one, small_population
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.choose import choose_trainer
from clipline.engine.stacked import shared_step as single_step
from clipline.engine.stacked import single_step_trial as trial
from clipline.engine.stacked.agreement import WrongStack
from clipline.engine.stacked.probe import CannotStack
from clipline.random.streams import Streams


def test_a_wrong_gradient_is_found_before_any_training(monkeypatch):
    plain = plain_trainer(MODELS["mlp"])
    monkeypatch.setattr(
        single_step, "FactoredUpdates", lambda start, inputs, outputs: single_step.Dense(start, 0 * outputs.flatten(1))
    )
    with pytest.raises(WrongStack, match="another gradient than a plain one"):
        trial.shared_step(plain.problem, plain.made_up)


def test_a_rounding_that_depends_on_the_place_is_found(monkeypatch):
    plain = plain_trainer(MODELS["mlp"], dtype=torch.float32)
    step = trial.shared_step(plain.problem, plain.made_up)
    assert trial.equal_widths(plain.problem, plain.made_up, step, [8, 16, 24]) == [8, 16, 24]
    tilted = single_step.FactoredUpdates

    def wrong(start, inputs, outputs):
        return tilted(start, inputs, outputs * (1 + 1e-6 * torch.arange(len(outputs))[:, None, None]))

    monkeypatch.setattr(single_step, "FactoredUpdates", wrong)
    with pytest.raises(CannotStack, match="rounded otherwise at another place"):
        trial.equal_widths(plain.problem, plain.made_up, step, [8, 16])


@pytest.mark.parametrize("draw", [random.random, np.random.rand, lambda: float(torch.rand(()))])
def test_draws_that_users_would_share_are_refused(draw):
    def loss(model, batch):
        return cross_entropies(model, batch) * draw()

    plain = plain_trainer(MODELS["logistic"], loss=loss)
    with pytest.raises(CannotStack):
        trial.shared_step(plain.problem, plain.made_up)


def test_a_gradient_inside_the_loss_is_refused():
    def loss(model, batch):
        losses = cross_entropies(model, batch)
        (slope,) = torch.autograd.grad(losses.sum(), model[0].weight, create_graph=True)
        return losses + slope.square().sum()

    plain = plain_trainer(lambda: nn.Sequential(nn.Linear(16, 3)), loss=loss)
    with pytest.raises(CannotStack):
        trial.shared_step(plain.problem, plain.made_up)


def test_a_model_that_writes_into_its_parameters_is_left_to_the_other_engines():
    class Clamped(nn.Linear):
        def forward(self, x):
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    plain = plain_trainer(lambda: nn.Sequential(Clamped(16, 3)))
    with pytest.raises(CannotStack, match="writes into a parameter"):
        trial.shared_step(plain.problem, plain.made_up)


def test_the_memory_of_a_user_holds_all_activations():
    plain = plain_trainer(lambda: nn.Sequential(nn.Linear(16, 1000), nn.Tanh(), nn.Linear(1000, 3)))
    step = trial.shared_step(plain.problem, plain.made_up)
    taken = trial.bytes_a_user(plain.problem, plain.made_up, step)
    assert 2 * 8000 < taken < 40_000 * 8  # the hidden layer is kept twice at least; weights are few beside it


def test_why_users_do_not_train_in_single_steps_is_said(monkeypatch):
    def refused(*arguments, **options):
        raise CannotStack("no layer of the model has a weight that users could share")

    monkeypatch.setattr("clipline.engine.choose.SingleStep", refused)
    population = Population.one_each(**small_population().fields)
    plain = one_by_one(nn.Linear(6, 3), cross_entropies, population, LocalSGD(0.1), Streams(0))
    assert choose_trainer("auto", plain, 3).in_words.endswith(
        "; not in single steps: no layer of the model has a weight that users could share"
    )
