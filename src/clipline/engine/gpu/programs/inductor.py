"""torch's compiler on a traced step: a flat graph becomes machine code.

The step is a graph of plain operations already (`gpu/recorded_step.py`). It goes to AOTAutograd and Inductor
directly: Dynamo would trace it once more and check every input at every call. What Dynamo would guard is small and
checked here: the number of users, by the condition that the compiler has found. All of the compiler's private names are
in this file; where they fail, the step runs as it is written.

Plain twin: the graph itself, run operation by operation.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/gpu/programs/test_compiled_programs.py.
Buys: 20 to 35 s to compile instead of 35 to 45 through Dynamo (emnist_cr's step on a core,
benchmarks/results/README.md). What compiling itself buys is in `gpu/recorded_step.py`.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from ....errors import first_line
from .repeats import Call, Parts, parted, run_calls

# Operations to compile. 3,300 take two minutes, 9,000 five: longer than it is worth.
MOST_COMPILED = 5000
_USERS = "L['t0']"  # how the compiler calls the number of users in a condition


@dataclass(frozen=True, eq=False)
class Compiled:
    """Machine code of a graph for the numbers of users that fulfil `condition`."""

    run: Callable[..., Any]
    condition: str
    _known: dict[int, bool] = field(default_factory=dict, init=False, repr=False)

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


def compiled(graph: GraphModule, inputs: Sequence[Tensor], by_user: int) -> Compiled:
    """The graph as machine code. The first axis of the first `by_user` inputs counts users, and may vary.

    What repeats in a large graph is compiled once. If that fails the graph is compiled whole, or refused if large.
    """
    parts = parts_of(graph, by_user)
    try:
        with _quietly():
            return _compiled(graph, inputs, by_user) if parts is None else _compiled_parts(parts, inputs, by_user)
    except Exception as error:
        if parts is None or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        reason = first_line(error)
        check_size(len(graph.graph.nodes), f", since its parts cannot be compiled ({reason})")
        graph.meta["parts"] = None
    return compiled(graph, inputs, by_user)


def parts_of(graph: GraphModule, by_user: int) -> Parts | None:
    """The parts of a graph that repeats, found once."""
    if "parts" not in graph.meta:
        graph.meta["parts"] = parted(graph, by_user)
    found: Parts | None = graph.meta["parts"]
    return found


def check_size(operations: int, why: str = "") -> None:
    """Refuse more operations than can be compiled in a few minutes."""
    if operations > MOST_COMPILED:
        raise ValueError(f"{operations:,} operations to compile{why}: more than {MOST_COMPILED:,}")


def _compiled(graph: GraphModule, inputs: Sequence[Tensor], by_user: int) -> Compiled:
    shapes, like = _stand_ins(inputs, by_user)
    artifact = _artifact(graph, like)
    return Compiled(artifact, _condition(shapes, like))


def _compiled_parts(parts: Parts, inputs: Sequence[Tensor], by_user: int) -> Compiled:
    """Every part once, for the tensors of its first call; all other calls must have the same."""
    shapes, like = _stand_ins(inputs, by_user)
    values = dict(enumerate(like))
    first: dict[int, tuple[list[Any], Sequence[Any]]] = {}  # of each part: what it is given, and what it returns
    artifacts: dict[int, Any] = {}
    with torch.no_grad(), like[0].fake_mode:
        for call in parts.calls:
            given = [_alone(values[number]) for number in call.given]
            if call.part not in first:
                first[call.part] = given, Interpreter(parts.graphs[call.part]).run(*map(_alone, given))
            if any(_layout(one) != _layout(other) for one, other in zip(given, first[call.part][0], strict=True)):
                raise ValueError("a part of the graph repeats on tensors of another shape")
            values.update((number, first[call.part][1][place]) for place, number in call.made)
    for part, (given, _) in first.items():
        artifacts[part] = _artifact(parts.graphs[part], given)
    runs = [artifacts[part] for part in range(len(parts.graphs))]
    return Compiled(partial(_run_parts, parts.calls, runs), _condition(shapes, like))


def _run_parts(calls: Sequence[Call], runs: Sequence[Any], *inputs: Tensor) -> None:
    run_calls(calls, runs, inputs)


def _stand_ins(inputs: Sequence[Tensor], by_user: int) -> tuple[Any, list[Any]]:
    """Fake tensors in place of the inputs, with a symbol for the number of users; and its conditions."""
    from torch._dynamo.source import ConstantSource
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
    return shapes, like


def _alone(tensor: Tensor) -> Tensor:
    """An empty tensor of the same layout, in memory of its own."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, str(tensor.device), str(list(tensor.shape)), str(list(tensor.stride()))


def _artifact(graph: GraphModule, like: Sequence[Any]) -> Any:
    from torch._guards import TracingContext, tracing
    from torch._inductor import standalone_compile

    # A hit in a cache of torch's own would not tell for which numbers of users the program was compiled.
    fresh = torch.compiler.config.patch(cache_key_tag=uuid.uuid4().hex)  # type: ignore[attr-defined]
    with torch.no_grad(), fresh, tracing(TracingContext(like[0].fake_mode)):
        return standalone_compile(
            graph,
            list(like),
            dynamic_shapes="from_tracing_context",
            # Kernels are tuned in the first run, on buffers that are there; else the compiler would make some up.
            options={"config_patches": {"triton.autotune_at_compile_time": False}},
            aot=True,
        )


def _condition(shapes: Any, like: Sequence[Any]) -> str:
    """For which numbers of users what was compiled for these stand-ins may be run."""
    users: Any = like[0].shape[0]
    exact = users if isinstance(users, int) else users.node.maybe_as_int()
    varies = shapes.produce_guards_expression([users]) or "True" if exact is None else ""
    if shapes.deferred_runtime_asserts:
        raise ValueError("the graph has sizes that only its data decide")
    return varies or f"{_USERS} == {exact}"


@contextmanager
def _quietly() -> Iterator[None]:
    """Within, torch does not warn of what it uses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
