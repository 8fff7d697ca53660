"""Trains a block on a GPU by graph replay; users with many more steps than the rest run on a CUDA stream of their own.

A step of few users leaves most of a GPU idle. At the end of a block, alone, the stragglers would cost much of the time
for little of the work; beside the rest they fill idle multiprocessors.

Plain twin: the same block as one group (`_parted` with nothing to split), or the eager steps of `trainer.py`.
Switch: `FastParts.straggler_streams`.
Held equal by: tests/engine/gpu/test_stragglers.py.
Buys: 100 real roles of Shakespeare on an H200: 107.5 ms a round without, 101.2 with; less where no user is far longer
than the rest: emnist_cr with uneven users 27.1 and 26.2 (docs/results/performance.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...federated.local_sgd import Batch
from ..core.batches import Steps
from ..core.updates import broadcast
from .programs.program_cache import Programs
from .recorded_step import CompiledStep, GraphedStep

if TYPE_CHECKING:
    from ..stacked.step import StackStep

_STRAGGLER_PART = 12  # a twelfth of a block, the users with most steps, are the stragglers
_UNEVEN = 0.8  # split only if the rest need less than 80% of the longest user's steps
_MANY_STEPS = 12  # split only from so many steps on: a second group is more to launch (not measured by itself)


class StragglerStreams:
    """Trains blocks of at most `users` users, with at most `steps` steps of `width` examples."""

    def __init__(
        self,
        step: StackStep,
        *,
        users: int,
        steps: int,
        width: int,
        apart: bool = True,
        programs: Programs | None = None,
        compiled: bool = True,
    ) -> None:
        self._step, self._compiled = step, compiled
        self.programs = Programs() if programs is None else programs
        self._capacities = (
            users,
            users // _STRAGGLER_PART if apart else 0,
        )  # of group 0, the rest, and group 1, the stragglers
        self._steps, self._width = steps, width
        self._programs: dict[tuple[torch.Size, ...], CompiledStep] = {}
        self._recordings: dict[tuple[int, tuple[torch.Size, ...]], GraphedStep] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    @property
    def in_words(self) -> str:
        """How steps run; before the first one, how they are going to."""
        slower = {program.in_words for program in self._programs.values()}
        return " and ".join(sorted(slower)) or ("compiled" if self._compiled else "as written") + " and recorded"

    def train(
        self,
        steps: Steps,
        first: dict[str, Tensor],
        examples: Batch,
        random_keys: Tensor,
        counts: Tensor,
        rates: Tensor,
    ) -> list[tuple[slice, list[Tensor]]]:
        """Slices of users and their parameters after training; on a GPU the work is launched, not finished.

        The parameters are in static buffers, which the next block overwrites: use them before.
        """
        groups = self._parted(steps)
        # The rest first: programs are compiled for as many users as the first group has room for.
        graphed_steps = {group: self._graphed_step(group, first, examples) for group in sorted(groups)}
        for group, users in groups.items():
            start_params = [piece if len(piece) == 1 else piece[users] for piece in first.values()]
            fields = {name: field[users] for name, field in examples.items()}
            _fill(graphed_steps[group], start_params, fields, random_keys[users], counts[users], rates[users])
        current = self._current_stream()
        for group in groups:
            if current is not None:
                self._stream(group).wait_stream(current)
        active_users = {group: (steps.counts[users] > 0).sum(axis=0).tolist() for group, users in groups.items()}
        try:
            for step in range(steps.longest):
                for group, counts_by_step in active_users.items():
                    if counts_by_step[step]:
                        with self._on_stream(group):
                            graphed_steps[group].replay(counts_by_step[step])
        finally:  # also after an error: nothing may be filled before the streams are done
            for group in groups:
                if current is not None:
                    current.wait_stream(self._stream(group))
        return [
            (users, [piece[: users.stop - users.start] for piece in graphed_steps[group].stack])
            for group, users in groups.items()
        ]

    def _parted(self, steps: Steps) -> dict[int, slice]:
        """The users of each group: 1 the stragglers, 0 the rest. Users come with the most steps first."""
        lengths, end = (steps.counts > 0).sum(axis=1), self._capacities[1]
        few = end == 0 or end >= len(lengths) or lengths[0] < _MANY_STEPS
        if few or lengths[end] >= _UNEVEN * lengths[0]:
            return {0: slice(0, len(lengths))}
        return {1: slice(0, end), 0: slice(end, len(lengths))}

    def _graphed_step(self, group: int, first: dict[str, Tensor], examples: Batch) -> GraphedStep:
        shapes = tuple(piece.shape[1:] for piece in first.values())
        if shapes not in self._programs:
            self._programs[shapes] = CompiledStep(self._step, self.programs, compiled=self._compiled)
        if (group, shapes) not in self._recordings:
            self._recordings[group, shapes] = GraphedStep(
                self._programs[shapes],
                list(first.values()),
                examples,
                users=self._capacities[group],
                steps=self._steps,
                width=self._width,
            )
        return self._recordings[group, shapes]

    def _current_stream(self) -> torch.cuda.Stream | None:
        device = next(iter(self._recordings.values())).step_index.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _stream(self, group: int) -> torch.cuda.Stream:
        """The stream of a group. The stragglers' has high priority: the rest fill what they leave idle."""
        if group not in self._streams:
            device = next(iter(self._recordings.values())).step_index.device
            self._streams[group] = torch.cuda.Stream(device, priority=-1 if group else 0)  # type: ignore[no-untyped-call]
        return self._streams[group]

    def _on_stream(self, group: int) -> AbstractContextManager[None]:
        return nullcontext() if self._current_stream() is None else torch.cuda.stream(self._stream(group))


def _fill(
    graphed: GraphedStep,
    start_params: list[Tensor],
    examples: Batch,
    random_keys: Tensor,
    counts: Tensor,
    rates: Tensor,
) -> None:
    """Copy a group's inputs into the static buffers; unused slots have no steps."""
    users, longest = counts.shape
    graphed.counts.zero_()
    graphed.step_index.zero_()
    graphed.rates[:users] = rates
    graphed.counts[:longest, :users] = counts.T
    if graphed.random_keys.numel():
        graphed.random_keys[:longest, :users] = random_keys.transpose(0, 1)
    for name, field in examples.items():
        width, buffer = field.shape[2], graphed.examples[name][:longest, :users]
        _copy(field.transpose(0, 1), buffer[:, :, :width])
        if width < buffer.shape[2]:
            padding = buffer[:, :, width:]
            _copy(field[:, :, :1].transpose(0, 1).expand_as(padding), padding)  # the user's own first example
    pieces = [*enumerate(graphed.stack), *graphed.copies.items()]
    for number, piece in pieces:
        broadcast(start_params[number], piece[:users])


def _copy(source: Tensor, target: Tensor) -> None:
    """target.copy_(source), also for strided uint16, which torch cannot copy."""
    if target.dtype == torch.uint16:
        source, target = source.view(torch.int16), target.view(torch.int16)
    target.copy_(source)
