"""One traced program for any number of users."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from clipline.engine.gpu import recorded_step
from clipline.engine.gpu.recorded_step import traced


def halved(stack, rates):
    """Something whose traced constants depend on the number of users in several ways."""
    (weights,) = stack
    users, width = weights.shape
    table = torch.arange(users * width).view(users, width)
    weights.sub_(table.reshape(-1, 1).expand(users * width, 2).sum(dim=1).view(users, width) * rates.view(-1, 1))


@pytest.mark.filterwarnings("ignore")
def test_a_program_traced_for_two_numbers_of_users_serves_all():
    program = traced(halved, ([torch.zeros(3, 4)], torch.ones(3)))
    for users in (1, 2, 5, 13, 40):
        ours, expected = torch.zeros(users, 4), torch.zeros(users, 4)
        rates = torch.linspace(0, 1, users)
        program([ours], rates)
        halved([expected], rates)
        assert torch.equal(ours, expected)
        assert users == 1 or ours.abs().sum() > 0


@pytest.mark.filterwarnings("ignore")
def test_a_step_whose_course_depends_on_the_number_of_users_is_refused():
    def branching(stack, rates):
        stack[0].sub_(rates.view(-1, 1) if len(rates) < 15 else rates.view(-1, 1).exp())

    with pytest.raises(ValueError, match=r"another course|argument"):
        traced(branching, ([torch.zeros(3, 4)], torch.ones(3)))

    def squared(stack, rates):
        stack[0].sub_(torch.zeros(len(rates) ** 2).sum())

    with pytest.raises(ValueError, match="evenly"):
        traced(squared, ([torch.zeros(3, 4)], torch.ones(3)))

    def averaged(stack, rates):
        stack[0].sub_(torch.tensor(1 / len(rates)))

    with pytest.raises(ValueError, match="another tensor"):
        traced(averaged, ([torch.zeros(3, 4)], torch.ones(3)))


@pytest.mark.filterwarnings("ignore")
def test_a_constant_with_nan_is_the_same_when_the_step_is_traced_again():
    def step(stack, rates):
        stack[0].sub_(torch.tensor([float("nan"), 2.0]))

    program = traced(step, ([torch.zeros(3, 2)], torch.ones(3)))
    program([weights := torch.zeros(5, 2)], torch.ones(5))
    assert weights[:, 1].tolist() == [-2.0] * 5
    assert weights[:, 0].isnan().all()


@pytest.mark.filterwarnings("ignore")
def test_where_memory_is_short_a_step_is_traced_without_running_and_is_the_same(monkeypatch):
    frozen = torch.linspace(0, 1, 4)
    ran = []

    def step(stack, rates):
        ran.append(type(rates))
        halved(stack, rates)
        stack[0].sub_(torch.func.vmap(torch.mul)(frozen.expand(len(rates), 4), rates))

    arguments = ([torch.zeros(3, 4)], torch.ones(3))
    usual = traced(step, arguments)
    plain, modes = recorded_step.make_fx, []

    def full(function, **how):
        modes.append(how.get("tracing_mode"))

        def fails(*arguments):
            raise torch.OutOfMemoryError

        return plain(function, **how) if how else fails

    monkeypatch.setattr(recorded_step, "make_fx", full)
    found = traced(step, arguments)
    assert modes == [None, "fake"] * 2
    assert found.code == usual.code
    constants = [node.target for node in found.graph.nodes if node.op == "get_attr"]
    assert any(torch.equal(getattr(found, name), frozen) for name in constants)
    assert ran.count(FakeTensor) == 2


def test_tracing_makes_one_mode_for_all_operations(monkeypatch):
    """torch makes one for each otherwise, with a walk through the call stack."""
    made, init = [], FakeTensorMode.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "__init__", counted)
    graph = traced(halved, ([torch.zeros(3, 4)], torch.ones(3)))
    assert len(graph.graph.nodes) > 10
    assert len(made) == 2  # it is traced for two numbers of users
