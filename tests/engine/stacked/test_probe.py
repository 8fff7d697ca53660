"""What is found out about a stack before any user is looked at: on made-up examples."""

import random

import numpy as np
import pytest
import torch
from engine.stacked.models import Recurrent
from samples import Mixed, cross_entropies, cross_entropy, linear_model, one_by_one, population_of, rows_of
from torch import nn

from clipline import LocalSGD
from clipline.engine.stacked.probe import CannotStack, probe
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.trainer import Stacked
from clipline.errors import ModuleError
from clipline.random.streams import Streams

SIZES = [5, 0, 1, 23, 8]
USERS = np.arange(len(SIZES))


def plain(model, loss=cross_entropies, features=6):
    return one_by_one(model, loss, population_of(SIZES, features), LocalSGD(0.3, batch_size=4), Streams(0))


def stack(engine):
    return Stacked(engine, len(SIZES))


def probed(engine):
    problem = engine.problem
    step = StackStep(problem.model, problem.loss, problem.local)
    return probe(problem, engine.made_up, step), step


@pytest.mark.parametrize("loss", [cross_entropies, cross_entropy])
def test_whether_a_loss_is_one_for_each_example_and_a_batch_may_be_padded(loss):
    found, step = probed(plain(linear_model(), loss))
    assert step.per_example == found.paddable == (loss is cross_entropies)
    assert found.bytes_a_user >= 1


def test_a_model_that_looks_across_its_examples_is_not_padded():
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
    found, step = probed(plain(nn.Sequential(*layers).double()))
    assert step.per_example
    assert not found.paddable


class Centred(nn.Module):
    def forward(self, values):
        return values - values.mean(dim=0)


def test_batches_are_padded_with_an_example_of_another_batch_in_the_trial_too():
    """With one of its own two the mean moves along their difference, and a layer norm hides by how much."""
    layers = nn.Linear(6, 8), Centred(), nn.LayerNorm(8), nn.Linear(8, 3)
    local, population = LocalSGD(0.3, batch_size=3), population_of([5, 3])
    found, _ = probed(one_by_one(nn.Sequential(*layers).double(), cross_entropies, population, local, Streams(0)))
    assert not found.paddable


def test_where_all_examples_of_the_trial_are_equal_batches_are_not_padded_and_it_is_said():
    batch = {"x": np.ones((1, 6)), "y": np.ones(1, np.int64)}
    settings = {"local": LocalSGD(0.3, batch_size=4), "streams": Streams(0), "trial_batch": batch}
    engine = one_by_one(linear_model(), cross_entropies, population_of([5, 3]), **settings)
    assert "give a trial_batch" in Stacked(engine, 2).in_words
    found, _ = probed(engine)
    assert found.unknown
    assert not found.paddable


def test_a_model_that_fails_at_some_parameters_of_the_trial_cannot_be_stacked():
    class Fails(nn.Linear):
        def forward(self, values):
            if not torch._C._functorch.is_functorch_wrapped_tensor(self.weight) and self.weight.any():
                raise IndexError("at initial zeros it does not")
            return super().forward(values)

    model = Fails(6, 3).double()
    nn.init.zeros_(model.weight)
    engine = plain(nn.Sequential(model))
    with pytest.raises(CannotStack, match=r"fails on some made-up examples .at initial zeros"):
        probed(engine)


class RoundsByRows(nn.Module):
    """Its products come out half a percent larger for more than two rows, as those of a library in bfloat16 might."""

    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(6, 3).double()
        self.base = nn.Parameter(torch.ones(1, dtype=dtype), requires_grad=False)

    def forward(self, inputs):
        return self.linear(inputs) * self.base.double() * (1.005 if len(inputs) > 2 else 1.0)


@pytest.mark.parametrize(("dtype", "paddable"), [(torch.bfloat16, True), (torch.float64, False)])
def test_a_base_in_bfloat16_may_round_otherwise_for_another_number_of_rows(dtype, paddable):
    torch.manual_seed(0)
    assert probed(plain(RoundsByRows(dtype)))[0].paddable == paddable


def test_a_probe_leaves_model_and_generators_as_they_were():
    engine = plain(Mixed().double(), features=16)
    np.random.seed(3)  # noqa: NPY002
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    before = engine.problem.model.initial.clone()
    probed(engine)
    assert torch.equal(engine.problem.model.initial, before)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert random.getstate() == states[2]


class Shared(nn.Linear):
    """Draws from Python's generator, which users of a stack would share."""

    def forward(self, x):
        return super().forward(x * (1 + random.random()))


class Branching(nn.Linear):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else 2 * x)


class Dice(nn.Linear):
    def forward(self, x):
        return super().forward(nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("model", [Recurrent(), Branching(16, 3), Dice(16, 3)], ids=lambda m: type(m).__name__)
def test_what_has_no_version_for_many_users_is_refused_with_the_reason(model):
    engine = plain(model.double(), features=16)
    assert rows_of(engine, USERS).abs().max() > 0  # one by one it trains
    with pytest.raises(CannotStack, match=r"cannot run for many users at once \(.{15,}\)"):
        stack(engine)


class Packed(nn.Module):
    """A recurrence of sequences of unequal length, as torch's own documentation packs them."""

    def __init__(self):
        super().__init__()
        self.recurrence, self.out = nn.LSTM(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs):
        lengths = torch.full((len(inputs),), 16)
        packed = nn.utils.rnn.pack_padded_sequence(inputs.unsqueeze(2), lengths, batch_first=True)
        return self.out(self.recurrence(packed)[1][0][-1])


@pytest.mark.parametrize(
    ("model", "operation"), [(Packed(), "aten::_pack_padded_sequence"), (Recurrent(), "aten::rnn_tanh.input")]
)
def test_an_operation_without_a_rule_is_named_and_nobody_is_asked_to_file_an_issue(model, operation):
    with pytest.raises(CannotStack) as error:
        stack(plain(model.double(), features=16))
    assert str(error.value).endswith(f"many users at once (torch.func.vmap has no rule for {operation})")


def test_a_model_that_draws_from_a_generator_that_users_share_is_refused():
    engine = plain(Shared(6, 3).double())
    assert rows_of(engine, USERS).abs().max() > 0
    with pytest.raises(CannotStack, match="NumPy's or Python's generator, which users in a stack would share"):
        stack(engine)


def test_what_no_engine_can_train_is_refused_as_such():
    for loss, words in ((lambda m, b: m(b["x"]), "loss returned a tensor of shape"), (lambda m, b: 3.0, "float")):
        with pytest.raises(ModuleError, match=words) as error:
            stack(plain(linear_model(), loss))
        assert not isinstance(error.value, CannotStack)
