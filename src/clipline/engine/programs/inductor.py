"""torch's compiler on a traced step: a flat graph becomes a program that any process of this machine can load.

The step is a graph of plain operations already (`stacked/dynamic_batch.py`). It goes to AOTAutograd and Inductor
directly: Dynamo would trace it once more and check every input at every call. What Dynamo would guard is small and
checked here: the number of users, by the condition that the compiler has found. All of torch's private names are in
this file; where they fail, `through_dynamo` compiles in the usual way, and nothing can be stored.

Plain twin: the graph itself, run operation by operation.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/programs/test_inductor.py.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

_USERS = "L['t0']"  # how the compiler calls the number of users in a condition


class Version(Protocol):
    """One compilation of a graph."""

    @property
    def versions(self) -> int:
        """How many compilations it stands for."""

    @property
    def one_number(self) -> bool:
        """Whether it serves a single number of users."""

    def serves(self, users: int) -> bool:
        """Whether it may be run for so many users."""

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        """Run it on the inputs of the graph."""


@dataclass(frozen=True, eq=False)
class Compiled:
    """Machine code of a graph for the numbers of users that fulfil `condition`; `stored` is the same as bytes."""

    run: Callable[..., Any]
    condition: str
    stored: bytes = field(repr=False)
    _known: dict[int, bool] = field(default_factory=dict, init=False, repr=False)

    versions = 1

    @property
    def one_number(self) -> bool:
        """Whether it serves a single number of users."""
        return self.condition.startswith(f"{_USERS} == ")

    def serves(self, users: int) -> bool:
        """Whether it may be run for so many users."""
        if users not in self._known:
            from torch.fx.experimental.symbolic_shapes import ShapeEnv

            self._known[users] = bool(ShapeEnv().evaluate_guards_expression(self.condition, [users]))
        return self._known[users]

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        """Run it."""
        with torch.no_grad():
            self.run(*inputs)


def compiled(graph: GraphModule, inputs: Sequence[Tensor], by_user: int) -> Version:
    """The graph as machine code. The first axis of the first `by_user` inputs counts users, and may vary."""
    try:
        with _quietly():
            return _compiled(graph, inputs, by_user)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:  # another torch may have changed what it calls private
        return ThroughDynamo(graph, by_user)


def _compiled(graph: GraphModule, inputs: Sequence[Tensor], by_user: int) -> Compiled:
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes: Any = ShapeEnv()
    fake = FakeTensorMode(shape_env=shapes)
    like = []
    for place, tensor in enumerate(inputs):
        axes = [DimDynamic.STATIC] * tensor.ndim
        if place < by_user:
            axes[0] = DimDynamic.DUCK  # one symbol for all of them: they have as many users
        context: Any = StatelessSymbolicContext(axes)
        source = ConstantSource(f"input_{place}")
        like.append(fake.from_tensor(tensor.detach(), source=source, symbolic_context=context))
    # A hit in a cache of torch's own would not tell for which numbers of users the program was compiled.
    fresh = torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)  # type: ignore[attr-defined]
    with torch.no_grad(), fresh, tracing(TracingContext(fake)):
        artifact: Any = standalone_compile(
            graph,
            cast("list[Any]", like),
            dynamic_shapes="from_tracing_context",
            # Kernels are tuned in the first run, on buffers that are there; else the compiler would make some up.
            options={"config_patches": {"triton.autotune_at_compile_time": False}},
            aot=True,
        )
    users: Any = like[0].shape[0]
    exact = users if isinstance(users, int) else users.node.maybe_as_int()
    varies = shapes.produce_guards_expression([users]) or "True" if exact is None else ""
    if shapes.deferred_runtime_asserts:
        raise ValueError("the graph has sizes that only its data decide")
    return Compiled(artifact, varies or f"{_USERS} == {exact}", artifact.serialize())


def loaded(condition: str, stored: bytes) -> Compiled:
    """What another process has compiled. Runs code from `stored`: give it what this user's process has written."""
    with _quietly():
        from torch._inductor.standalone_compile import AOTCompiledArtifact

        return Compiled(AOTCompiledArtifact.deserialize(stored), condition, stored)


@contextmanager
def _quietly() -> Iterator[None]:
    """Within, torch does not warn of what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class ThroughDynamo:
    """A graph that torch.compile compiles, for one number of users after the other where it has to."""

    one_number = False

    def __init__(self, graph: GraphModule, by_user: int) -> None:
        self.versions = 0
        self._by_user = by_user
        self._run = torch.no_grad()(torch.compile(graph, backend=self._inductor))

    def serves(self, users: int) -> bool:
        """All: it compiles what it needs."""
        return True

    def __call__(self, inputs: Sequence[Tensor]) -> None:
        """Run it; the first call compiles."""
        for tensor in inputs[: self._by_user]:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        self._run(*inputs)

    def _inductor(self, graph: GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.versions += 1
        from torch._inductor.compile_fx import compile_fx  # takes a second to import

        return cast("Callable[..., Any]", compile_fx(graph, inputs))
