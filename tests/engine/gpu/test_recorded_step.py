"""Recorded blocks that are used for one round after the other."""

import numpy as np
import pytest
import torch
from samples import Mixed, Uncompiled, cross_entropies, linear_model, one_by_one, population_of, request, rows_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.core.problem import LocalRun
from clipline.engine.gpu import recorded_step as step
from clipline.engine.gpu.programs import inductor
from clipline.engine.gpu.programs.program_cache import forget_programs
from clipline.engine.gpu.recorded_step import CompiledStep, graph_width
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

SIZES = [3, 60, 5, 4, 0, 6, 33, 2, 5, 12, 1, 4, 3, 13, 5, 2]
USERS = np.arange(len(SIZES))
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own tracing


def engine(sizes=SIZES, model=None):
    torch.manual_seed(0)
    model = Mixed().double() if model is None else model
    return one_by_one(model, cross_entropies, population_of(sizes, features=16), LocalSGD(0.3, 4), Streams(0))


def test_a_recorded_block_trains_users_with_many_and_with_few_steps_as_one_by_one(uncompiled):
    plain = engine()
    stack = Stacked(plain, len(SIZES), block_size=len(SIZES), compiled=True)
    expected = rows_of(plain, USERS, 2)
    for _ in range(2):
        torch.testing.assert_close(rows_of(stack, USERS, 2), expected, rtol=1e-11, atol=1e-12)
    assert len(stack._recorded._recordings) == 1


def test_a_cap_below_the_batch_size_that_is_padded_to_more_fits_the_buffers(uncompiled):
    torch.manual_seed(0)
    local = LocalSGD(0.3, batch_size=100, max_examples=8)  # a user with 8 examples is padded to 9
    plain = one_by_one(Mixed().double(), cross_entropies, population_of([9, 8, 3], features=16), local, Streams(0))
    stack = Stacked(plain, 3, compiled=True)
    torch.testing.assert_close(rows_of(stack, np.arange(3)), rows_of(plain, np.arange(3)), rtol=1e-11, atol=1e-12)


def test_numbers_of_users_that_are_recorded():
    assert [graph_width(users) for users in (1, 2, 3, 31, 32, 33, 64, 65, 128, 129)] == [
        2, 2, 4, 32, 32, 36, 64, 72, 128, 144,
    ]  # fmt: skip
    for users in range(1, 2000):
        assert users <= graph_width(users) <= 1.125 * users + 1
    assert len({graph_width(users) for users in range(1, 1025)}) <= 60


def test_a_program_that_the_compiler_ties_to_one_number_of_users_is_kept_to_one(uncompiled, monkeypatch):
    """As library convolutions do: the users are their groups."""
    widths, tied = [], False

    class Tied(Uncompiled):
        def __init__(self, graph, inputs, by_user):
            super().__init__(graph, inputs, by_user)
            self.users, self.one_number = len(inputs[0]), tied

        def serves(self, users):
            return users == self.users or not tied

        def __call__(self, inputs):
            widths.append(len(inputs[0]))
            super().__call__(inputs)

    monkeypatch.setattr(inductor, "compiled", Tied)
    forget_programs()
    plain = engine([9, 7, 3, 1, 1, 1], linear_model(16))
    stack = Stacked(plain, 6, block_size=6, compiled=True)
    expected = rows_of(plain, np.arange(6))
    torch.testing.assert_close(rows_of(stack, np.arange(6)), expected, rtol=1e-11, atol=1e-12)
    assert widths == [6, 2, 2]
    widths.clear()
    tied = True
    forget_programs()
    stack = Stacked(plain, 6, block_size=6, compiled=True)
    torch.testing.assert_close(rows_of(stack, np.arange(6), 0), expected, rtol=1e-11, atol=1e-12)
    assert stack.programs.compiled == 1
    assert widths == [6, 6, 6]
    assert not next(iter(stack._recorded._recordings.values())).program.any_width
    assert CompiledStep(stack._step).any_width


def test_every_request_trains_its_own_cohort_round_and_parameters_whatever_was_trained_before(uncompiled):
    """The recorded blocks are used again and again: nothing of the request before may be left in them."""
    plain = engine()
    stack = Stacked(plain, 16, block_size=5, compiled=True)
    params = plain.problem.model.initial.clone()

    def check(users, round_index, params=params):
        ours, expected = (rows_of(trainer, users, round_index, params) for trainer in (stack, plain))
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-12)
        assert ours.abs().max() > 1e-3

    few, more = np.array([1, 2, 6, 8, 9, 13]), np.array([0, 1, 2, 6, 8, 9, 13])
    check(few, 3)
    check(few, 3)  # again
    check(few, 4)
    check(more, 4)  # the five with most are the same
    check(few[:3], 4)
    assert rows_of(stack, few[:0], 5).shape == (0, len(params))
    check(few, 5, params + 0.1)
    params.mul_(0.5)  # changed between two rounds
    check(few, 5)


def test_requests_of_other_runs_train_at_their_rate_and_from_their_streams(uncompiled):
    plain = engine()
    stack = Stacked(plain, 16, block_size=16, compiled=True)
    problem = plain.problem
    problem.runs = [*problem.runs, LocalRun(Streams(0), 0.1), LocalRun(Streams(7), 0.3)]
    params = problem.model.initial
    order = np.argsort(-problem.local.examples_of(problem.population, USERS), kind="stable")
    found = []
    for number, run in enumerate(problem.runs):
        blocks = stack.train([request(params, USERS, 3, run=number)])
        ours = torch.cat([updates.dense(len(params)) for updates, _ in blocks])
        other = one_by_one(problem.model.module, cross_entropies, problem.population, LocalSGD(run.lr, 4), run.streams)
        torch.testing.assert_close(ours, rows_of(other, USERS, 3, params)[order], rtol=1e-11, atol=1e-12)
        found.append(ours)
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_a_round_that_breaks_off_leaves_nothing_behind(uncompiled, monkeypatch):
    plain = engine()
    stack = Stacked(plain, 16, block_size=16, compiled=True)
    params, replay, left = plain.problem.model.initial, step.GraphedStep.replay, [0]

    def breaks_off(recording, active):
        left[0] -= 1
        if left[0] == 0:
            raise RuntimeError("no more memory")
        replay(recording, active)

    expected = {t: rows_of(plain, USERS, t) for t in (2, 3)}
    rows_of(stack, USERS, 2)
    monkeypatch.setattr(step.GraphedStep, "replay", breaks_off)
    for t in (3, 2):  # the same round again, and another one
        left[0] = 5
        with pytest.raises(RuntimeError, match="no more memory"):
            rows_of(stack, USERS, 3)
        torch.testing.assert_close(rows_of(stack, USERS, t), expected[t], rtol=1e-11, atol=1e-12)
    left[0] = 5
    with pytest.raises(RuntimeError, match="no more memory"):
        rows_of(stack, USERS, 3)
    assert rows_of(stack, USERS[:0], 2).shape == (0, len(params))
    torch.testing.assert_close(rows_of(stack, USERS, 3), expected[3], rtol=1e-11, atol=1e-12)


def test_a_block_of_users_without_examples_may_be_the_first(uncompiled):
    plain = engine([0, 0, 5, 3])
    stack = Stacked(plain, 4, block_size=2, compiled=True)
    nobody = np.array([0, 1])
    assert not rows_of(stack, nobody).any()
    everybody = np.arange(4)
    torch.testing.assert_close(rows_of(stack, everybody), rows_of(plain, everybody), rtol=1e-11, atol=1e-12)


def test_what_former_users_left_in_a_recorded_block_reaches_nobody(uncompiled):
    def rounds(poison):
        population = population_of([6, 2, 3])
        fields = {name: field.copy() for name, field in population.fields.items()}
        fields["x"][:6] = poison
        spoilt = Population(population.offsets, fields, column_options={"missing": "zero-update"})
        plain = one_by_one(nn.Linear(6, 3).double(), cross_entropies, spoilt, LocalSGD(0.3, 4), Streams(0))
        stack = Stacked(plain, 3, block_size=3, compiled=True)
        torch.manual_seed(0)
        rows_of(stack, np.array([0]))
        return rows_of(stack, np.array([1, 2]), 1, plain.problem.model.initial * 0)

    quiet, loud = rounds(1.0), rounds(np.inf)
    assert torch.equal(quiet, loud)
    assert quiet.isfinite().all()
