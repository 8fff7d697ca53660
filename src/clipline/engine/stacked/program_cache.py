"""Compiled programs of this process, kept by what they compute: a second training of the same shape compiles nothing.

The traced graph is the program: two trainings share one if their graphs, the constants in them (weights that are not
trained, say) and the types and shapes of their inputs are the same.

Plain twin: a new compilation of the same graph.
Switch: `FastParts.kept_programs`.
Held equal by: tests/engine/stacked/test_program_cache.py.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from ..isolation.constants import SHORT, checksum

_MOST = 32  # programs; the one that was not used for longest goes first


@dataclass(eq=False)
class Compilation:
    """A compiled graph. `versions` counts compilations: more are made where one does not serve all numbers of users."""

    graph: GraphModule
    versions: int = 0

    def __post_init__(self) -> None:
        self._run = torch.no_grad()(torch.compile(self.graph, backend=self._inductor))
        self._reads: Mapping[str, Tensor] = {}
        self._lock = threading.Lock()

    def __call__(self, constants: Mapping[str, Tensor], *given: Any) -> None:
        """Run it with these constants, which are as those of the graph; the first call compiles."""
        with self._lock:  # no other training puts its own in between
            if self._reads is not constants:
                for name, constant in constants.items():
                    above, _, last = name.rpartition(".")
                    setattr(_attribute(self.graph, above), last, constant)
                self._reads = constants
            self._run(*given)

    def _inductor(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.versions += 1
        from torch._inductor.compile_fx import compile_fx  # takes a second to import

        return cast("Callable[..., Any]", compile_fx(graph, inputs))


class Program:
    """A graph of one training. It shares the compilation with others, but reads and holds its own constants.

    Those of another training are its caller's, who may change them, and CUDA graphs read them where they are in memory.
    """

    def __init__(self, graph: GraphModule, compilation: Compilation | None = None) -> None:
        self._constants = _constants(graph)
        self._compilation = compilation or Compilation(graph)

    @property
    def versions(self) -> int:
        """How often it was compiled."""
        return self._compilation.versions

    def __call__(self, *given: Any) -> None:
        """Run it; the first call compiles, unless another training has done so."""
        self._compilation(self._constants, *given)


_compilations: OrderedDict[str, Compilation] = OrderedDict()
_lock = threading.Lock()


def kept_program(graph: GraphModule, arguments: Sequence[Any]) -> Program:
    """The program of this graph, compiled by an earlier training of this process if there was one."""
    key = fingerprint(graph, arguments)
    with _lock:
        compilation = _compilations.pop(key, None) or Compilation(graph)
        _compilations[key] = compilation
        while len(_compilations) > _MOST:
            _compilations.popitem(last=False)
    return Program(graph, compilation)


def forget_programs() -> None:
    """Drop all of them, and the memory that their constants hold."""
    with _lock:
        _compilations.clear()


def fingerprint(graph: GraphModule, arguments: Sequence[Any]) -> str:
    """What decides the program: operations, constants, types and shapes of inputs but for the number of users."""
    digest = hashlib.sha256(graph.code.encode())
    for name, constant in sorted(_constants(graph).items()):
        digest.update(repr((name, constant.dtype, tuple(constant.shape), constant.device)).encode())
        # The base of a language model has gigabytes: they are summed where they are.
        long = constant.nbytes > SHORT
        digest.update(str(checksum(constant)).encode() if long else _bytes(constant))
    for leaf in tree_leaves(list(arguments)):
        form = (leaf.dtype, tuple(leaf.shape[1:]), leaf.device) if isinstance(leaf, Tensor) else leaf
        digest.update(repr(form).encode())
    flags = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    digest.update(repr(flags).encode())  # the compiler may write either into its kernels
    return digest.hexdigest()


def _bytes(constant: Tensor) -> bytes:
    return constant.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _constants(graph: GraphModule) -> dict[str, Tensor]:
    names = {str(node.target) for node in graph.graph.nodes if node.op == "get_attr"}
    found = {name: _attribute(graph, name) for name in names}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


def _attribute(graph: GraphModule, name: str) -> Any:
    value: Any = graph
    for part in filter(None, name.split(".")):
        value = getattr(value, part)
    return value
