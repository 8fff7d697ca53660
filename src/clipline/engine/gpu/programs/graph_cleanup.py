"""A traced graph without what is computed twice, and which of its tensors share memory.

The compiler merges equal operations within what it is given. Here they are merged before a graph is cut into parts
(`repeats.py`): a mask that every layer computes anew is computed once.

Plain twin: the graph as it was traced.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/gpu/programs/test_graph_cleanup.py.
Buys: a part of what is measured in `repeats.py`; not measured by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_aten = torch.ops.aten
NUMBERS = {_aten.sym_size.int, operator.mul, operator.add, operator.sub, operator.floordiv}  # of users
# Views, though the operations do not say so.
_UNSAFE_VIEWS = {
    _aten._unsafe_view.default, _aten.unsafe_split.Tensor, _aten.unsafe_split_with_sizes.default,
}  # fmt: skip
_KNOWN = {"aten", "prims", "clipline"}  # namespaces whose operations say when they draw random numbers


class Inseparable(Exception):
    """The graph does something that the rules for sharing memory and for cutting do not cover."""


def _schema(node: Node) -> Any:
    """What the operation says of itself; None for Python's own operators."""
    if isinstance(node.target, torch._ops.OpOverload):
        # A view made again after its base got another shape would be another view.
        if torch.Tag.inplace_view in node.target.tags or _updates_statistics(node):
            raise Inseparable(node.format_node())
        return node.target._schema
    if node.op == "call_function" and (node.target in NUMBERS or node.target is operator.getitem):
        return None
    raise Inseparable(node.format_node())


def _updates_statistics(node: Node) -> bool:
    """Whether it is a batch norm that writes to its running means, which torch's older ones do not say."""
    target: Any = node.target
    given = {one.name: one for one in target._schema.arguments}
    if "running_mean" not in given or "training" not in given or given["running_mean"].alias_info is not None:
        return False
    values = dict(zip(given, node.args, strict=False)) | node.kwargs
    return values.get("running_mean") is not None and values.get("training") is not False


def drawn(node: Node) -> bool:
    """Whether another call may give another result: random draws, and operations that do not say so."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags or node.target.namespace not in _KNOWN


def _nodes_in(argument: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(argument, found.append)
    return found


def _aliased(node: Node, *, written: bool) -> Iterator[Node]:
    """The arguments that the operation writes to, or those that its results may share memory with."""
    schema = _schema(node)
    if schema is None or node.target in _UNSAFE_VIEWS:
        if not written and (node.target is operator.getitem or node.target in _UNSAFE_VIEWS):
            yield from _nodes_in(node.args[0])
        return
    if not written and not any(result.alias_info is not None for result in schema.returns):
        return
    for place, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and (argument.alias_info.is_write or not written):
            value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
            yield from _nodes_in(value)


def _in_place(node: Node) -> bool:
    """Whether its result is the one tensor that it writes to."""
    results = () if _schema(node) is None else _schema(node).returns
    writes = [result.alias_info is not None and result.alias_info.is_write for result in results]
    return writes == [True] and len(list(_aliased(node, written=True))) == 1


def acts(node: Node) -> bool:
    """Whether the node has side effects."""
    schema = _schema(node)
    return schema is not None and (not schema.returns or any(_aliased(node, written=True)))


def memory(graph: Graph) -> tuple[dict[Node, frozenset[Node]], frozenset[Node]]:
    """For every node those whose memory its result lies in, itself if it is new; and those that are written to."""
    homes: dict[Node, frozenset[Node]] = {}
    written: set[Node] = set()
    for node in graph.nodes:
        shared = [] if node.op != "call_function" else list(_aliased(node, written=False))
        homes[node] = frozenset().union(*(homes[one] for one in shared)) if shared else frozenset([node])
        if node.op == "call_function":
            written.update(home for one in _aliased(node, written=True) for home in homes[one])
    return homes, frozenset(written)


def clean_graph(graph: Graph) -> Graph:
    """A copy without no-ops, dead code and common subexpressions. Nodes that are written to stay as they are."""
    tidy = Graph()
    tidy.output(tidy.graph_copy(graph, {}))
    for node in tidy.nodes:  # the result of an operation in place is what it wrote to
        if node.op == "call_function" and node.users:
            if _in_place(node):
                node.replace_all_uses_with(*_aliased(node, written=True))
            elif node.target in (_aten.detach.default, _aten.alias.default):
                node.replace_all_uses_with(node.args[0])
    homes, written = memory(tidy)
    known: dict[Any, Node] = {}
    for node in list(tidy.nodes):
        touched = [home for one in (node, *node.all_input_nodes) for home in homes[one]]
        if node.op != "call_function" or drawn(node) or not written.isdisjoint(touched):
            continue
        # Numbers with their type: 1, 1.0 and True are equal, and not the same; neither are 0.0 and -0.0.
        key = node.target, frozen((node.args, node.kwargs), lambda one: one)
        first = known.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
    for node in reversed(list(tidy.nodes)):
        # Numbers that are drawn and not read stay: without them the next ones would be others.
        if node.op == "call_function" and not (node.users or acts(node) or drawn(node)):
            tidy.erase_node(node)
    return tidy


def frozen(argument: Any, name: Callable[[Node], Any]) -> Any:
    """An argument as something to compare and hash, with names for the nodes in it."""
    if isinstance(argument, Node):
        return name(argument)
    if isinstance(argument, list | tuple):
        return tuple(frozen(one, name) for one in argument)
    if isinstance(argument, dict):
        return tuple((key, frozen(one, name)) for key, one in argument.items())
    return type(argument).__name__, repr(argument)
