"""What was once wrong in the engine, each with the least test that failed."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from samples import cross_entropies, population_of, rows_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.batches import Examples, plan_steps
from clipline.engine.one_by_one import OneByOne
from clipline.engine.stacked.step import GraphedStep, Program
from clipline.engine.stacked.trainer import CannotStack, Stacked
from clipline.engine.stacked.vmap_layers import stackable
from clipline.engine.updates import Dense, Updates
from clipline.errors import ModuleError
from clipline.federated.clipping import clip_factors
from clipline.streams import Streams


def plain(model, population=None, local=None):
    population = population or population_of([6, 3, 9])
    return one_by_one(model.double(), cross_entropies, population, local or LocalSGD(0.3, batch_size=4), Streams(0))


def assert_stack_equals_one_by_one(engine):
    users = np.arange(len(engine.problem.examples.population))
    expected = rows_of(engine, users)
    torch.testing.assert_close(rows_of(Stacked(engine, 3), users), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [10**5, 10**6])
def test_no_clipped_update_of_many_equal_numbers_is_longer_than_the_clip(size):
    for value in (0.1, 0.3, 0.7, 1.1):
        row = torch.full((1, size), value, dtype=torch.float32)
        scale, _ = clip_factors(Updates([Dense(0, row)]).norms(), 1.0)
        clipped = float(scale[0]) * float(row[0, 0])
        assert Fraction(clipped) ** 2 * size <= 1  # exactly


def test_a_buffer_that_moves_for_some_users_is_refused_in_a_stack_too():
    class Alarm(nn.Linear):
        """Remembers whether anybody had five examples; nobody in the trial has."""

        def __init__(self):
            super().__init__(6, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x):
            if len(x) == 5:
                self.seen = torch.maximum(self.seen, (x.detach().amax() > 1).to(self.seen.dtype))
            return super().forward(x)

    engine = one_by_one(Alarm().double(), cross_entropies, population_of([10, 5, 5]), LocalSGD(0.1, 9), Streams(0))
    with pytest.raises(ModuleError, match="buffer 'seen'"):
        rows_of(Stacked(engine, 2, block_size=2), np.array([0, 2]))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(engine.problem.model.module.seen)
    assert float(engine.problem.model.module.seen) == 0.0


def test_batch_statistics_of_a_short_batch_leave_the_filling_out():
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
    assert_stack_equals_one_by_one(plain(nn.Sequential(*layers), population_of([6, 3, 7])))


def test_dropout_where_the_batch_is_not_the_first_axis_is_the_same_in_a_stack():
    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.drop, self.out = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)

        def forward(self, x):
            return self.out(self.drop(self.hidden(x).T).T)

    assert_stack_equals_one_by_one(plain(Turned()))


def test_a_dropout_that_is_used_twice_draws_twice():
    drop, ones = stackable(nn.Dropout(0.5)), torch.ones(100)
    assert not torch.equal(drop(ones), drop(ones))


def test_a_model_that_refuses_without_words_cannot_be_stacked():
    class Silent(nn.Linear):
        def forward(self, x):
            if torch._C._functorch.is_functorch_wrapped_tensor(x):
                raise NotImplementedError
            return super().forward(x)

    with pytest.raises(CannotStack):
        Stacked(plain(Silent(6, 3)), 3)


def test_a_parameter_without_numbers_trains_in_a_stack():
    class Empty(nn.Linear):
        def __init__(self):
            super().__init__(6, 3)
            self.nothing = nn.Parameter(torch.zeros(0))

        def forward(self, x):
            return super().forward(x) + self.nothing.sum()

    assert_stack_equals_one_by_one(plain(Empty()))


def test_a_parameter_that_the_loss_does_not_use_stays_where_it_is():
    assert_stack_equals_one_by_one(plain(Spare()))


class Spare(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return self.used(x)


def test_a_batch_size_above_all_users_costs_no_memory():
    population, local = population_of([6, 3, 9]), LocalSGD(0.1, batch_size=10**5)
    steps = plan_steps(population, np.arange(3), local, lambda purpose: np.zeros(3, np.uint64))
    assert steps.counts.tolist() == [[6], [3], [9]]
    assert steps.rows.shape == (3, 1, 9)  # 10^5 over 2^13.5, rounded up, is the first that holds 9


def test_a_recorded_program_keeps_the_type_of_the_model():
    stack = Stacked(plain(nn.Linear(6, 3)), 3, compiled=True)
    like = stack.plain.examples.gather(np.zeros((3, 4), np.int64))
    first = [stack.problem.model.initial.new_zeros(3, *shape) for shape in stack._shapes.values()]
    recording = GraphedStep(Program(stack._step), first, like, users=3, steps=1, width=4)
    assert {piece.dtype for piece in recording.stack} == {torch.float64}
    assert recording.rates.dtype == torch.float64


def test_a_field_on_disk_moves_without_a_warning(tmp_path):
    population = population_of([6, 3, 9])
    population.save(tmp_path / "population")
    stored = Population.open(tmp_path / "population")
    torch.set_warn_always(True)  # otherwise once in a process
    try:
        Examples(stored, torch.device("cpu"), torch.float32)._moved(stored.fields["x"])
    finally:
        torch.set_warn_always(False)


def test_examples_of_a_user_are_not_held_once_for_every_epoch(monkeypatch):
    engine = plain(nn.Linear(6, 3), local=LocalSGD(0.01, batch_size=4, epochs=50))
    held, between = [], engine.problem.examples.between
    monkeypatch.setattr(engine.problem.examples, "gather", None)
    monkeypatch.setattr(engine.problem.examples, "between", lambda *rows: held.append(rows[1] - rows[0]) or between(*rows))
    engine.block(engine.problem.model.initial, np.arange(3), 0)
    assert held == [6, 3, 9]


def test_a_loss_that_writes_into_its_batch_does_not_reach_the_population():
    def spoiling(model, batch):
        losses = cross_entropies(model, {name: field.clone() for name, field in batch.items()})
        with torch.no_grad():
            for field in batch.values():
                field.zero_()
        return losses

    population = population_of([6, 3, 9])
    before = {name: field.copy() for name, field in population.fields.items()}
    engine = one_by_one(nn.Linear(6, 3).double(), spoiling, population, LocalSGD(0.3, batch_size=4), Streams(0))
    engine.block(engine.problem.model.initial, np.arange(3), 0)
    assert all(np.array_equal(population.fields[name], field) for name, field in before.items())
