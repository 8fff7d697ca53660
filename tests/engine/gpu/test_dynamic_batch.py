"""One traced program for any number of users."""

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

from clipline.engine.gpu import dynamic_batch
from clipline.engine.gpu.dynamic_batch import copied, traced, traced_once


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
        program([ours], rates, [])
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
    program([weights := torch.zeros(5, 2)], torch.ones(5), [])
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
    plain, modes = dynamic_batch.make_fx, []

    def full(function, **how):
        modes.append(how.get("tracing_mode"))

        def fails(*arguments):
            raise torch.OutOfMemoryError

        return plain(function, **how) if how else fails

    monkeypatch.setattr(dynamic_batch, "make_fx", full)
    found = traced(step, arguments)
    assert modes == [None, "fake"] * 2
    assert found.code == usual.code
    constants = [node.target for node in found.graph.nodes if node.op == "get_attr"]
    assert any(torch.equal(getattr(found, name), frozen) for name in constants)
    assert ran.count(FakeTensor) == 2


def rounding(stack, inputs):
    """SGD on pieces used through a copy in bfloat16, through two, through one and as they are, or not at all."""
    leaves = [piece.detach().requires_grad_() for piece in stack]
    once, twice, also, _ = leaves
    products = inputs.bfloat16() * once.bfloat16() + inputs.bfloat16() * twice.bfloat16() * twice.bfloat16()
    loss = (products + also.bfloat16()).float().square().sum() + also.square().sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    for piece, gradient in zip(stack, gradients, strict=True):
        if gradient is not None:
            piece.sub_(gradient * 0.01)


@pytest.mark.filterwarnings("ignore")
def test_a_copy_that_a_step_would_make_anew_is_kept_and_renewed():
    generator = torch.Generator().manual_seed(1)
    arguments = ([torch.zeros(2, 5) for _ in range(4)], torch.zeros(2, 5))
    once = traced_once(rounding, arguments)
    assert copied(once, 4) == {0: torch.bfloat16, 2: torch.bfloat16}
    copies = {piece: torch.zeros(2, 5, dtype=torch.bfloat16) for piece in (0, 2)}
    program = traced(rounding, arguments, copies, once)
    assert program.code == traced(rounding, arguments, copies).code
    ours = [torch.randn(3, 5, generator=generator) for _ in range(4)]
    expected = [piece.clone() for piece in ours]
    copy, other_copy = ours[0].bfloat16(), ours[2].bfloat16()
    for _ in range(3):
        inputs = torch.randn(3, 5, generator=generator)
        program(ours, inputs, [copy, other_copy])
        rounding(expected, inputs)
        for one, other in zip(ours, expected, strict=True):
            assert torch.equal(one, other)
        assert torch.equal(copy, ours[0].bfloat16())
        assert torch.equal(other_copy, ours[2].bfloat16())
    before = ours[0].clone()
    copy.zero_()
    program(ours, inputs, [copy, other_copy])
    rounding(expected, inputs)
    assert not torch.equal(ours[0], expected[0])  # it is the copy that counts
    assert not torch.equal(ours[0], before)


def test_a_piece_that_may_be_written_in_another_way_is_not_kept():
    def overwritten(stack):
        (piece,) = stack
        total = piece.bfloat16().sum()
        piece.view(-1)[:1].zero_()
        piece.sub_(total)

    assert copied(traced_once(overwritten, ([torch.zeros(2, 5)],)), 1) == {}


class Swapped(torch.autograd.Function):
    """A product whose gradients are the very tensors that were multiplied."""

    @staticmethod
    def forward(ctx, one, other):
        ctx.save_for_backward(one, other)
        return (one * other).float().sum(dim=1)

    @staticmethod
    def backward(ctx, grad):
        one, other = ctx.saved_tensors
        return other, one


def swapping(stack):
    leaves = [piece.detach().requires_grad_() for piece in stack]
    loss = Swapped.apply(*(leaf.bfloat16() for leaf in leaves)).sum()
    for piece, gradient in zip(stack, torch.autograd.grad(loss, leaves), strict=True):
        piece.sub_(gradient * 0.1)


@pytest.mark.filterwarnings("ignore")
def test_copies_are_renewed_when_all_pieces_have_moved():
    arguments = ([torch.zeros(2, 5) for _ in range(2)],)
    assert list(copied(traced_once(swapping, arguments), 2)) == [0, 1]
    program = traced(swapping, arguments, {piece: torch.zeros(2, 5, dtype=torch.bfloat16) for piece in range(2)})
    ours = [torch.randn(3, 5, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    expected, copies = [piece.clone() for piece in ours], [piece.bfloat16() for piece in ours]
    for _ in range(3):
        program(ours, copies)
        swapping(expected)
        for one, other, copy in zip(ours, expected, copies, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(copy, one.bfloat16())


def test_tracing_makes_one_mode_for_all_operations(monkeypatch):
    """torch makes one for each otherwise, with a walk through the call stack."""
    made, init = [], FakeTensorMode.__init__

    def counted(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "__init__", counted)
    graph = traced_once(swapping, ([torch.zeros(2, 5) for _ in range(2)],))
    assert len(graph.graph.nodes) > 10
    assert len(made) == 1
