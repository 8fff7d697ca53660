"""A step of a stack: by hand, traced into one program, and on a GPU compiled and replayed."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
from samples import Mixed, cross_entropies, one_by_one, population_of, rows_of
from torch import nn

from clipline import LocalSGD, Population
from clipline.engine.core.one_by_one import OneByOne
from clipline.engine.core.problem import SlowEngineWarning
from clipline.engine.core.working_model import WorkingModel
from clipline.engine.gpu import recorded_step as program
from clipline.engine.gpu.kernels import convolution
from clipline.engine.gpu.recorded_step import CompiledStep, GraphedStep
from clipline.engine.stacked import trainer
from clipline.engine.stacked.step import StackStep
from clipline.engine.stacked.trainer import Stacked
from clipline.random.streams import Streams

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or convolution.convolution_kernels is None, reason="needs a GPU and Triton"
)
SIZES = [9, 0, 14, 1, 6, 17, 4]
USERS = np.arange(len(SIZES))
NO_KEYS = torch.zeros(2, 0, 2, dtype=torch.int32)


def pull(model, batch):
    """1/2 (w - x)^2 of each example: a step moves w towards the mean of the data."""
    return 0.5 * (model.weight[0, 0] - batch["x"]).square()


def pulling(per_example, reduction="mean"):
    loss = pull if per_example else lambda model, batch: pull(model, batch).mean()
    step = StackStep(WorkingModel(nn.Linear(1, 1, bias=False)), loss, LocalSGD(1.0, 2, reduction=reduction))
    step.per_example = per_example
    return step


@pytest.mark.parametrize(("reduction", "expected"), [("mean", [1.5, 11.0]), ("sum", [3.0, 11.0])])
def test_a_step_by_hand_where_each_user_has_a_rate_and_a_short_batch_is_filled(reduction, expected):
    weights = torch.tensor([0.0, 10.0]).view(2, 1, 1)
    batch = {"x": torch.tensor([[2.0, 4.0], [12.0, 99.0]])}  # 99 is filling
    kept = torch.tensor([[True, True], [True, False]])
    pulling(True, reduction)([weights], NO_KEYS, batch, kept, torch.tensor([0.5, 0.5]))
    assert weights.flatten().tolist() == pytest.approx(expected)  # 0 + 0.5 (3 or 6), 10 + 0.5 * 2
    weights = torch.tensor([0.0, 10.0]).view(2, 1, 1)
    pulling(True, reduction)([weights], NO_KEYS, batch, kept, torch.tensor([0.0, 0.25]))
    assert weights.flatten().tolist() == pytest.approx([0.0, 10.5])
    weights = torch.tensor([0.0, 10.0]).view(2, 1, 1)  # a loss in one number
    pulling(False)([weights], NO_KEYS, {"x": torch.tensor([[2.0, 4.0], [12.0, 14.0]])}, kept | True, 0.5)
    assert weights.flatten().tolist() == pytest.approx([1.5, 11.5])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_who_has_no_step_stays_even_if_what_lies_there_is_broken(bad):
    weights = torch.tensor([0.0, 10.0]).view(2, 1, 1)
    batch = {"x": torch.tensor([[2.0, 4.0], [bad, bad]])}
    kept = torch.tensor([[True, True], [False, False]])
    pulling(True)([weights], NO_KEYS, batch, kept, torch.tensor([0.5, 0.5]))
    assert weights.flatten().tolist() == [1.5, 10.0]


def stacks(device, precision="float32", field=np.float64):
    """The same users by the plain step and by a recorded one of 5 places, of which the second block leaves 3 idle."""
    torch.manual_seed(0)
    population = population_of(SIZES, features=16)
    fields = {"x": population.fields["x"].astype(field), "y": population.fields["y"].astype(np.uint16)}

    def loss(model, batch):
        return cross_entropies(model, {"x": batch["x"], "y": batch["y"].long()})

    population, local = Population(population.offsets, fields), LocalSGD(0.5, 4, 2)
    plain = one_by_one(Mixed(), loss, population, local, Streams(0), device, precision=precision)
    return Stacked(plain, 7, compiled=False), Stacked(plain, 7, block_size=5, compiled=True)


def compare(plain, recorded, tolerance):
    for round_index in (0, 1):
        expected = rows_of(plain, USERS, round_index).cpu()
        ours = rows_of(recorded, USERS, round_index).cpu()
        assert ours.dtype == torch.float32
        assert not ours[1].any()  # without examples
        error = (ours - expected).norm(dim=1)
        assert (error <= tolerance * expected.norm(dim=1)).all()
        assert (expected.norm(dim=1) > 0.01).sum() == 6
    few = rows_of(recorded, USERS[:2], 1).cpu()  # what users of before left behind does not matter
    assert torch.allclose(few, ours[:2], rtol=1e-3 if tolerance < 1e-3 else 5e-2, atol=tolerance)


@pytest.mark.filterwarnings("ignore")  # of torch's own tracing
def test_a_traced_step_equals_the_plain_step_with_idle_places_in_the_block(uncompiled):
    compare(*stacks("cpu"), 1e-5)


@needs_gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it uses itself
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bf16", 5e-2)])
def test_a_recorded_step_on_a_gpu_equals_the_plain_step(precision, tolerance):
    plain, recorded = stacks("cuda", precision)
    compare(plain, recorded, tolerance)
    assert all(recording._graphs for recording in recorded._recorded._recordings.values())  # it was replayed


@needs_gpu
@pytest.mark.filterwarnings("ignore")
def test_a_recorded_step_on_a_gpu_is_near_one_by_one_on_a_processor_core():
    _, recorded = stacks("cuda")
    stack, _ = stacks("cpu")
    expected = rows_of(OneByOne(stack.problem), USERS, 3)
    error = (rows_of(recorded, USERS, 3).cpu() - expected).norm(dim=1)
    assert (error <= 1e-3 * expected.norm(dim=1)).all()  # dropout too is the same


def test_a_recorded_program_keeps_the_type_of_the_model(uncompiled):
    model, population = nn.Linear(6, 3).double(), population_of([6, 3, 9])
    plain = one_by_one(model, cross_entropies, population, LocalSGD(0.3, batch_size=4), Streams(0))
    stack = Stacked(plain, 3, compiled=True)
    like = plain.problem.examples.gather(np.zeros((3, 1, 4), np.int64))
    first = [stack.problem.model.initial.new_zeros(3, *shape) for shape in stack._shapes.values()]
    recording = GraphedStep(CompiledStep(stack._step), first, like, users=3, steps=1, width=4)
    assert {piece.dtype for piece in recording.stack} == {torch.float64}
    assert recording.rates.dtype == torch.float64


@pytest.fixture
def cannot_be_recorded(monkeypatch):
    """As on a GPU that records no step."""
    said = RuntimeError("Cannot copy between CPU and CUDA tensors during CUDA graph capture\nmore")
    monkeypatch.setattr(GraphedStep, "_capturing", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(GraphedStep, "_captured", Mock(side_effect=said))


def test_a_step_that_cannot_be_recorded_runs_without_and_says_so_once(uncompiled, cannot_be_recorded):
    plain, recorded = stacks("cpu")
    assert recorded.in_words.endswith("compiled and recorded")
    with pytest.warns(SlowEngineWarning, match="cannot be recorded as a CUDA graph .*graph capture\\)") as warned:
        compare(plain, recorded, 1e-5)
    assert len([one for one in warned if one.category is SlowEngineWarning]) == 1
    assert recorded.in_words.endswith("compiled, not recorded")


def test_a_step_that_can_be_neither_compiled_nor_recorded_runs_as_written(cannot_be_recorded, monkeypatch):
    monkeypatch.setattr(program, "traced", Mock(side_effect=RuntimeError("no")))
    plain, recorded = stacks("cpu")
    with pytest.warns(SlowEngineWarning, match=r"cannot be (compiled|recorded)"):
        compare(plain, recorded, 1e-5)
    assert recorded.in_words.endswith("as written, not recorded")


def test_a_step_of_very_many_operations_is_recorded_as_written_and_not_compiled(monkeypatch):
    monkeypatch.setattr(program, "traced", Mock(side_effect=AssertionError("compiling it would take minutes")))
    monkeypatch.setattr(trainer, "_MOST_TRACED", 10)
    plain, recorded = stacks("cpu")
    assert recorded.in_words.endswith("as written and recorded")
    compare(plain, recorded, 1e-5)


def test_a_step_that_runs_as_it_is_written_is_followed_by_a_check_of_what_it_left():
    step, checks = pulling(True), []
    step.check = lambda: checks.append(1)
    arguments = [torch.zeros(2, 1, 1)], NO_KEYS, {"x": torch.ones(2, 2)}, torch.ones(2, 2, dtype=torch.bool), 1.0
    CompiledStep(step, compiled=False)(arguments)
    assert checks == [1]
