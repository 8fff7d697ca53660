"""Traces the step of a stack into one FX graph that serves any number of users.

`torch.func.vmap` bakes the number of users into the graph as constants. Tracing the step for two different numbers
shows which constants those are: they differ between the two graphs, by an amount per user.

Plain twin: the step itself (`StackStep`), which is traced; used eagerly where tracing or compiling fails.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/gpu/test_dynamic_batch.py.
Buys: see `recorded_step.py`, which compiles what is traced here.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

_USERS = (13, 17)  # two numbers of users that are unlikely to be other constants of the graph


def traced(step: Callable[..., None], arguments: tuple[Any, ...]) -> GraphModule:
    """The step as a graph with these arguments, a stack first; the first axis of every tensor counts users.

    It updates the stack in place. Of `arguments` only shapes and types are used: the step is traced on zeros.
    """
    programs = [_trace(step, arguments, users) for users in _USERS]
    graph = programs[0].graph
    pairs = list(zip(graph.nodes, programs[1].graph.nodes, strict=True))
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
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


def _trace(step: Callable[..., None], arguments: tuple[Any, ...], users: int) -> GraphModule:
    """The step of so many users, run once on zeros; without computing anything where these take too much memory.

    Running it is the safer way: a model may look at a number, as long as that does not depend on its inputs.
    """

    def flat_step(*arguments: Any) -> None:
        with torch.enable_grad():
            step(*arguments)

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
