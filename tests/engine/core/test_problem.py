"""What every trainer shares: made once from a model, a loss and a population, and left as it was by whoever trains."""

import numpy as np
import pytest
import torch
from samples import LOCAL, cross_entropies, cross_entropy, linear_model, population_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.core.problem import Problem
from clipline.errors import ModuleError, PopulationError, SettingError
from clipline.random.streams import Streams

POPULATION = population_of([5, 0, 9])


def problem(model=None, population=POPULATION, local=LOCAL, seed=0, **options):
    return Problem(model or linear_model(), cross_entropies, population, local, Streams(seed), **options)


def test_side_by_side_has_the_runs_of_all_in_order_and_shares_the_rest():
    first, second, third = problem(seed=1), problem(seed=2, local=LocalSGD(0.7, 8)), problem(seed=3)
    both = second.side_by_side([third, first, second])
    assert [(run.streams.seed, run.lr) for run in both.runs] == [(3, LOCAL.lr), (1, LOCAL.lr), (2, 0.7)]
    assert (both.model, both.examples, both.isolation) == (second.model, second.examples, second.isolation)
    assert [run.streams.seed for run in second.runs] == [2]  # those that were given stay as they are
    again = first.side_by_side([both, first])
    assert [run.streams.seed for run in again.runs] == [3, 1, 2, 1]


def test_users_train_in_training_mode_and_in_the_precision_that_was_asked_for():
    made = problem(linear_model(dtype=torch.float32), precision="bf16")
    made.model.module.eval()
    with made.users_apart():
        assert made.model.module.training
        assert torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_what_makes_no_sense_is_refused():
    with pytest.raises(SettingError, match=r"on_error='rais'.*did you mean 'raise'"):
        problem(on_error="rais")
    with pytest.raises(ModuleError, match="no trainable matrix"):
        problem(row_fields={"bias": "y"})
    with pytest.raises(PopulationError, match="trial_batch has nothing for field 'y'"):
        problem(trial_batch={"x": np.zeros((2, 6))})


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda model, batch: model(batch["X"]).sum(), r"KeyError: 'X'\).*; a batch has the fields x, y$"),
        (nn.CrossEntropyLoss(), r"TypeError.*; a loss is called as loss\(model, batch\): call the model in it"),
    ],
)
def test_a_field_or_a_call_that_is_wrong_is_told_with_what_is_right(loss, words):
    population = Population.from_arrays([0, 0], x=np.ones((2, 6)), y=[0, 1])
    with pytest.raises(ModuleError, match=words):
        OneByOne(Problem(linear_model(), loss, population, LOCAL, Streams(0)))


def test_a_trial_batch_is_tried_in_the_place_of_made_up_examples():
    def picky(model, batch):
        if bool((batch["x"] < 100).any()):
            raise ZeroDivisionError("too small")
        return cross_entropy(model, {**batch, "x": batch["x"] / 100})

    population = Population.from_arrays([0, 0], x=np.full((2, 6), 150.0), y=[0, 1])
    with pytest.raises(ModuleError, match="fails on made-up examples"):
        OneByOne(Problem(linear_model(), picky, population, LOCAL, Streams(0)))
    batch = {"x": np.full((1, 6), 101.0), "y": [1]}
    made = OneByOne(Problem(linear_model(), picky, population, LOCAL, Streams(0), trial_batch=batch))
    assert made.block(made.problem.model.initial, np.array([0]), 0).dense(18).any()


def test_a_mean_over_the_tokens_after_the_first_runs_on_made_up_lists():
    def mean_of_the_rest(model, batch):
        rest = (torch.arange(1, 6) < batch["x_length"].unsqueeze(1)).to(batch["x"])
        return (model(batch["x"].clamp(max=9))[:, :1] * rest).sum(dim=1) / rest.sum(dim=1)

    lists = [[1.0, 2.0, 3.0], [4.0, 5.0]]
    population = Population.from_arrays([0, 1], x=lists, lengths={"x": 6})
    OneByOne(Problem(linear_model(), mean_of_the_rest, population, LOCAL, Streams(0)))
    counted = Population.from_arrays([0, 1], x=np.ones((2, 6)), x_length=np.array([3, 2]))  # nobody said what it is
    with pytest.raises(ModuleError, match=r"made-up whole numbers are 0 or 1: .* needs \.clamp\(min=1\) on it"):
        OneByOne(Problem(linear_model(), mean_of_the_rest, counted, LOCAL, Streams(0)))
