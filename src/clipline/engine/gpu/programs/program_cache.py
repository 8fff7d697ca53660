"""Programs by what they compute: a second training of the same shape compiles nothing, in this process or a later one.

The traced graph is the program: two trainings share one if their graphs and the types and shapes of their inputs are
the same. Constants in the graph (weights that are not trained, say) become inputs, so that a program holds code alone:
no weights and no data are kept or stored. A stored program is found by the graph too, and by everything that has a say
in the machine code: torch, Triton, CUDA, the GPU, Python, the compiler's settings and the code of this package.

Plain twin: a new compilation of the same graph.
Switch: `FastParts.kept_programs` (this process), `FastParts.stored_programs` (later ones).
Held equal by: tests/engine/gpu/programs/test_program_cache.py, test_stored_programs.py.
Buys: nine runs of one shape in one process started in 2.8 s, the first of that shape in 26 (CHANGELOG.md). Of files:
see `program_files.py`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
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
from .program_files import ProgramFiles, cache_folder

_MOST = 32  # programs; the one that was not used for longest goes first
_MOST_COPIED = 4 << 30  # bytes of inputs that are copied to the processor's memory before the first run of a program
_KERNEL_WRITES = 4  # times the largest input: what one kernel writes into
# Of operations in other libraries the graph has the name alone: their next version may compute something else.
_STORABLE = {"aten", "prims", "clipline"}


@dataclass
class ProgramCounts:
    """What one training has made so far."""

    programs: int = 0  # that it uses, wherever they come from
    compiled: int = 0  # by it; more than `programs` if one does not serve all numbers of users
    loaded: int = 0  # from the folder of stored programs
    recordings: int = 0  # CUDA graphs: one for each program, group of users and number of users that came often


class UnfinishedStepError(RuntimeError):
    """A program has failed half-way, and what it has changed cannot be put back: the step cannot be taken again."""


class Program:
    """A flat graph and its compilations, without the constants."""

    def __init__(self, graph: GraphModule, key: str, by_user: int) -> None:
        self.graph, self.key, self.by_user = graph, key, by_user
        self.made: list[Compiled] = []  # more than one where the first does not serve all numbers of users
        self.untried: dict[Compiled, str | None] = {}  # those that have not run yet, and the file it was loaded from

    @property
    def any_number(self) -> bool:
        """Whether no compilation so far is tied to one number of users."""
        return not any(one.one_number for one in self.made)


_kept: OrderedDict[str, Program] = OrderedDict()
_lock = threading.Lock()


def forget_programs() -> None:
    """Drop the programs that this process has kept. Those in files stay."""
    with _lock:
        _kept.clear()


class Programs:
    """One training's way to programs: from this process, from a file, or compiled now."""

    def __init__(self, *, kept: bool = True, stored: bool = False, notices: Notices | None = None) -> None:
        self.counts = ProgramCounts()
        self._keep = kept
        folder = cache_folder() if stored else None
        self._files = None if folder is None else ProgramFiles(folder)
        self._notices = Notices() if notices is None else notices

    def program(self, graph: GraphModule, arguments: Sequence[Any]) -> BoundProgram:
        """The program of this graph, not compiled yet unless it has been before. Takes the graph over."""
        by_user = len(tree_leaves(list(arguments)))
        constants = _lift_constants(graph)
        key = fingerprint(graph, arguments, constants)
        self.counts.programs += 1
        if not self._keep:
            return BoundProgram(Program(graph, key, by_user), constants, self)
        with _lock:
            program = _kept.pop(key, None) or Program(graph, key, by_user)
            _kept[key] = program
            while len(_kept) > _MOST:
                _kept.popitem(last=False)
        return BoundProgram(program, constants, self)

    def version(self, program: Program, inputs: Sequence[Tensor]) -> Compiled:
        """The compilation of the program that serves so many users, loaded or made now if there is none."""
        users = len(inputs[0])
        for one in program.made:
            if one.serves(users):
                return one
        made, file = self._load(program, inputs, users) or (self._compile(program, inputs, users), None)
        program.made.append(made)
        program.untried[made] = file
        return made

    def _load(self, program: Program, inputs: Sequence[Tensor], users: int) -> tuple[Compiled, str] | None:
        if self._files is None or not _storable(program.graph):
            return None
        every, single = _names(program, inputs, users)
        for name in (*every, single):
            stored = self._files.read(name)
            if stored is None:
                continue
            try:
                condition, _, code = stored.partition(b"\n")
                made = inductor.loaded(json.loads(condition), code)
                if not made.serves(users):
                    continue
            except Exception as error:
                self._files.drop(name, f"cannot be loaded ({type(error).__name__})")
                continue
            self.counts.loaded += 1
            return made, name
        return None

    def replace(self, program: Program, failed: Compiled, inputs: Sequence[Tensor], error: Exception) -> None:
        """Compile anew in place of a loaded one that has failed in its first run; others raise their error."""
        name = program.untried.pop(failed, None)
        if name is None or self._files is None or isinstance(error, torch.cuda.OutOfMemoryError):
            raise error
        self._files.drop(name, f"cannot be run ({type(error).__name__})")
        program.made.remove(failed)
        program.made.append(made := self._compile(program, inputs, len(inputs[0])))
        program.untried[made] = None

    def _compile(self, program: Program, inputs: Sequence[Tensor], users: int) -> Compiled:
        parts = inductor.parts_of(program.graph, program.by_user)
        operations = len(program.graph.graph.nodes) if parts is None else parts.nodes
        inductor.check_size(operations)
        with self._notices.compiling(operations):
            made = inductor.compiled(program.graph, inputs, program.by_user)
        self.counts.compiled += 1
        if self._files is not None and _storable(program.graph):
            every, single = _names(program, inputs, users)
            name = single if made.one_number or program.made else every[0]
            self._files.write(name, json.dumps(made.condition).encode() + b"\n" + made.stored)
        return made


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program with the constants of one training."""

    program: Program
    constants: Sequence[Tensor]
    owner: Programs

    def prepare(self, *given: Any) -> None:
        """Compile or load what a call with these arguments needs; runs nothing."""
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
            self.owner.replace(self.program, version, inputs, error)
            self(*given)
        self.program.untried.pop(version, None)

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


def _names(program: Program, inputs: Sequence[Tensor], users: int) -> tuple[list[str], str]:
    """Names of files: of programs for many numbers of users, the best first, and of one for this number alone.

    The compiler tunes for the number that it is shown, so programs for few and for many users are stored apart.
    """
    about = [program.key, *code_versions(), *_machine(inputs[0].device)]
    name = hashlib.sha256(repr(about).encode()).hexdigest()
    size = users.bit_length()
    return [f"{name}-{near}" for near in (size, size + 1, size - 1)], f"{name}-of-{users}"


@cache
def code_versions() -> list[str]:
    """Of all that writes a program: torch, Triton, Python and the code of `gpu/`, but not the compiler's settings."""
    from .... import __version__

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:  # it is there on NVIDIA GPUs alone
        triton = "none"
    own = hashlib.sha256()
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        own.update(f"{path.relative_to(folder)}\n".encode() + path.read_bytes())
    return [torch.__version__, str(torch.version.git_version), triton, sys.version, __version__, own.hexdigest()]


def _machine(device: torch.device) -> list[str]:
    """What the program runs on, and how the compiler is set in this process."""
    from torch._inductor import config

    settings: Any = config
    about = [str(torch.version.cuda), platform.machine(), repr(sorted(settings.save_config_portable().items()))]
    if device.type == "cuda":
        return [*about, torch.cuda.get_device_name(device), str(torch.cuda.get_device_capability(device))]
    return [*about, platform.processor(), torch.backends.cpu.get_cpu_capability()]


def _storable(graph: GraphModule) -> bool:
    """Whether all operations are torch's own or ours, of which the versions are known."""
    targets = {node.target for node in graph.graph.nodes if node.op == "call_function"}
    return all(target.namespace in _STORABLE for target in targets if isinstance(target, torch._ops.OpOverload))


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
