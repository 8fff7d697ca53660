"""Equal operations are merged where they give the same, and nowhere else."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from clipline.engine.gpu.programs.repeats import Inseparable, clean_graph, memory

aten = torch.ops.aten


def tidy(function, *arguments):
    """The cleaned graph of a function, and how often it has each operation."""
    graph = clean_graph(make_fx(function)(*arguments).graph)
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return graph, {target: targets.count(target) for target in targets}


def ran(graph, *arguments):
    return torch.fx.GraphModule(torch.nn.Module(), graph)(*arguments)


def test_what_is_computed_twice_is_computed_once_and_what_nobody_reads_not_at_all():
    def function(x):
        x.exp()
        return torch.sin(x.detach() + 1) * torch.sin(x + 1)

    x = torch.randn(5)
    graph, counts = tidy(function, x)
    assert counts == {aten.add.Tensor: 1, aten.sin.default: 1, aten.mul.Tensor: 1}
    assert torch.equal(ran(graph, x), function(x))


def test_numbers_of_different_types_or_signs_are_different():
    def function(x):
        return x + 1, x + 1.0, x + 1, x.copysign(0.0), x.copysign(-0.0)

    x = torch.tensor([2])
    graph, counts = tidy(function, x)
    assert counts == {aten.add.Tensor: 2, aten.copysign.Scalar: 2}
    for ours, expected in zip(ran(graph, x), function(x), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours, expected)
        assert torch.equal(ours.signbit(), expected.signbit())


def test_reads_before_and_after_a_write_stay_apart_also_through_views():
    def function(x, y):
        before = x.view(-1).exp(), y.exp()
        x.t().add_(y)
        return *before, x.view(-1).exp(), y.exp()

    x, y = torch.randn(3, 3), torch.randn(3, 3)
    graph, counts = tidy(function, x.clone(), y)
    assert counts[aten.exp.default] == 3  # y twice the same, x not
    ours, theirs = x.clone(), x.clone()
    for one, other in zip(ran(graph, ours, y), function(theirs, y), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(ours, theirs)


def test_two_new_tensors_that_are_written_to_are_two():
    def function(x):
        first, second = torch.zeros(3), torch.zeros(3)
        return first.add_(x), second.sub_(x)

    x = torch.arange(3.0)
    graph, counts = tidy(function, x)
    assert counts[aten.zeros.default] == 2
    assert [one.tolist() for one in ran(graph, x)] == [[0.0, 1.0, 2.0], [0.0, -1.0, -2.0]]


def test_whose_memory_a_tensor_lies_in():
    graph = make_fx(lambda x, y: (x.t()[0], x.view(-1).add_(1), y + x.t(), y.unbind()[1]))(
        torch.ones(2, 2), torch.ones(2, 2)
    )
    homes, written = memory(graph.graph)
    x, y = (node for node in graph.graph.nodes if node.op == "placeholder")
    row, added, new, part = next(iter(reversed(graph.graph.nodes))).args[0]
    assert written == {x}
    assert homes[row] == homes[added] == {x}
    assert homes[new] == {new}
    assert homes[part] == {y}


def test_views_that_do_not_say_so_are_views():
    def function(x):
        before = x.exp()
        x.unsafe_chunk(2)[0].sigmoid_()  # as torch's own LSTM does
        return before, x.exp()

    x = torch.zeros(2)
    graph, counts = tidy(function, x.clone())
    assert counts[aten.exp.default] == 2
    assert [one.tolist() for one in ran(graph, x)] == [[1.0, 1.0], [pytest.approx(torch.e**0.5), 1.0]]


def test_random_numbers_are_drawn_as_often_as_before_also_where_nobody_reads_them():
    def function(x):
        torch.rand(3)
        return torch.rand(3) - torch.rand(3) + x

    x = torch.zeros(3)
    graph, counts = tidy(function, x)
    assert counts[aten.rand.default] == 3
    results = []
    for run in (lambda: ran(graph, x), lambda: function(x)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            results.append(run())
    assert torch.equal(*results)


def test_what_another_library_computes_is_not_merged():
    """It may draw random numbers and not say so."""
    with torch.library._scoped_library("clipline_test", "DEF") as library:
        library.define("noisy(Tensor x) -> Tensor")
        library.impl("noisy", lambda x: x + torch.rand(()), "CompositeExplicitAutograd")
        noisy = torch.ops.clipline_test.noisy.default
        assert tidy(lambda x: noisy(x) - noisy(x), torch.zeros(3))[1][noisy] == 2


def test_what_changes_a_shape_in_place_is_refused():
    with pytest.raises(Inseparable, match="t_"):
        tidy(lambda x: x.clone().t_().exp(), torch.zeros(2, 3))
