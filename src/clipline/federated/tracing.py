"""A step of a stack as one flat program that serves any number of users.

`torch.func.vmap` writes the number of users into the program as a constant. Tracing the step for two different numbers
shows which constants those are: they differ between the two programs, and by how much per user.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

_USERS = (13, 17)  # two numbers that are unlikely to be anything else in a program


def traced(step: Callable[..., None], arguments: tuple[Any, ...]) -> GraphModule:
    """The step as a flat program of (stack, ...), whose tensors all have the users as first axis; it works in place.

    `arguments` show shapes and types only: the step runs on new tensors of zeros.
    """
    programs = [_trace(step, arguments, users) for users in _USERS]
    graph = programs[0].graph
    pairs = list(zip(graph.nodes, programs[1].graph.nodes, strict=True))
    first = next(node for node in graph.nodes if node.op == "placeholder")
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    with graph.inserting_after(last):
        users = graph.call_method("size", (first, 0))
    for node, other in pairs:
        if node.op != other.op or node.target != other.target:
            raise ValueError(f"the step takes another course for another number of users ({node.format_node()})")
        if node.op == "call_function":
            node.args = _same(node.args, other.args, node, users)
            node.kwargs = _same(node.kwargs, other.kwargs, node, users)
    graph.lint()
    programs[0].recompile()
    return programs[0]


def _trace(step: Callable[..., None], arguments: tuple[Any, ...], users: int) -> GraphModule:
    def flat_step(*arguments: Any) -> None:
        with torch.enable_grad():
            step(*arguments)

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
