"""Finds the parts of a traced step that repeat, as the layers of a transformer do, so that each is compiled once.

A step of a language model with 24 layers has 10,000 operations: forward, backward and update, 24 times the same ones on
other tensors. `parted` cuts such a graph into a straight sequence of calls of few distinct parts. Two stretches of the
graph are the same part if they have the same operations with the same constants, refer to their own results in the same
way, and get tensors of the same types and shapes from outside. All calls of a part return what any of them must.

What is cheap is not handed from part to part but computed again where it is used: views, casts to a wider type, filled
tensors and numbers made of the number of users. So what an operation in place writes to is handed from part to part as
one tensor, never as a view of it, and operations keep their order. Before the graph is cut, equal operations are
merged: a mask that every layer computes anew is computed once.

Plain twin: the graph as a whole, which is also what is compiled if it is small or does not repeat.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/gpu/programs/test_repeats.py, test_graph_cleanup.py.
Buys: a Qwen2 of 24 layers with LoRA on an H200: 0.39 s a round, 0.77 recorded as written, since compiling the whole
step takes too long (docs/howto/adapters.md).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

# Operations. A smaller graph is compiled whole in a minute or so, and the compiler fuses across what would be borders.
_LARGE = 2000
_WINDOW = 6  # operations in a row that must be equal for a distance to be tried as a period
_PERIODS = 32  # distances that are tried, the most frequent first
_REPETITIONS = 4  # at least
_SAVED = 60  # operations that a repeated part must save: a part costs about as much beside its operations

_aten = torch.ops.aten
_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten._reshape_alias.default, _aten.t.default,
    _aten.transpose.int, _aten.permute.default, _aten.expand.default, _aten.unsqueeze.default,
    _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.alias.default, _aten.detach.default,
}  # fmt: skip
_FILLED = {
    _aten.scalar_tensor.default, _aten.full.default, _aten.zeros.default, _aten.ones.default, _aten.arange.default,
    _aten.arange.start, _aten.arange.start_step,
}  # fmt: skip
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
        if torch.Tag.inplace_view in node.target.tags:
            raise Inseparable(node.format_node())
        return node.target._schema
    if node.op == "call_function" and (node.target in NUMBERS or node.target is operator.getitem):
        return None
    raise Inseparable(node.format_node())


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


@dataclass(frozen=True)
class Call:
    """One run of a part. Tensors have numbers: first the inputs of the whole graph, then what calls return."""

    part: int
    given: tuple[int, ...]
    made: tuple[tuple[int, int], ...]  # place among the part's results, number; a place that is not there is not used
    done: tuple[int, ...]  # numbers that no later call uses


@dataclass(frozen=True)
class Parts:
    """A graph as calls of parts. The first argument of every part is there to count users."""

    graphs: Sequence[GraphModule]
    calls: Sequence[Call]

    @property
    def nodes(self) -> int:
        """Operations of all parts together: what there is to compile."""
        return sum(len(graph.graph.nodes) for graph in self.graphs)


def run_calls(
    calls: Sequence[Call], parts: Sequence[Callable[..., Sequence[Tensor]]], inputs: Sequence[Tensor]
) -> None:
    """Run the calls one after the other on the inputs of the whole graph; a tensor is freed after its last use."""
    values = dict(enumerate(inputs))
    for call in calls:
        results = parts[call.part](*[values[number] for number in call.given])
        values.update((number, results[place]) for place, number in call.made)
        del results
        for number in call.done:
            del values[number]


def parted(graph: GraphModule, by_user: int) -> Parts | None:
    """The graph, a flat one without constants, as calls of parts; None if it should rather be compiled whole.

    The first `by_user` inputs count users along their first axis. None if it has few operations,
    if less than half of it repeats, or if it does what cannot be handed from part to part.
    """
    if len(graph.graph.nodes) <= _LARGE:
        return None
    try:
        tidy = clean_graph(graph.graph)
        found = _Splitter(tidy, by_user).parts()
    except Inseparable:
        return None
    return found if found.nodes <= len(tidy.nodes) / 2 else None


def _described(node: Node) -> Any:
    """Type, shape and strides of the result where they were noted in tracing."""
    value = node.meta.get("val")
    return (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else None


def _refused(node: Node) -> bool:
    """What this file has no rule for: modules and results of a graph, and views by their place in a whole memory."""
    if node.op == "output":
        return bool(node.all_input_nodes)
    return node.op not in ("placeholder", "call_function") or "as_strided" in str(node.target)


def _pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) and not drawn(node)


class _Splitter:
    """Splits one graph. Positions count its operations, without those that are computed where they are used."""

    def __init__(self, graph: Graph, by_user: int) -> None:
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.homes, self.written = memory(graph)
        counting = [node for node in self.inputs[:by_user] if node not in self.written]
        if not counting or any(map(_refused, graph.nodes)):
            raise Inseparable
        self.counting = counting[-1]
        self.users = [node for node in graph.nodes if node.target is _aten.sym_size.int]
        if any(node.args[0] not in self.inputs[:by_user] or node.args[1] != 0 for node in self.users):
            raise Inseparable
        self.order = [node for node in graph.nodes if node.op == "call_function" and not self._cheap(node)]
        # First the slices of inputs that are never written to: two layers may differ in nothing but their slice.
        unwritten = set(self.inputs) - self.written
        self.order.sort(key=lambda node: not self.homes[node] <= unwritten)
        self.slices = sum(self.homes[node] <= unwritten for node in self.order)
        self.position = {node: place for place, node in enumerate(self.order)}
        self._trees: dict[Node, tuple[Any, tuple[Node, ...]]] = {}
        kinds: dict[Any, int] = {}
        self.sources: list[tuple[Node, ...]] = []  # of each operation: inputs and other operations that it reads
        self.labels: list[int] = []  # equal for equal operations on tensors of equal types and shapes
        for node in self.order:
            tree, leaves = self._call(node)
            label = tree, _described(node), tuple(map(_described, leaves))
            self.labels.append(kinds.setdefault(label, len(kinds)))
            self.sources.append(leaves)
        self.readers: dict[Node, list[int]] = {}  # the positions that read each of them, ascending
        for place, leaves in enumerate(self.sources):
            for leaf in dict.fromkeys(leaves):
                self.readers.setdefault(leaf, []).append(place)

    def _cheap(self, node: Node) -> bool:
        """Whether it is computed again where it is used. Made again, a view of what is written to is a view of it."""
        if node.target in NUMBERS or node.target in _VIEWS:
            return True
        if node not in self.homes[node] and not self.written.isdisjoint(self.homes[node]):
            return not acts(node)
        if node in self.written:
            return False
        if node.target in _FILLED:
            return True
        if node.target is not _aten._to_copy.default or set(node.kwargs) - {"dtype", "layout", "device"}:
            return False
        source = node.args[0]
        if not isinstance(source, Node) or not self.written.isdisjoint(self.homes[source]):
            return False
        before, after = source.meta.get("val"), node.meta.get("val")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            return False
        return before.device == after.device and before.itemsize < after.itemsize

    def _tree(self, node: Node) -> tuple[Any, tuple[Node, ...]]:
        """A value as an expression in inputs and results of operations, and these, in order."""
        if node not in self._trees:
            if node in self.users:
                self._trees[node] = "users", ()
            elif node in self.position or node.op == "placeholder":
                self._trees[node] = "given", (node,)
            else:
                self._trees[node] = self._call(node)
        return self._trees[node]

    def _call(self, node: Node) -> tuple[Any, tuple[Node, ...]]:
        leaves: list[Node] = []

        def name(argument: Node) -> Any:
            tree, below = self._tree(argument)
            leaves.extend(below)
            return tree

        return (str(node.target), frozen((node.args, node.kwargs), name)), tuple(leaves)

    def parts(self) -> Parts:
        """The graph in parts."""
        repeats = sorted(self._repeats(self.slices, len(self.order)))
        stretches: list[tuple[int, int, int]] = []  # start, period, repetitions
        end = 0
        for start, period, count in repeats:
            stretches += [(end, start - end, 1)] * (end < start)
            stretches.append((start, period, count))
            end = start + period * count
        stretches += [(end, len(self.order) - end, 1)] * (end < len(self.order))
        forms = {
            begin: self._form(begin, period)
            for start, period, count in stretches
            for begin in range(start, start + period * count, period)
        }
        last = {leaf: begin for begin, (_, given) in forms.items() for leaf in given}  # the stretch that reads it last
        numbers = {node: number for number, node in enumerate(self.inputs)}
        known: dict[Any, int] = {}
        graphs: list[GraphModule] = []
        calls: list[Call] = []
        for start, period, count in stretches:
            begins = range(start, start + period * count, period)
            returned = [place for place in range(period) if any(self.order[begin + place] in last for begin in begins)]
            for begin in begins:
                form, given = forms[begin]
                key = form, tuple(returned)
                if key not in known:
                    known[key] = len(graphs)
                    graphs.append(self._graph(begin, period, given, returned))
                made = [(place, self.order[begin + at]) for place, at in enumerate(returned)]
                made = [(place, node) for place, node in made if node in last]
                numbers |= {node: len(numbers) + further for further, (_, node) in enumerate(made)}
                calls.append(
                    Call(
                        known[key],
                        tuple(numbers[leaf] for leaf in (self.counting, *given)),
                        tuple((place, numbers[node]) for place, node in made),
                        tuple(numbers[leaf] for leaf in given if last[leaf] == begin and leaf in self.position),
                    )
                )
        return Parts(graphs, calls)

    def _form(self, start: int, length: int) -> tuple[tuple[Any, ...], list[Node]]:
        """What the stretch computes, the same for all that are the same part; and what it is given from outside."""
        outside: dict[Node, int] = {}
        readers: dict[Node, list[Node]] = {}
        form: list[tuple[Any, ...]] = []

        def refer(leaf: Node) -> int:
            own = self.position.get(leaf, -1) - start
            return own if own >= 0 else -1 - outside.setdefault(leaf, len(outside))

        for place in range(start, start + length):
            form.append((self.labels[place], *map(refer, self.sources[place])))
            for leaf in self.sources[place]:
                readers.setdefault(leaf, []).append(self.order[place])
        # As the compiler would: read what is there anyway and compute once more, rather than write and read another.
        again = [
            leaf
            for leaf in outside
            if all(map(_pointwise, (leaf, *readers[leaf])))
            and all(one in outside for one in self.sources[self.position[leaf]])
            and not any(self.written & self.homes[one] for one in (leaf, *self.sources[self.position[leaf]]))
        ]
        again = [leaf for leaf in again if set(again).isdisjoint(self.sources[self.position[leaf]])]
        for leaf in again:
            form.append((refer(leaf), self.labels[self.position[leaf]], *map(refer, self.sources[self.position[leaf]])))
        return tuple(form), [leaf for leaf in outside if leaf not in again]

    def _graph(self, start: int, length: int, given: Sequence[Node], returned: Sequence[int]) -> GraphModule:
        """The stretch as a graph of its own."""
        graph = Graph()
        users = graph.placeholder("counting")
        copies = {leaf: graph.placeholder(f"given_{number}") for number, leaf in enumerate(given)}
        copies |= dict.fromkeys(self.users, graph.call_function(_aten.sym_size.int, (users, 0)))

        def copy(node: Node) -> Node:
            if node not in copies:
                for argument in node.all_input_nodes:
                    copy(argument)
                copies[node] = graph.node_copy(node, lambda one: copies[one])
            return copies[node]

        for node in self.order[start : start + length]:
            copy(node)
        for leaf in (*given, *(self.order[start + place] for place in returned)):
            self._check_border(leaf)
        graph.output(tuple(copies[self.order[start + place]] for place in returned))
        return GraphModule(torch.nn.Module(), graph)

    def _check_border(self, node: Node) -> None:
        """Refuse what must not be handed from part to part: several tensors as one, and views that are written to."""
        several = any(reader.target is operator.getitem for reader in node.users)
        viewed = node not in self.homes[node] and not self.written.isdisjoint(self.homes[node])
        if several or viewed:
            raise Inseparable(node.format_node())

    def _repeats(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Starts, periods and counts of repetitions in a stretch, which do not overlap: the largest, then the rest."""
        for begin, length, period in self._candidates(start, end):
            found = self._aligned(begin, length, period)
            if found is not None:
                first, _, count = found
                yield found
                yield from self._repeats(start, first)
                yield from self._repeats(first + period * count, end)
                return

    def _candidates(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Stretches (start, length, period) in which every operation is like the one a period later; best first."""
        latest: dict[tuple[int, ...], int] = {}
        distances: Counter[int] = Counter()
        for place in range(start, end):
            window = tuple(self.labels[place : min(place + _WINDOW, end)])
            distances[place - latest.get(window, place)] += 1
            latest[window] = place
        del distances[0]
        found = []
        for period, _ in distances.most_common(_PERIODS):
            begin = start
            for place in range(start, end):
                if place + period >= end or self.labels[place] != self.labels[place + period]:
                    found.append((begin, place - begin + period, period))
                    begin = place + 1
        least = [one for one in found if _worth(one[1] // one[2], one[2])]
        return sorted(least, key=lambda one: (one[2] * (one[1] // one[2] - 1), -one[2]), reverse=True)

    def _aligned(self, begin: int, length: int, period: int) -> tuple[int, int, int] | None:
        """Start, period and count of the equal repetitions in a stretch, cut where few results cross a border."""
        steps = [0] * (length + period)  # how the number of results that cross a border changes from border to border
        for place in range(begin, begin + length - period):
            near = [one for one in self.readers.get(self.order[place], ()) if one < place + period]
            steps[place - begin + 1] += 1
            steps[max(near, default=place) - begin + 1] -= 1
        crossing = [0] * period
        for border, count in enumerate(accumulate(steps)):
            crossing[border % period] += count
        together = [self.order[begin + shift].target is operator.getitem for shift in range(period)]
        shifts = [shift for shift in range(min(length % period + 1, period)) if not together[shift]]
        for shift in sorted(shifts, key=lambda one: crossing[one])[:3]:
            best: list[int] = []
            run: list[int] = []
            before: Any = None
            for start in range(begin + shift, begin + length - period + 1, period):
                form, _ = self._form(start, period)
                run = [*run, start] if form == before else [start]
                best, before = max(best, run, key=len), form
            if _worth(len(best), period):
                return best[0], period, len(best)
        return None


def _worth(count: int, period: int) -> bool:
    return count >= _REPETITIONS and (count - 1) * period >= _SAVED
