"""A learning rate of users that diverges is found on made-up examples, when a training is made."""

import warnings

import numpy as np
import pytest
import torch
from samples import cross_entropies, linear_float32, small_population

import clipline as cl
from clipline.engine.trial_warnings import DivergingRateWarning

ONES = cl.Population.from_arrays(np.repeat(np.arange(20), 2), x=np.ones((40, 1), np.float32))


class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(1))


def made(local, model=None, loss=lambda model, batch: (model.w * batch["x"][:, 0]).square(), people=ONES, **options):
    return cl.Training(
        model or Weight(), loss, people, rounds=2, cohort_size=5, local=local,
        privacy=cl.Privacy(noise_multiplier=1.0), **options,
    )  # fmt: skip


@pytest.mark.parametrize(("lr", "warned"), [(16.0, False), (17.0, True), (1e30, True)])
def test_a_step_that_raises_the_loss_a_thousandfold_is_warned_of(lr, warned):
    """The loss is w^2 from w = 1, so that one step gives (1 - 2 lr)^2: 961 for 16, 1089 for 17, infinity for 1e30."""
    options = {"trial_batch": {"x": np.ones((1, 1), np.float32)}}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made(cl.LocalSGD(lr=lr), **options)
    found = [str(one.message) for one in told if one.category is DivergingRateWarning]
    assert len(found) == warned
    if warned:
        assert found[0].startswith(f"lr={lr:g} of LocalSGD lets users diverge")


def test_a_classifier_at_a_rate_of_ten_thousand_is_warned_of_and_at_one_is_not():
    with pytest.warns(DivergingRateWarning, match="--client-lr on the command line"):
        made(cl.LocalSGD(lr=1e4), linear_float32(), cross_entropies, small_population())
    made(cl.LocalSGD(lr=1.0), linear_float32(), cross_entropies, small_population())  # a warning would be an error


@pytest.mark.parametrize("local", [cl.LocalAdam(lr=1e4), cl.LocalSGD(lr=1e4, clip_norm=1e-3)])
def test_steps_that_the_rate_bounds_are_not_tried(local):
    assert made(local, linear_float32(), cross_entropies, small_population())  # a warning would be an error


def test_nothing_of_the_training_depends_on_the_trial():
    """Nor does the trial on the data: users whose examples are all the same get the same words."""
    results, words = [], []
    for people in (ONES, ONES):
        with pytest.warns(DivergingRateWarning) as told:
            training = made(cl.LocalSGD(lr=100.0), people=people, seed=0)
        words += [str(one.message) for one in told]
        assert torch.equal(training.problem.model.vector, torch.ones(1))
        results.append(training.run().state.params)
    assert torch.equal(*results)
    other = cl.Population.from_arrays(np.repeat(np.arange(20), 2), x=np.full((40, 1), 9.0, np.float32))
    with pytest.warns(DivergingRateWarning) as told:
        made(cl.LocalSGD(lr=100.0), people=other, seed=0)
    assert {str(one.message) for one in told} == set(words)
