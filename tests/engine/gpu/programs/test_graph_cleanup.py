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


def twice(x):
    x.exp()
    return torch.sin(x.detach() + 1) * torch.sin(x + 1)


def around_a_write(x, y):
    before = x.view(-1).exp(), y.exp()
    x.t().add_(y)
    return *before, x.view(-1).exp(), y.exp()


def through_a_view_that_does_not_say_so(x):
    before = x.exp()
    x.unsafe_chunk(2)[0].sigmoid_()  # as torch's own LSTM does
    return before, x.exp()


def random_numbers(x):
    torch.rand(3)
    return torch.rand(3) - torch.rand(3) + x


CLEANED = {
    "what is computed twice is computed once, and what nobody reads not at all": (
        twice, [torch.randn(5)], {aten.add.Tensor: 1, aten.sin.default: 1, aten.mul.Tensor: 1, aten.exp.default: 0}),
    "numbers of different types or signs are different": (
        lambda x: (x + 1, x + 1.0, x + 1, x.copysign(0.0), x.copysign(-0.0)), [torch.tensor([2])],
        {aten.add.Tensor: 2, aten.copysign.Scalar: 2}),
    "reads before and after a write stay apart, also through views": (  # y twice the same, x not
        around_a_write, [torch.randn(3, 3), torch.randn(3, 3)], {aten.exp.default: 3}),
    "two new tensors that are written to are two": (
        lambda x: (torch.zeros(3).add_(x), torch.zeros(3).sub_(x)), [torch.arange(3.0)], {aten.zeros.default: 2}),
    "views that do not say so are views": (
        through_a_view_that_does_not_say_so, [torch.zeros(2)], {aten.exp.default: 2}),
    "random numbers are drawn as often as before, also where nobody reads them": (
        random_numbers, [torch.zeros(3)], {aten.rand.default: 3}),
}  # fmt: skip


@pytest.mark.parametrize(("function", "inputs", "expected"), CLEANED.values(), ids=CLEANED)
def test_a_cleaned_graph_computes_the_same_with_as_few_operations(function, inputs, expected):
    graph, counts = tidy(function, *(one.clone() for one in inputs))
    assert {target: counts.get(target, 0) for target in expected} == expected
    results = []
    for run in (lambda *given: ran(graph, *given), function):
        given = [one.clone() for one in inputs]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            out = run(*given)
        results.append([*(out if isinstance(out, list | tuple) else [out]), *given])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
        assert torch.equal(ours.signbit(), theirs.signbit())


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
