"""A graph in parts computes what it computes as a whole, bit for bit, and what repeats is one part."""

from collections import Counter

import pytest
import torch
from torch.utils._pytree import tree_leaves

from clipline.engine.gpu.programs import program_cache, repeats
from clipline.engine.gpu.programs.repeats import parted, run_calls
from clipline.engine.gpu.recorded_step import traced

LAYERS, WIDTH, ROWS = 6, 4, 3
pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own tracing


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Graphs of tests are small, and are cut all the same."""
    monkeypatch.setattr(repeats, "_LARGE", 0)
    monkeypatch.setattr(repeats, "_SAVED", 10)


def whole_and_parts(step, stack, *rest):
    """The traced step, its parts, and its constants."""
    graph = traced(step, (stack, *rest))
    constants = program_cache._lift_constants(graph)
    return graph, parted(graph, len(tree_leaves((stack, *rest)))), constants


def assert_equal_for_all_users(graph, parts, constants, like):
    generator = torch.Generator().manual_seed(0)
    for users in (2, 5):
        whole = [torch.randn(users, *one.shape[1:], generator=generator) / 2 for one in tree_leaves(like)]
        first, ours = ([one.clone() for one in whole] for _ in range(2))
        graph(*whole, *constants)
        assert all(one.isfinite().all() for one in whole)
        run_calls(parts.calls, parts.graphs, [*ours, *constants])
        assert all(torch.equal(one, other) for one, other in zip(whole, ours, strict=True))
        assert sum(not torch.equal(one, other) for one, other in zip(whole, first, strict=True)) == len(like[0])


def assert_layers_are_a_part(step, *like):
    """What repeats in each layer, but perhaps the first, is one part, and the parts compute what the whole does."""
    graph, parts, constants = whole_and_parts(step, *like)
    assert max(Counter(call.part for call in parts.calls).values()) >= LAYERS - 1
    assert_equal_for_all_users(graph, parts, constants, like)


def residual(frozen):
    """SGD on layers with a residual and a mask that each makes anew. The frozen weights are no part of the stack."""

    def step(stack, inputs, rates):
        leaves = [piece.detach().requires_grad_() for piece in stack]
        hidden = inputs
        for place, (matrix, shift) in enumerate(zip(leaves[::2], leaves[1::2], strict=True)):
            mask = torch.ones(ROWS, ROWS).tril().unsqueeze(0) == 0
            scores = torch.bmm(hidden, hidden.transpose(1, 2)).masked_fill(mask, -1e9).softmax(dim=2)
            mixed = torch.bmm(scores, torch.bmm(hidden, matrix)) + shift.unsqueeze(1)
            gate = (mixed.reshape(-1, WIDTH) @ frozen[place].t()).view_as(hidden)
            hidden = hidden + torch.nn.functional.silu(gate) * mixed
        gradients = torch.autograd.grad(hidden.square().sum(), leaves)
        for piece, gradient in zip(stack, gradients, strict=True):
            piece.sub_(gradient * rates.view(-1, *[1] * (piece.ndim - 1)))

    return step


def residual_inputs(layers=LAYERS):
    stack = [one for _ in range(layers) for one in (torch.zeros(2, WIDTH, WIDTH), torch.zeros(2, WIDTH))]
    return stack, torch.zeros(2, ROWS, WIDTH), torch.zeros(2)


def test_layers_backward_layers_and_updates_are_a_part_each_and_compute_the_same():
    frozen = torch.randn(LAYERS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    like = residual_inputs()
    graph, parts, constants = whole_and_parts(residual(frozen), *like)
    assert_equal_for_all_users(graph, parts, constants, like)
    often = [count for _, count in Counter(call.part for call in parts.calls).most_common(3)]
    assert min(often) >= LAYERS - 2  # the first and the last layer may differ
    assert max(often) <= LAYERS
    # Tensors that calls make are numbered after the inputs; each is dropped once, after its last use.
    inputs = len(tree_leaves(like)) + len(constants)
    made = [number for call in parts.calls for _, number in call.made]
    assert sorted(made) == list(range(inputs, inputs + len(made)))
    assert sorted(number for call in parts.calls for number in call.done) == sorted(made)
    # The backward pass of silu reads its input: who has that can make its output again.
    returned = {node.target for part in parts.graphs for node in next(iter(reversed(part.graph.nodes))).args[0]}
    assert torch.ops.aten.silu.default in {node.target for part in parts.graphs for node in part.graph.nodes}
    assert torch.ops.aten.silu.default not in returned
    # One more layer is one more call of each part, and nothing more to compile.
    _, deeper, _ = whole_and_parts(residual([*frozen, frozen[0]]), *residual_inputs(LAYERS + 1))
    assert len(deeper.calls) == len(parts.calls) + 3
    assert deeper.nodes == parts.nodes
    # A graph that is not large is compiled whole.
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(repeats, "_LARGE", len(graph.graph.nodes))
        assert parted(graph, len(tree_leaves(like))) is None


def test_a_tensor_that_parts_write_to_and_read_through_views_is_one_tensor():
    def step(stack, inputs, rates):
        state, *weights = stack
        flat = state.view(len(rates), -1)  # made once, before anything is written
        for weight in weights:
            before = flat.sum(dim=1, keepdim=True)
            state.mul_(0.5).add_(inputs * weight.unsqueeze(1))
            weight.sub_(torch.tanh(flat.sum(dim=1, keepdim=True) - before) * rates.view(-1, 1))

    stack = [torch.zeros(2, ROWS, WIDTH), *(torch.zeros(2, WIDTH) for _ in range(LAYERS))]
    assert_layers_are_a_part(step, stack, torch.zeros(2, ROWS, WIDTH), torch.zeros(2))


def test_slices_of_what_is_written_to_are_made_anew_in_each_part():
    def step(stack, inputs, rates):
        halves = [half for table in stack for half in table.split(ROWS, dim=1)]
        for place, table in enumerate(stack):
            before, after = halves[2 * place : 2 * place + 2]
            table.sub_(torch.tanh(before.exp().cos() + after).mean(dim=1, keepdim=True) * inputs)
            table.mul_(torch.sin(before + after).sum(dim=(1, 2)).view(-1, 1, 1) * rates.view(-1, 1, 1))

    stack = [torch.zeros(2, 2 * ROWS, WIDTH) for _ in range(LAYERS)]
    assert_layers_are_a_part(step, stack, torch.zeros(2, 1, WIDTH), torch.zeros(2))


def test_a_cast_that_is_written_to_is_made_once():
    """Also by a part, and read by later ones: a cast made again there would be without what was written."""

    def step(stack, inputs, rates):
        wide = inputs.double()
        for weight in stack:
            wide.mul_(0.5).add_(weight.unsqueeze(1))
            weight.sub_(torch.tanh(wide.sum(dim=1)).cos().exp().sin().sigmoid().float() * rates.view(-1, 1))

    stack = [torch.zeros(2, WIDTH) for _ in range(LAYERS)]
    assert_layers_are_a_part(step, stack, torch.zeros(2, ROWS, WIDTH), torch.zeros(2))


def test_layers_may_read_slices_of_one_tensor():
    """As the keys of random layers are; the number of the slice is all in which these layers differ."""

    def step(stack, inputs, rates):
        hidden = stack[0]
        for place in range(LAYERS):
            hidden = torch.tanh(hidden * inputs[:, place]).cos().exp().sin().sigmoid().neg().erf() + hidden
        stack[0].sub_(hidden * rates.view(-1, 1))

    assert_layers_are_a_part(step, [torch.zeros(2, WIDTH)], torch.zeros(2, LAYERS, WIDTH), torch.zeros(2))


def test_two_layers_are_no_repetition():
    assert whole_and_parts(residual(torch.zeros(2, WIDTH, WIDTH)), *residual_inputs(2))[1] is None
