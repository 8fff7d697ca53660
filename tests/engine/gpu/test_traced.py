"""One traced program for any number of users."""

import pytest
import torch
from torch._subclasses import FakeTensor

from clipline.engine.gpu import recorded_step
from clipline.engine.gpu.recorded_step import traced

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own tracing


def halved(stack, rates):
    """Something whose traced constants depend on the number of users in several ways."""
    (weights,) = stack
    users, width = weights.shape
    table = torch.arange(users * width).view(users, width)
    weights.sub_(table.reshape(-1, 1).expand(users * width, 2).sum(dim=1).view(users, width) * rates.view(-1, 1))


def test_a_program_traced_for_two_numbers_of_users_serves_all():
    program = traced(halved, ([torch.zeros(3, 4)], torch.ones(3)))
    for users in (1, 2, 5, 13, 40):
        ours, expected = torch.zeros(users, 4), torch.zeros(users, 4)
        rates = torch.linspace(0, 1, users)
        program([ours], rates)
        halved([expected], rates)
        assert torch.equal(ours, expected)
        assert users == 1 or ours.abs().sum() > 0


def test_a_step_whose_course_depends_on_the_number_of_users_is_refused():
    for taken, words in (
        (lambda rates: rates.view(-1, 1) if len(rates) < 15 else rates.view(-1, 1).exp(), r"another course|argument"),
        (lambda rates: torch.zeros(len(rates) ** 2).sum(), "evenly"),
        (lambda rates: torch.tensor(1 / len(rates)), "another tensor"),
    ):
        with pytest.raises(ValueError, match=words):
            traced(lambda stack, rates, taken=taken: stack[0].sub_(taken(rates)), ([torch.zeros(3, 4)], torch.ones(3)))


def test_a_constant_with_nan_is_the_same_when_the_step_is_traced_again():
    def step(stack, rates):
        stack[0].sub_(torch.tensor([float("nan"), 2.0]))

    program = traced(step, ([torch.zeros(3, 2)], torch.ones(3)))
    program([weights := torch.zeros(5, 2)], torch.ones(5))
    assert weights[:, 1].tolist() == [-2.0] * 5
    assert weights[:, 0].isnan().all()


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
