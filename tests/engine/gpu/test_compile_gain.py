"""Whether compiling pays: decided by the model, the cohort and the rounds, and by nobody's data."""

from types import SimpleNamespace

import pytest
import torch
from samples import cross_entropies, flat_training, linear_model, one_by_one, population_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.core.fast_parts import FastParts
from clipline.engine.gpu.compile_gain import CountWork, StepWork
from clipline.engine.stacked.probe import probe
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

POPULATION = population_of([5, 3, 8], 6)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: only there are steps compiled")


def work_of(model, population):
    plain = one_by_one(model, cross_entropies, population, LocalSGD(0.3, batch_size=4), Streams(0))
    problem = plain.problem
    return probe(problem, plain.made_up, StackStep(problem.model, problem.loss, problem.local)).work


def test_bytes_are_counted_of_operations_that_a_compiler_joins():
    values, matrix = torch.ones(2, 3), torch.ones(2, 3, 5)
    with CountWork(users=2) as counting:
        added = values + values  # reads 24 bytes twice and writes 24: 36 a user
        torch.bmm(added.view(2, 1, 3), matrix)  # a view moves nothing, and a product is a kernel of its own
        values.sum()  # reads 24 bytes and writes 4: 14 a user
    assert counting.work == StepWork(4, (36, 14))


class Neighbours(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 3)
        self.register_buffer("graph", torch.eye(6).to_sparse())

    def forward(self, values):
        return self.out(values @ self.graph.to_dense())


def test_sparse_tensors_are_no_obstacle_and_nobodys_data_decide():
    """Other numbers, sizes and users: the same estimate to the last bit."""
    ordinary, other = population_of([5, 3, 8], 6), population_of([1, 0, 2, 40, 7], 6)
    huge = {name: field * 1e30 if field.dtype.kind == "f" else field for name, field in other.fields.items()}
    strange = Population(other.offsets, huge)
    assert work_of(linear_model(), ordinary) == work_of(linear_model(), strange)
    assert work_of(Neighbours(), ordinary).operations > 0  # bytes of sparse tensors are not known, and do not count


def test_of_runs_side_by_side_the_longest_decides():
    problems = [
        flat_training(
            linear_model(), cross_entropies, POPULATION, rounds=rounds, cohort_size=2, local=LocalSGD(0.3, 4), seed=0,
            noise_multiplier=1.0, delta=0.1,
        ).problem
        for rounds in (2, 900, 5)
    ]  # fmt: skip
    assert problems[0].side_by_side(problems).rounds == 900


def test_what_is_saved_is_a_quarter_of_the_time_to_move_the_bytes_in_every_step():
    """A round is taken to have as many steps as 400 examples make, or as many as a user may have."""
    large = StepWork(1, (6_000_000,))  # 100 users: 0.6 GB at 3 TB/s, 0.2 ms
    local = LocalSGD(0.1, batch_size=20)  # 20 steps
    assert large.seconds_saved(100, 1000, local) == pytest.approx(0.25 * 0.2e-3 * 20 * 1000)
    assert large.seconds_saved(100, 1000, LocalSGD(0.1, 4)) == pytest.approx(0.25 * 0.2e-3 * 100 * 1000)
    assert large.seconds_saved(100, 1000, LocalSGD(0.1, 1000)) == pytest.approx(0.25 * 0.2e-3 * 1000)
    capped = LocalSGD(0.1, 20, epochs=3, max_examples=50)  # 3 steps in each of 3 epochs
    assert large.seconds_saved(100, 1000, capped) == pytest.approx(0.25 * 0.2e-3 * 9 * 1000)
    small = StepWork(3, (4, 4, 4))  # not less than the launch of three operations, 2 us each
    assert small.seconds_saved(100, 1000, local) == pytest.approx(0.25 * 6e-6 * 20 * 1000)


@pytest.mark.parametrize(
    ("heights", "expected"),
    [([], 1), ([256], 1), ([257], 2), ([1024], 2), ([1025], 3), ([16_384], 4), ([10_000, 300], 8)],
)
def test_each_padded_number_of_rows_is_a_program_that_has_to_pay(heights, expected):
    """256, 1024, 4096 and 16,384 rows, or as many as the parameter has."""
    shapes = {f"weight{number}": (height, 5) for number, height in enumerate(heights)}
    stack = SimpleNamespace(_shapes=shapes, problem=SimpleNamespace(row_fields=dict.fromkeys(shapes, "words")))
    assert Stacked._most_programs(stack) == expected


def on_gpu(rounds, compiled_steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    settings = {"rounds": rounds, "cohort_size": 4, "local": LocalSGD(0.5, 4), "seed": 0, "noise_multiplier": 0.2}
    return flat_training(
        model, cross_entropies, population_of([9, 0, 4, 1, 6, 3, 7], features=16), engine="stacked", device="cuda",
        delta=0.1, fast=FastParts(compiled_steps=compiled_steps), **settings,
    )  # fmt: skip


@needs_gpu
def test_a_short_training_records_its_steps_as_they_are_written():
    short, long = on_gpu(4, "auto"), on_gpu(10**9, "auto")
    assert "as written and recorded" in short.engine
    assert "compiling would save about" in short.engine
    assert "compiled and recorded" in long.engine
    assert "compiled and recorded" in on_gpu(4, "always").engine
    assert "step by step" in on_gpu(4, "never").engine


@needs_gpu
def test_compiled_recorded_and_plain_steps_train_the_same():
    usual, *others = (on_gpu(6, way).run() for way in ("auto", "always", "never"))
    for other in others:
        torch.testing.assert_close(other.state.params, usual.state.params, rtol=1e-4, atol=1e-5)
        assert other.guarantee == usual.guarantee
