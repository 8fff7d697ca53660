"""Programs by what they compute: a second training of the same shape in a process compiles nothing.

The traced graph is the program: two trainings share one if their graphs and the types and shapes of their inputs are
the same. Constants in the graph (weights that are not trained, say) become inputs, so that a program holds code alone:
no weights and no data are kept.

Plain twin: a new compilation of the same graph.
Switch: `FastParts.kept_programs`.
Held equal by: tests/engine/gpu/programs/test_program_cache.py, test_compiled_programs.py.
Buys: nine runs of one shape in one process started in 2.8 s, the first of that shape in 26.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from ...core.notices import Notices
from ...core.precision import kernels_in_use
from . import inductor
from .inductor import Compiled

_MOST = 32  # programs; the one that was not used for longest goes first
_MOST_COPIED = 4 << 30  # bytes of inputs that are copied to the processor's memory before the first run of a program
_KERNEL_WRITES = 4  # times the largest input: what one kernel writes into


@dataclass
class ProgramCounts:
    """What one training has made so far."""

    programs: int = 0  # that it uses, wherever they come from
    compiled: int = 0  # by it; more than `programs` if one does not serve all numbers of users
    recordings: int = 0  # CUDA graphs: one for each program, group of users and number of users that came often


class UnfinishedStepError(RuntimeError):
    """A program has failed half-way, and what it has changed cannot be put back: the step cannot be taken again."""


class Program:
    """A flat graph and its compilations, without the constants."""

    def __init__(self, graph: GraphModule, by_user: int) -> None:
        self.graph, self.by_user = graph, by_user
        self.made: list[Compiled] = []  # more than one where the first does not serve all numbers of users
        self.untried: set[Compiled] = set()  # those that have not run yet

    @property
    def any_number(self) -> bool:
        """Whether no compilation so far is tied to one number of users."""
        return not any(one.one_number for one in self.made)


_kept: OrderedDict[str, Program] = OrderedDict()
_lock = threading.Lock()


def forget_programs() -> None:
    """Drop the programs that this process has kept."""
    with _lock:
        _kept.clear()


class Programs:
    """One training's way to programs: from this process, or compiled now."""

    def __init__(self, *, kept: bool = True, notices: Notices | None = None) -> None:
        self.counts = ProgramCounts()
        self._keep = kept
        self._notices = Notices() if notices is None else notices

    def program(self, graph: GraphModule, arguments: Sequence[Any]) -> BoundProgram:
        """The program of this graph, not compiled yet unless it has been before. Takes the graph over."""
        by_user = len(tree_leaves(list(arguments)))
        constants = _lift_constants(graph)
        self.counts.programs += 1
        if not self._keep:
            return BoundProgram(Program(graph, by_user), constants, self)
        key = fingerprint(graph, arguments, constants)
        with _lock:
            program = _kept.pop(key, None) or Program(graph, by_user)
            _kept[key] = program
            while len(_kept) > _MOST:
                _kept.popitem(last=False)
        return BoundProgram(program, constants, self)

    def version(self, program: Program, inputs: Sequence[Tensor]) -> Compiled:
        """The compilation of the program that serves so many users, made now if there is none."""
        users = len(inputs[0])
        for one in program.made:
            if one.serves(users):
                return one
        made = self._compile(program, inputs)
        program.made.append(made)
        program.untried.add(made)
        return made

    def _compile(self, program: Program, inputs: Sequence[Tensor]) -> Compiled:
        parts = inductor.parts_of(program.graph, program.by_user)
        operations = len(program.graph.graph.nodes) if parts is None else parts.nodes
        inductor.check_size(operations)
        with self._notices.compiling(operations):
            made = inductor.compiled(program.graph, inputs, program.by_user)
        self.counts.compiled += 1
        return made


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program with the constants of one training."""

    program: Program
    constants: Sequence[Tensor]
    owner: Programs

    def prepare(self, *given: Any) -> None:
        """Compile what a call with these arguments needs; runs nothing."""
        self.owner.version(self.program, self._inputs(given))

    def __call__(self, *given: Any) -> None:
        """Run it on the arguments of the traced step; what is not prepared is compiled now."""
        inputs = self._inputs(given)
        version = self.owner.version(self.program, inputs)
        if version not in self.program.untried:
            version(inputs)
            return
        # One that fails half-way has moved some weights already, and the step will be taken again.
        before = _copies(inputs[: self.program.by_user])
        _make_room_for_tuning(inputs[: self.program.by_user])
        try:
            version(inputs)
        except Exception as error:
            if before is None:
                raise UnfinishedStepError(
                    f"a program failed in its first run ({type(error).__name__}) and may have moved weights, which are "
                    "too large to be kept twice: start again, with FastParts(compiled_steps='never')"
                ) from error
            for tensor, value in zip(inputs, before, strict=False):
                tensor.copy_(value)
            raise
        self.program.untried.discard(version)

    def _inputs(self, given: Sequence[Any]) -> list[Tensor]:
        return [*tree_leaves(list(given)), *self.constants]


def _copies(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """Copies: on the GPU if it has plenty of room, else in the processor's memory; None if they are too large."""
    size, device = sum(tensor.nbytes for tensor in tensors), tensors[0].device
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 4 * size:
        return [tensor.clone() for tensor in tensors]
    return [tensor.to("cpu", copy=True) for tensor in tensors] if size <= _MOST_COPIED else None


def _make_room_for_tuning(inputs: Sequence[Tensor]) -> None:
    """Let the compiler tune its kernels on copies in the GPU's memory, in the first run of a program.

    A kernel that writes into its inputs is tuned on copies. Where these would raise the most memory that this process
    has ever held, the compiler keeps them in the processor's memory instead, and moves them before every trial: minutes
    for a large model. So that much memory is held for a moment, if there is plenty.
    """
    largest, device = max(inputs, key=lambda tensor: tensor.nbytes).nbytes, inputs[0].device
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 2 * _KERNEL_WRITES * largest:
        torch.empty(_KERNEL_WRITES * largest, dtype=torch.uint8, device=device)


def fingerprint(graph: GraphModule, arguments: Sequence[Any], constants: Sequence[Tensor] = ()) -> str:
    """What decides the program: operations, types and shapes of inputs but for the number of users, precision."""
    digest = hashlib.sha256()
    for part in graph.modules():  # a branch or a loop is a graph of its own, of which the code has the name alone
        if isinstance(part, GraphModule):
            digest.update(part.code.encode())
    varying = [(tensor, tensor.shape[1:]) for tensor in tree_leaves(list(arguments))]
    for tensor, shape in [*varying, *((tensor, tensor.shape) for tensor in constants)]:
        digest.update(repr((tensor.dtype, tuple(shape), tensor.stride(), str(tensor.device))).encode())
    flags = (
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        kernels_in_use(),  # decides how the results of our operations are laid out
    )
    digest.update(repr(flags).encode())  # the compiler may write any of them into its kernels
    return digest.hexdigest()


def _lift_constants(graph: GraphModule) -> list[Tensor]:
    """Make inputs of the tensors that the graph holds, after the others, and of its inputs a flat list.

    Returns these tensors, in the order of their inputs. They stay where they are: nothing is copied.
    """
    nodes = graph.graph
    names = list(dict.fromkeys(str(node.target) for node in nodes.nodes if node.op == "get_attr"))
    found = {name: value for name in names if isinstance(value := _attribute(graph, name), Tensor)}
    last = [node for node in nodes.nodes if node.op == "placeholder"][-1]
    lifted = {}
    for number, name in enumerate(found):
        with nodes.inserting_after(last):
            last = lifted[name] = nodes.placeholder(f"constant_{number}")
    for node in [node for node in nodes.nodes if node.op == "get_attr" and node.target in found]:
        node.replace_all_uses_with(lifted[str(node.target)])
        nodes.erase_node(node)
    for name in found:
        if "." not in name:
            delattr(graph, name)
    nodes.set_codegen(CodeGen())
    graph.recompile()
    return [value.detach() for value in found.values()]


def _attribute(graph: GraphModule, name: str) -> Any:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    return value
