"""A step of a stack for a GPU: traced, compiled, and replayed as a CUDA graph.

`traced` makes one FX graph of the step that serves any number of users. `torch.func.vmap` bakes the number of users
into the graph as constants. Tracing the step for two different numbers shows which constants those are: they differ
between the two graphs, by an amount per user.

Plain twin: `StackStep` of stacked/step.py, the eager step; `CompiledStep` compiles it, `GraphedStep` captures and
replays it.
Switch: `FastParts.compiled_steps`.
Held equal by: tests/engine/stacked/test_step.py, tests/engine/gpu/test_traced.py; stacked = single:
tests/clipline_paper/tasks/test_stacked_tasks.py.
Buys: emnist_cr on an H200 in bfloat16: 87.8 ms a round eager, 17.1 compiled (benchmarks/results/README.md).
"""

from __future__ import annotations

import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from ...errors import first_line
from ...federated.local_sgd import Batch
from ..core.batches import Steps, select_rows
from ..core.problem import SlowEngineWarning
from .programs.program_cache import BoundProgram, Programs, UnfinishedStepError

if TYPE_CHECKING:
    from ..stacked.step import Arguments, StackStep

# Calls before a graph is captured. Capture forbids allocation: compiler and cuBLAS initialise before. And it costs as
# much as a few calls, so a number of users that comes seldom is never captured.
_WARM_UP = 2
_MOST_GRAPHS = 64  # of one recording: if more numbers of users come, they run uncaptured
_VERSIONS = 2  # compilations: with more, a program is taken to be specialised to one number of users
_FINE_WIDTHS = 32  # graph widths: multiples of 2 up to 32 users, of 4 up to 64, of 8 up to 128, and so on
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

    def zeros_like(tensor: Tensor) -> Tensor:
        return torch.zeros(users, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)

    zeros = tree_map_only(Tensor, zeros_like, arguments)
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
    if one is other or not {type(one), type(other)} <= {Tensor, torch.nn.Parameter}:
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


class CompiledStep:
    """A `StackStep`, traced and compiled on the first call, for any number of users."""

    def __init__(self, step: StackStep, programs: Programs | None = None, *, compiled: bool = True) -> None:
        """`programs`: where the compiled program comes from, if it has been made before.

        Without `compiled` it runs as written: where compiling takes longer than it saves.
        """
        self.step = step
        self.programs = Programs() if programs is None else programs
        self._program: BoundProgram | None = None
        # The program, or the step itself if it is not to be or cannot be compiled; None before it is prepared.
        self._compiled: Callable[..., Any] | None = None if compiled else self._as_written
        self._has_run = False
        self.recordable = True  # until a recording fails

    @property
    def in_words(self) -> str:
        """How its steps run."""
        compiled = self._compiled is None or self._compiled is self._program
        return ("compiled" if compiled else "as written") + (" and recorded" if self.recordable else ", not recorded")

    @property
    def any_width(self) -> bool:
        """Whether one compiled program has served every number of users so far; if not, always run whole blocks."""
        if self._program is None:
            return True
        program = self._program.program
        return program.any_number and len(program.made) <= _VERSIONS

    def prepare(self, arguments: Arguments) -> None:
        """Trace and compile, or take what was compiled before; `arguments` are for as many users as come usually."""
        if self._compiled is not None:
            return
        try:
            program = self.programs.program(traced(self.step, arguments), arguments)
            program.prepare(*arguments)
            self._program = self._compiled = program
        except Exception as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):  # the step itself would need no less
                raise
            self._leave_compiling(error)

    def __call__(self, arguments: Arguments) -> None:
        """Run the step; see `StackStep` for the arguments."""
        self.prepare(arguments)
        compiled = self._compiled
        assert compiled is not None
        if self._has_run:
            compiled(*arguments)
            return
        try:
            compiled(*arguments)
        except Exception as error:
            never_again = isinstance(error, torch.cuda.OutOfMemoryError | UnfinishedStepError)
            if compiled is not self._program or never_again:
                raise
            self._leave_compiling(error)
            self._as_written(*arguments)
        self._has_run = True

    def _leave_compiling(self, error: Exception) -> None:
        """Run as written from now on, and say why."""
        reason = first_line(error)
        slow = f"the step of many users cannot be compiled ({reason}); it runs as it is written, which is slower"
        warnings.warn(slow, SlowEngineWarning, stacklevel=3)
        self._compiled = self._as_written

    def _as_written(self, *arguments: Any) -> None:
        self.step(*arguments)
        if self.step.check is not None:
            self.step.check()


class GraphedStep:
    """A program's steps, captured as CUDA graphs for some numbers of users and then replayed.

    All inputs and outputs are static buffers, which `fill` sets for a block. Every `replay(active)` runs the next step
    of the first `active` users. Steps that cannot be captured, since the model copies from the processor's memory say,
    run without: compiled, or as they are written.
    """

    def __init__(
        self, program: CompiledStep, stack: Sequence[Tensor], like: Batch, *, users: int, steps: int, width: int
    ) -> None:
        """Buffers for `users` with at most `steps` steps of `width` examples like these (users, steps, width, ...)."""
        device = stack[0].device
        self.program = program
        self.stack = [piece.new_zeros(users, *piece.shape[1:]) for piece in stack]
        self.examples = {name: field.new_zeros(steps, users, width, *field.shape[3:]) for name, field in like.items()}
        self.counts = torch.zeros(steps, users, dtype=torch.int64, device=device)
        self.random_keys = torch.zeros(steps, users, program.step.random_keys, 2, dtype=torch.int32, device=device)
        self.rates = stack[0].new_zeros(users)
        self.step_index = torch.zeros(1, dtype=torch.int64, device=device)
        self._slots = torch.arange(width, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._calls: Counter[int] = Counter()
        self._pool: Any = None
        program.prepare(self._arguments(users))

    def replay(self, active: int) -> None:
        """Run the next step of the first `active` users. The graph may be wider: users without a step do not change."""
        users = min(graph_width(active), len(self.rates)) if self.program.any_width else len(self.rates)
        if users not in self._graphs:
            self._calls[users] += 1
            seldom = self._calls[users] <= _WARM_UP or len(self._graphs) >= _MOST_GRAPHS
            if seldom or not self._capturing or not self.program.recordable:
                self._run(users)
                return
            try:
                self._graphs[users] = self._captured(users)
            except Exception as error:  # nothing has run: capture only notes what is to be done
                self._give_up_recording(error)
                self._run(users)
                return
        self._graphs[users].replay()

    def fill(
        self, first: Sequence[Tensor], examples: Batch, random_keys: Tensor, counts: Tensor, rates: Tensor
    ) -> None:
        """Copy the inputs of a block into the buffers; places that it leaves free have no steps."""
        users, longest = counts.shape
        self.counts.zero_()
        self.step_index.zero_()
        self.rates[:users] = rates
        self.counts[:longest, :users] = counts.T
        if self.random_keys.numel():
            self.random_keys[:longest, :users] = random_keys.transpose(0, 1)
        for name, field in examples.items():
            width, buffer = field.shape[2], self.examples[name][:longest, :users]
            _copy(field.transpose(0, 1), buffer[:, :, :width])
            if width < buffer.shape[2]:
                padding = buffer[:, :, width:]
                _copy(field[:, :, :1].transpose(0, 1).expand_as(padding), padding)  # the user's own first example
        for own, piece in zip(first, self.stack, strict=True):
            piece[:users].copy_(own)

    @property
    def _capturing(self) -> bool:
        return self.step_index.device.type == "cuda"

    def _captured(self, users: int) -> torch.cuda.CUDAGraph:
        """The next step of the first `users` users as a CUDA graph, not run yet."""
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.step_index.device)
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            self._run(users)
        self.program.programs.counts.recordings += 1
        return graph

    def _give_up_recording(self, error: Exception) -> None:
        """No step of this program is captured any more, and a warning says so once."""
        self.program.recordable = False
        if self._capturing:
            torch.cuda.synchronize(self.step_index.device)
        reason = first_line(error)
        slow = f"the step of many users cannot be recorded as a CUDA graph ({reason}); it runs without, which is slower"
        warnings.warn(slow, SlowEngineWarning, stacklevel=2)

    def _run(self, users: int) -> None:
        self.program(self._arguments(users))
        self.step_index += 1

    def _arguments(self, users: int) -> Arguments:
        """The arguments of the next step of the first `users` users, as views of the buffers."""
        random_keys, counts = (
            select_rows(field, self.step_index)[0][:users] for field in (self.random_keys, self.counts)
        )
        batch = {name: select_rows(field, self.step_index)[0][:users] for name, field in self.examples.items()}
        kept = self._slots < counts.unsqueeze(1)
        return [piece[:users] for piece in self.stack], random_keys, batch, kept, self.rates[:users]


def graph_width(users: int) -> int:
    """The smallest graph width that holds so many users. At least 2: the compiler specialises programs for 1."""
    grain = 2
    while users > grain * _FINE_WIDTHS // 2:
        grain *= 2
    return max(2, -(-users // grain) * grain)


def _copy(source: Tensor, target: Tensor) -> None:
    """target.copy_(source), also for strided uint16, which torch cannot copy."""
    if target.dtype == torch.uint16:
        source, target = source.view(torch.int16), target.view(torch.int16)
    target.copy_(source)


class RecordedBlocks:
    """Trains blocks of at most `users` users, with at most `steps` steps of `width` examples, by graph replay."""

    def __init__(
        self,
        step: StackStep,
        *,
        users: int,
        steps: int,
        width: int,
        programs: Programs | None = None,
        compiled: bool = True,
    ) -> None:
        self._step, self._compiled = step, compiled
        self.programs = Programs() if programs is None else programs
        self._users, self._steps, self._width = users, steps, width
        self._recordings: dict[tuple[torch.Size, ...], GraphedStep] = {}
        self._stream: torch.cuda.Stream | None = None  # steps are not captured on a device's default one

    @property
    def in_words(self) -> str:
        """How steps run; before the first one, how they are going to."""
        ways = {recording.program.in_words for recording in self._recordings.values()}
        return " and ".join(sorted(ways)) or ("compiled" if self._compiled else "as written") + " and recorded"

    def train(
        self,
        steps: Steps,
        first: dict[str, Tensor],
        examples: Batch,
        random_keys: Tensor,
        counts: Tensor,
        rates: Tensor,
    ) -> list[Tensor]:
        """The users' parameters after training; on a GPU the work is launched, not finished.

        They are in static buffers, which the next block overwrites: use them before.
        """
        recording = self._recording(first, examples)
        recording.fill(list(first.values()), examples, random_keys, counts, rates)
        with self._beside(counts.device):
            for active in (steps.counts > 0).sum(axis=0).tolist():
                if active:
                    recording.replay(active)
        return [piece[: len(counts)] for piece in recording.stack]

    def _recording(self, first: dict[str, Tensor], examples: Batch) -> GraphedStep:
        shapes = tuple(piece.shape[1:] for piece in first.values())
        if shapes not in self._recordings:
            program = CompiledStep(self._step, self.programs, compiled=self._compiled)
            self._recordings[shapes] = GraphedStep(
                program, list(first.values()), examples, users=self._users, steps=self._steps, width=self._width
            )
        return self._recordings[shapes]

    @contextmanager
    def _beside(self, device: torch.device) -> Iterator[None]:
        """Within, work is launched on a stream of its own; the current one then waits for it, also after an error."""
        if device.type != "cuda":
            yield
            return
        current = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
