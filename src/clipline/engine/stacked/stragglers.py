"""A block of users on a GPU: recorded programs, replayed side by side where some users take many more steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ...federated.local_sgd import Batch
from ..batches import Steps
from .step import GraphedStep, Program, StackStep

try:
    from ..kernels import block_sums_triton as triton_sum
except ImportError:  # Triton comes with torch for NVIDIA GPUs and is absent elsewhere
    triton_sum = None  # type: ignore[assignment]

# The users with most steps, a twelfth of a block, go beside the rest. A step of few users leaves most of a GPU idle:
# alone at the end of a block they would cost much of the time for little of the work.
_APART = 12
_UNEVEN = 0.8  # of the steps of the longest: who takes no fewer is no reason to part a block


class StragglerStreams:
    """Trains blocks of at most `users`, with at most `steps` steps of `width` examples."""

    def __init__(self, step: StackStep, *, users: int, steps: int, width: int, apart: bool = True) -> None:
        self._step = step
        self._rooms = (users, users // _APART if apart else 0)  # of the rest, and of those apart
        self._steps, self._width = steps, width
        self._programs: dict[tuple[torch.Size, ...], Program] = {}
        self._recordings: dict[tuple[int, tuple[torch.Size, ...]], GraphedStep] = {}
        self._streams: dict[int, torch.cuda.Stream] = {}

    def train(
        self, steps: Steps, first: dict[str, Tensor], examples: Batch, chances: Tensor, counts: Tensor, rates: Tensor
    ) -> list[tuple[slice, list[Tensor]]]:
        """Which users, in order, and their parameters after training, which on a GPU is still going on.

        The parameters lie where those of the next block will: use them up before.
        """
        parts = self._parted(steps)
        lanes = {lane: self._lane(lane, first, examples) for lane in parts}
        for lane, users in parts.items():
            begun = [piece if len(piece) == 1 else piece[users] for piece in first.values()]
            fields = {name: field[users] for name, field in examples.items()}
            _fill(lanes[lane], begun, fields, chances[users], counts[users], rates[users])
        now = self._now()
        for lane in parts:
            if now is not None:
                self._stream(lane).wait_stream(now)
        active = {lane: (steps.counts[users] > 0).sum(axis=0).tolist() for lane, users in parts.items()}
        try:
            for step in range(steps.longest):
                for lane, widths in active.items():
                    if widths[step]:
                        with self._within(lane):
                            lanes[lane].replay(widths[step])
        finally:  # also before anything is filled again
            for lane in parts:
                if now is not None:
                    now.wait_stream(self._stream(lane))
        return [
            (users, [piece[: users.stop - users.start] for piece in lanes[lane].stack]) for lane, users in parts.items()
        ]

    def _parted(self, steps: Steps) -> dict[int, slice]:
        """The users of each lane: 1 is that of those apart, 0 of the rest. Users come with the most steps first."""
        lengths, end = (steps.counts > 0).sum(axis=1), self._rooms[1]
        if end == 0 or end >= len(lengths) or lengths[end] >= _UNEVEN * lengths[0]:
            return {0: slice(0, len(lengths))}
        return {1: slice(0, end), 0: slice(end, len(lengths))}

    def _lane(self, lane: int, first: dict[str, Tensor], examples: Batch) -> GraphedStep:
        shapes = tuple(piece.shape[1:] for piece in first.values())
        if shapes not in self._programs:
            self._programs[shapes] = Program(self._step)
        if (lane, shapes) not in self._recordings:
            self._recordings[lane, shapes] = GraphedStep(
                self._programs[shapes],
                list(first.values()),
                examples,
                users=self._rooms[lane],
                steps=self._steps,
                width=self._width,
            )
        return self._recordings[lane, shapes]

    def _now(self) -> torch.cuda.Stream | None:
        device = next(iter(self._recordings.values())).place.device
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _stream(self, lane: int) -> torch.cuda.Stream:
        """Those with most steps come first wherever they have work: the others fill what they leave idle."""
        if lane not in self._streams:
            device = next(iter(self._recordings.values())).place.device
            self._streams[lane] = torch.cuda.Stream(device, priority=-1 if lane else 0)  # type: ignore[no-untyped-call]
        return self._streams[lane]

    def _within(self, lane: int) -> AbstractContextManager[None]:
        return nullcontext() if self._now() is None else torch.cuda.stream(self._stream(lane))


def _fill(
    recording: GraphedStep, begun: list[Tensor], examples: Batch, chances: Tensor, counts: Tensor, rates: Tensor
) -> None:
    """Put a part of a block where its recording reads; places that are free stay idle."""
    users, longest = counts.shape
    recording.counts.zero_()
    recording.place.zero_()
    recording.rates[:users] = rates
    recording.counts[:longest, :users] = counts.T
    recording.chances[:longest, :users] = chances.transpose(0, 1)
    for name, field in examples.items():
        width, room = field.shape[2], recording.examples[name][:longest, :users]
        _copy(field.transpose(0, 1), room[:, :, :width])
        _copy(field[:, :, :1].transpose(0, 1).expand_as(room[:, :, width:]), room[:, :, width:])  # the user's own
    pieces = [*enumerate(recording.stack), *recording.copies.items()]
    for first, piece in ((begun[number], piece) for number, piece in pieces):
        if len(first) == 1 and piece.device.type == "cuda" and triton_sum is not None:
            triton_sum.spread(first.reshape(-1), piece[:users].view(users, -1))
        else:
            piece[:users] = first


def _copy(source: Tensor, target: Tensor) -> None:
    """For types too that torch cannot move about freely."""
    if target.dtype == torch.uint16:
        source, target = source.view(torch.int16), target.view(torch.int16)
    target.copy_(source)
