"""A step of a stack as one flat program that serves any number of users.

`torch.func.vmap` writes the number of users into the program as a constant. Tracing the step for two different numbers
shows which constants those are: they differ between the two programs, and by how much per user.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

_USERS = (13, 17)  # two numbers that are unlikely to be anything else in a program


def traced(
    step: Callable[..., None], arguments: tuple[Any, ...], copies: Mapping[int, torch.Tensor] | None = None
) -> GraphModule:
    """The step as a flat program of (stack, ..., copies), whose tensors all have the users as first axis.

    It works in place. `arguments` show shapes and types only: the step runs on new tensors of zeros. `copies` are of
    some pieces of the stack, in another type, as `copied` chooses them: the program uses them where the step would copy
    the piece, and renews them when the piece has moved.
    """
    copies = copies or {}
    programs = [_trace(step, (*arguments, list(copies.values())), users) for users in _USERS]
    for program in programs:
        inputs = _inputs(program.graph)
        for piece, kept in zip(copies, inputs[len(inputs) - len(copies) :], strict=True):
            _use(kept, inputs[piece])
    graph = programs[0].graph
    pairs = list(zip(graph.nodes, programs[1].graph.nodes, strict=True))
    inputs = _inputs(graph)
    with graph.inserting_after(inputs[-1]):
        users = graph.call_method("size", (inputs[0], 0))
    for node, other in pairs:
        if node.op != other.op or node.target != other.target:
            raise ValueError(f"the step takes another course for another number of users ({node.format_node()})")
        if node.op == "call_function":
            node.args = _same(node.args, other.args, node, users)
            node.kwargs = _same(node.kwargs, other.kwargs, node, users)
    graph.lint()
    programs[0].recompile()
    return programs[0]


def copied(step: Callable[..., None], arguments: tuple[Any, ...]) -> dict[int, torch.dtype]:
    """The pieces of the stack that the step uses through one copy in another type alone, and that type."""
    inputs = _inputs(_trace(step, (*arguments, []), _USERS[0]).graph)[: len(arguments[0])]
    found = {piece: _copy_and_move(node) for piece, node in enumerate(inputs)}
    return {piece: cast("torch.dtype", both[0].kwargs["dtype"]) for piece, both in found.items() if both is not None}


def _inputs(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _uses(node: Node) -> Iterator[Node]:
    """What uses a tensor, also by another name."""
    for user in node.users:
        if user.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            yield from _uses(user)
        else:
            yield user


def _copy_and_move(piece: Node) -> tuple[Node, Node] | None:
    """Where the piece is copied in another type and where it moves, if nothing else is done with it."""
    uses = list(_uses(piece))
    copies = [user for user in uses if user.target is torch.ops.aten._to_copy.default]
    moves = [user for user in uses if user.target is torch.ops.aten.sub_.Tensor and user.args[0] is piece]
    if len(uses) == 2 and len(copies) == len(moves) == 1 and list(copies[0].kwargs) == ["dtype"]:
        return copies[0], moves[0]
    return None


def _use(kept: Node, piece: Node) -> None:
    """Put what is kept in the place of the copy, and renew it after the piece has moved."""
    both = _copy_and_move(piece)
    assert both is not None
    copy, move = both
    copy.replace_all_uses_with(kept)
    piece.graph.erase_node(copy)
    with piece.graph.inserting_before(next(iter(reversed(piece.graph.nodes)))):  # all others have moved as well
        piece.graph.call_function(torch.ops.aten.copy_.default, (kept, move))


def _trace(step: Callable[..., None], arguments: tuple[Any, ...], users: int) -> GraphModule:
    def flat_step(*arguments: Any) -> None:
        with torch.enable_grad():
            step(*arguments[:-1])

    def alike(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(users, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: GraphModule = make_fx(flat_step)(*tree_map_only(torch.Tensor, alike, arguments))
    return program


def _same(ours: Any, theirs: Any, node: Node, users: Node) -> Any:
    """Our arguments, where they differ from theirs as an expression in the number of users."""
    if isinstance(ours, Node):
        return ours
    if isinstance(ours, list | tuple):
        return type(ours)(_same(one, other, node, users) for one, other in zip(ours, theirs, strict=True))
    if isinstance(ours, dict):
        return {key: _same(value, theirs[key], node, users) for key, value in ours.items()}
    if ours == theirs or ours is theirs or (ours != ours and theirs != theirs):
        return ours
    if not isinstance(ours, int) or not isinstance(theirs, int):
        raise ValueError(f"{node.format_node()} depends on the number of users")
    few, many = _USERS
    each, rest = divmod(theirs - ours, many - few)
    fixed = ours - each * few
    if rest or abs(fixed) > 1:  # a multiple of the users, or the last of them: a square would pass for a straight line
        raise ValueError(f"{node.format_node()} does not grow evenly with the number of users")
    with node.graph.inserting_before(node):
        size = node.graph.call_function(operator.mul, (users, each)) if each != 1 else users
        return node.graph.call_function(operator.add, (size, fixed)) if fixed else size
