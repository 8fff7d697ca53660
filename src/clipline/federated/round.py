"""Algorithm 1 of the paper, on one screen."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..privacy.events import GaussianEvent
from ..privacy.ledger import Ledger
from .backend import CohortRequest
from .clip_controllers import ClipController, ClipState, LateClip
from .clipping import ClippedSum
from .draws import Draws
from .mechanism import GaussianMechanism, NoiseState, Release
from .sampling import Sampler
from .server_optimisers import AVERAGE, ServerOptimiser, ServerState


@dataclass(frozen=True, eq=False)
class TrainState:
    """The whole state of a run between two rounds. All of it has been released, but for banded noise."""

    round_index: int  # of the next round, from 0
    params: Tensor  # (dim,)
    server: ServerState
    read_clip: Callable[[], ClipState]  # late: on a GPU reading waits for the previous round
    ledger: Ledger
    noise: NoiseState | None = None  # of banded noise: PRIVATE

    @cached_property
    def clip(self) -> ClipState:
        """The clip of the next round."""
        return self.read_clip()

    @property
    def returned(self) -> Tensor:
        """(dim,) of the model that a training gives if it ends here: the average of models, or the last."""
        return self.server.get(AVERAGE, self.params)


@dataclass(frozen=True, eq=False)
class Algorithm:
    """The parts of Algorithm 1; each can be replaced by another of its protocol."""

    sampler: Sampler
    mechanism: GaussianMechanism
    server: ServerOptimiser
    controller: ClipController

    @property
    def event(self) -> GaussianEvent:
        """The event that every round is charged as; with banded noise that of its first round."""
        return self.mechanism.event(self.sampler.sampling)

    def next_event(self, state: TrainState) -> GaussianEvent:
        """The event of the round that follows this state."""
        return self.event.at(0 if state.noise is None else state.noise.index)

    def init(self, params: Tensor) -> TrainState:
        """The state before round 0."""
        return TrainState(0, params, self.server.init(params), self.controller.init, Ledger(), self.mechanism.begin(0))

    def round(
        self, state: TrainState, draws: Draws
    ) -> Generator[CohortRequest, ClippedSum, tuple[TrainState, Release]]:
        """One round: sample, request the clipped sum, add noise, update model and clip, extend the ledger.

        A generator: it yields the request, is sent the sum, and returns the next state and the release.
        """
        t = state.round_index
        cohort, noise = draws.take(t)
        total = yield CohortRequest(state.params, cohort, t, lambda: state.clip.clip)
        draws.prefetch(t + 1)
        release, noise_after = self.mechanism.step(total, noise, state.noise, t)
        params, server = self.server.update(state.params, state.server, release)
        clip = LateClip(lambda: self.controller.update(state.clip, release))
        return TrainState(t + 1, params, server, clip, state.ledger.add(release.event), noise_after), release
