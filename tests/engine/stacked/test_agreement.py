"""A stacked step that gives another result than plain ones is refused before any user is looked at."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from samples import (
    Mixed,
    cross_entropies,
    cross_entropy,
    flat_training,
    linear_model,
    one_by_one,
    population_of,
    small_population,
)
from tagged_posts import Tags, posts
from tagged_posts import loss as tag_loss
from torch import nn

from clipline import LocalSGD
from clipline.engine.choose import choose_trainer
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.core.problem import SlowEngineWarning
from clipline.engine.stacked.probe import WrongStack, compare_neighbours, other_last_batch
from clipline.engine.stacked.single_step import SingleStep
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

SIZES = [5, 0, 1, 23, 8]


class LosesItsGradient(nn.Linear):
    """In a stack its weight gets no gradient, as torch 2.5 had it for `Linear`."""

    def forward(self, x):
        stacked = torch._C._functorch.maybe_current_level() is not None
        return x @ (self.weight.detach() if stacked else self.weight).T + self.bias


class TakesMoreThanItsOwn(nn.Linear):
    """Works one by one; in a stack its weight counts double."""

    def forward(self, x):
        stacked = torch._C._functorch.maybe_current_level() is not None
        return super().forward(x) + (x @ self.weight.T if stacked else 0.0)


class SeesAllUsers(nn.Linear):
    """Adds a thousandth of the mean over all users of a stack: far less than steps may differ from plain ones."""

    def forward(self, x):
        inside = x
        while torch._C._functorch.is_functorch_wrapped_tensor(inside):
            inside = torch._C._functorch.get_unwrapped(inside)
        return super().forward(x + 0.001 * inside.mean())


class ListsItsWeight(nn.Linear):
    """What a list holds is the model's own parameter, in whose place users of a stack have theirs."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.listed = [self.weight]

    def forward(self, x):
        return super().forward(x) + 1e-4 * self.listed[0].square().sum()


def plain(model, loss=cross_entropies, features=6, **changes):
    population = population_of(SIZES, features)
    return one_by_one(model, loss, population, LocalSGD(0.3, batch_size=4), Streams(0), **changes)


@pytest.mark.parametrize("layer", [LosesItsGradient, TakesMoreThanItsOwn])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_layer_whose_rule_for_many_users_is_wrong_is_refused_where_stacking_was_asked_for(layer, precision):
    engine = plain(nn.Sequential(layer(6, 4), nn.Tanh(), nn.Linear(4, 3)), precision=precision)
    with pytest.raises(WrongStack, match=r"parameter '0\.weight' another gradient.*engine=\"one-by-one\""):
        choose_trainer("stacked", engine, 10)


@pytest.mark.parametrize(
    ("layer", "says"),
    [(SeesAllUsers, "of one user otherwise where another has other data"), (ListsItsWeight, "another gradient")],
)
@pytest.mark.parametrize("local", [LocalSGD(0.3, batch_size=4), LocalSGD(0.3, max_examples=1)], ids=["stack", "single"])
def test_what_moves_a_stack_by_less_than_rounding_may_is_refused_if_it_is_not_the_users_own(layer, says, local):
    population = population_of(SIZES)
    engine = one_by_one(nn.Sequential(layer(6, 4), nn.Linear(4, 3)), cross_entropies, population, local, Streams(0))
    with pytest.raises(WrongStack, match=says):
        SingleStep(engine, 10) if local.max_examples else Stacked(engine, 10)


def test_auto_then_trains_one_by_one_and_says_so_once():
    settings = {"rounds": 2, "cohort_size": 20, "local": LocalSGD(0.1), "seed": 0, "noise_multiplier": 0.5}
    torch.manual_seed(0)
    model = LosesItsGradient(6, 3).double()
    with pytest.warns(SlowEngineWarning, match="would train wrongly.*; users train one by one$") as said:
        training = flat_training(model, cross_entropies, small_population(), **settings)
    assert len(said) == 1
    assert isinstance(training.trainer, OneByOne)
    torch.manual_seed(0)
    right = flat_training(nn.Linear(6, 3).double(), cross_entropies, small_population(), **settings)
    torch.testing.assert_close(training.run().state.params, right.run().state.params, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    "spoil", [lambda losses, kept: losses.where(kept, 0.0).sum() / len(losses), lambda losses, kept: losses.mean()]
)
def test_a_padded_batch_that_counts_otherwise_is_refused(spoil, monkeypatch):
    monkeypatch.setattr(StackStep, "_loss_of_one", _with_reduction(StackStep._loss_of_one, spoil))
    with pytest.raises(WrongStack):
        Stacked(plain(nn.Linear(6, 3)), len(SIZES))


def by_rows():
    """A weight of which users touch few rows: a stack holds these alone."""
    return one_by_one(Tags(), tag_loss, posts(), LocalSGD(0.3, 4), Streams(0), row_fields={"tags.weight": "words"})


@pytest.mark.parametrize("make", [lambda: plain(nn.Linear(6, 3)), by_rows])
def test_users_who_take_each_others_gradients_are_refused(make, monkeypatch):
    engine, right = make(), StackStep.__call__
    Stacked(engine, len(SIZES))

    def mixed(self, stack, *args):
        before = [piece.clone() for piece in stack]
        right(self, stack, *args)
        for piece, old in zip(stack, before, strict=True):
            piece.copy_(old + (piece - old).roll(1, 0))

    monkeypatch.setattr(StackStep, "__call__", mixed)
    with pytest.raises(WrongStack):
        Stacked(engine, len(SIZES))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("loss", [cross_entropies, cross_entropy])
def test_right_models_pass_with_dropout_and_in_every_type(dtype, loss):
    torch.manual_seed(0)
    assert isinstance(Stacked(plain(Mixed().to(dtype), loss, features=16), len(SIZES)), Stacked)


def test_weights_far_larger_than_their_gradients_are_compared_too(monkeypatch):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    with torch.no_grad():
        model.weight += 1e5  # a step of the gradient itself would vanish in float32
    engine = plain(model, lambda model, batch: 1e-4 * cross_entropies(model, batch))
    assert isinstance(Stacked(engine, len(SIZES)), Stacked)
    monkeypatch.setattr(StackStep, "__call__", lambda self, *arguments: None)  # nobody moves
    with pytest.raises(WrongStack):
        Stacked(engine, len(SIZES))


def test_a_loss_that_is_not_finite_on_made_up_examples_is_not_compared():
    def loss(model, batch):
        return cross_entropies(model, batch) / (model.weight.abs().amax() < 1e-3)  # infinite but near the start

    assert isinstance(Stacked(plain(linear_model(), loss), len(SIZES)), Stacked)


def _with_reduction(right, spoil):
    def spoiled(self, *args):
        class Reduced:
            reduced = staticmethod(spoil)

        local, self.local = self.local, Reduced
        try:
            return right(self, *args)
        finally:
            self.local = local

    return spoiled


@pytest.mark.parametrize(("moved", "refused"), [(2e-6, False), (2e-4, True), (math.nan, True)])
def test_rounding_of_a_gradient_near_zero_is_no_neighbours_doing(moved, refused):
    """Of a bias before a norm layer, say: 1e-7 where the whole gradient is 10. A tenth of 10 times 1e-4 is let pass."""
    problem = SimpleNamespace(model=SimpleNamespace(vector=torch.zeros(1), module=nn.Linear(1, 1)))
    weight, bias = torch.tensor([[6.0], [8.0], [1.0]]).double(), torch.full((3, 1), 1e-7).double()
    moves = {"weight": (weight, weight), "bias": (bias, bias + torch.tensor([[moved], [0.0], [5.0]]))}
    with pytest.raises(WrongStack, match="'bias' of one user otherwise") if refused else nullcontext():
        compare_neighbours(problem, moves)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, where an index out of range ends the process")
def test_on_a_gpu_the_last_user_gets_data_that_somebody_has():
    batch = {"x": torch.tensor([[1.0], [2.0]]), "words": torch.tensor([[3], [4]], dtype=torch.uint16)}
    other = other_last_batch({name: field.cuda() for name, field in batch.items()}, math.nan)
    assert other["x"].tolist() == [[1.0], [1.0]]
    assert other["words"].tolist() == [[3], [3]]
