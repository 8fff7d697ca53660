"""Traces the step of a stack into one FX graph that serves any number of users.

`torch.func.vmap` bakes the number of users into the graph as constants. Tracing the step for two different numbers
shows which constants those are: they differ between the two graphs, by an amount per user.

Under autocast the graph also keeps the bfloat16 copies of weights from step to step and refreshes them after the SGD
update, instead of casting in every step.

Plain twin: the step itself (`StackStep`), which is traced; used eagerly where tracing or compiling fails.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/gpu/test_dynamic_batch.py.
Buys: kept bfloat16 copies, emnist_cr on an H200: 18.7 ms a round without, 17.1 with (docs/results/performance.md).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

_USERS = (13, 17)  # two numbers of users that are unlikely to be other constants of the graph
_ATEN = torch.ops.aten
_VIEWS = (_ATEN.detach.default, _ATEN.alias.default, _ATEN.view.default, _ATEN.permute.default)


def traced(
    step: Callable[..., None],
    arguments: tuple[Any, ...],
    copies: Mapping[int, torch.Tensor] | None = None,
    first: GraphModule | None = None,
) -> GraphModule:
    """The step as a graph with arguments (stack, ..., copies); the first axis of every tensor counts users.

    It updates the stack in place. Of `arguments` only shapes and types are used: the step is traced on zeros. `copies`
    are casts of some pieces of the stack, as chosen by `copied`: the graph uses them where the step would cast the
    piece, and refreshes them when the piece has been updated. `first` is what `traced_once` gave, which is used up.
    """
    copies = copies or {}
    few, more = _USERS
    second = _trace(step, (*arguments, list(copies.values())), more)
    if first is None:
        first = _trace(step, (*arguments, list(copies.values())), few)
    else:
        _add_inputs(first, second)
    programs = [first, second]
    for program in programs:
        inputs = _inputs(program.graph)
        for piece, cached in zip(copies, inputs[len(inputs) - len(copies) :], strict=True):
            _use_cached_copy(cached, inputs[piece])
    graph = programs[0].graph
    pairs = list(zip(graph.nodes, programs[1].graph.nodes, strict=True))
    inputs = _inputs(graph)
    with graph.inserting_after(inputs[-1]):
        users = graph.call_function(torch.ops.aten.sym_size.int, (inputs[0], 0))
    for node, other in pairs:
        if node.op != other.op or node.target != other.target:
            raise ValueError(f"the step takes another course for another number of users ({node.format_node()})")
        if node.op == "get_attr" and not _same(*(getattr(one, str(node.target), None) for one in programs)):
            raise ValueError(f"the step makes another tensor when it is traced again ({node.format_node()})")
        if node.op == "call_function":
            node.args = _generalise(node.args, other.args, node, users)
            node.kwargs = _generalise(node.kwargs, other.kwargs, node, users)
    graph.lint()
    programs[0].recompile()
    return programs[0]


def traced_once(step: Callable[..., None], arguments: tuple[Any, ...]) -> GraphModule:
    """The step for one number of users and without copies: to be looked at by `copied`, and then for `traced`."""
    return _trace(step, (*arguments, []), _USERS[0])


def copied(once: GraphModule, pieces: int) -> dict[int, torch.dtype]:
    """Of the first `pieces` inputs, those that the step casts to another type, once, and that type.

    It may read them as they are, too, as a penalty on the weights does.
    """
    inputs = _inputs(once.graph)[:pieces]
    found = {piece: _cast_and_update(node) for piece, node in enumerate(inputs)}
    return {piece: cast("torch.dtype", both[0].kwargs["dtype"]) for piece, both in found.items() if both is not None}


def _add_inputs(program: GraphModule, like: GraphModule) -> None:
    """Give the program the inputs that the other one has after its own, unused."""
    ours, theirs = _inputs(program.graph), _inputs(like.graph)
    last = ours[-1]
    for other in theirs[len(ours) :]:
        with program.graph.inserting_after(last):
            last = program.graph.placeholder(other.name)
    program.graph.set_codegen(like.graph._codegen)  # which takes the arguments apart


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _uses(node: Node) -> Iterator[Node]:
    """The nodes that use a tensor, also through views."""
    for user in node.users:
        if user.target in _VIEWS:
            yield from _uses(user)
        else:
            yield user


def _reads(node: Node) -> bool:
    """Whether the node only reads: it writes into no argument, and nothing can be written through what it gives."""
    if not isinstance(node.target, OpOverload):
        return False
    schema = node.target._schema
    return not schema.is_mutable and all(given.alias_info is None for given in schema.returns)


def _cast_and_update(piece: Node) -> tuple[Node, Node] | None:
    """The only node that casts the piece and the one that updates it after, if all its other uses are reads."""
    uses = list(_uses(piece))
    copies = [user for user in uses if user.target is _ATEN._to_copy.default]
    update_nodes = [user for user in uses if user.target is _ATEN.sub_.Tensor and user.args[0] is piece]
    if not len(copies) == len(update_nodes) == 1 or list(copies[0].kwargs) != ["dtype"]:
        return None
    others = [user for user in uses if user is not update_nodes[0]]
    return (copies[0], update_nodes[0]) if all(_reads(user) for user in others) else None


def _use_cached_copy(cached: Node, piece: Node) -> None:
    """Replace the cast of the piece by the cached copy, and refresh the copy at the end of the graph."""
    both = _cast_and_update(piece)
    assert both is not None
    cast_node, update_node = both
    views: list[Node] = []
    above = cast("Node", cast_node.args[0])
    while above is not piece:
        views.append(above)
        above = cast("Node", above.args[0])
    seen = cached
    with piece.graph.inserting_before(cast_node):
        for view in reversed(views):  # the copy is laid out as the piece is
            seen = piece.graph.call_function(cast("OpOverload", view.target), (seen, *view.args[1:]), view.kwargs)
    cast_node.replace_all_uses_with(seen)
    piece.graph.erase_node(cast_node)
    with piece.graph.inserting_before(
        next(iter(reversed(piece.graph.nodes)))
    ):  # at the end: all pieces have been updated
        piece.graph.call_function(_ATEN.copy_.default, (cached, update_node))


def _trace(step: Callable[..., None], arguments: tuple[Any, ...], users: int) -> GraphModule:
    """The step of so many users, run once on zeros; without computing anything where these take too much memory.

    Running it is the safer way: a model may look at a number, as long as that does not depend on its inputs.
    """

    def flat_step(*arguments: Any) -> None:
        with torch.enable_grad():
            step(*arguments[:-1])

    def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(users, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)

    zeros = tree_map_only(torch.Tensor, zeros_like, arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):  # else one for each operation
                program: GraphModule = make_fx(flat_step)(*zeros)
        except torch.OutOfMemoryError:  # a block of a large model has fewer users than are traced
            program = make_fx(flat_step, tracing_mode="fake", _allow_non_fake_inputs=True)(*zeros)
    return program


def _same(one: Any, other: Any) -> bool:
    """Whether two constants are equal, as far as torch's own classes go."""
    if one is other or not {type(one), type(other)} <= {torch.Tensor, torch.nn.Parameter}:
        return True
    if not one.layout == other.layout == torch.strided:
        return bool(one.layout == other.layout)
    if (one.dtype, one.shape, one.stride()) != (other.dtype, other.shape, other.stride()):
        return False
    if one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())


def _generalise(ours: Any, theirs: Any, node: Node, users: Node) -> Any:
    """The first graph's arguments; where the second's differ, as an expression in the number of users."""
    if isinstance(ours, Node):
        return ours
    if isinstance(ours, list | tuple):
        return type(ours)(_generalise(one, other, node, users) for one, other in zip(ours, theirs, strict=True))
    if isinstance(ours, dict):
        return {key: _generalise(value, theirs[key], node, users) for key, value in ours.items()}
    if ours == theirs or ours is theirs or (ours != ours and theirs != theirs):
        return ours
    if not isinstance(ours, int) or not isinstance(theirs, int):
        raise ValueError(f"{node.format_node()} depends on the number of users")
    small, large = _USERS
    each, rest = divmod(theirs - ours, large - small)
    fixed = ours - each * small
    if (
        rest or abs(fixed) > 1
    ):  # only users * k, or that plus or minus 1: two points alone cannot tell a line from a square
        raise ValueError(f"{node.format_node()} does not grow evenly with the number of users")
    with node.graph.inserting_before(node):
        size = node.graph.call_function(operator.mul, (users, each)) if each != 1 else users
        return node.graph.call_function(operator.add, (size, fixed)) if fixed else size
