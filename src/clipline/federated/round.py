"""Algorithm 1 of the paper, on one screen."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..engine.choose import LocalTrainer
from ..engine.parallel.group import Backend
from ..privacy.events import GaussianEvent
from ..privacy.ledger import Ledger
from ..streams import Streams
from .clip_controllers import ClipController, ClipState
from .draws import Ahead
from .mechanism import GaussianMechanism, Release
from .sampling import Sampler
from .server_optimisers import ServerOptimiser, ServerState


@dataclass(frozen=True, eq=False)
class TrainState:
    """All that a run is between two rounds. Everything in it has been released."""

    params: Tensor  # (dim,)
    server: ServerState
    clip: ClipState
    ledger: Ledger

    @property
    def round_index(self) -> int:
        """The round that comes next, from 0."""
        return self.clip.round_index


@dataclass(frozen=True, eq=False)
class Algorithm:
    """The parts of Algorithm 1, each of which fits the place of any other of its kind."""

    sampler: Sampler
    clients: LocalTrainer
    workforce: Backend
    mechanism: GaussianMechanism
    server: ServerOptimiser
    controller: ClipController
    streams: Streams
    ahead: Ahead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ahead", Ahead(self.sampler, self.streams))

    @property
    def event(self) -> GaussianEvent:
        """What every round will be charged as."""
        return GaussianEvent(self.sampler.sampling, self.mechanism.noise_multiplier)

    def init(self) -> TrainState:
        """The state before round 0."""
        params = self.clients.flat.initial.clone()
        return TrainState(params, self.server.init(params), self.controller.init(), Ledger())

    def round(self, state: TrainState, *, last: bool = False) -> tuple[TrainState, Release]:
        """One round: sample, train and clip and add up, add noise, move the model, move the clip, write the ledger.

        Unless it is the last, the next is begun: its cohort and noise are drawn, and a GPU has work to go on with.
        """
        t = state.round_index
        cohort, noise = self.ahead.take(t, state.params)
        total = self.workforce.clipped_sum(state.params, cohort, t, state.clip.clip)
        following = self.ahead.draw(t + 1, state.params, nobody=last)
        release = self.mechanism.release(total, noise)
        params, server = self.server.update(state.params, state.server, release)
        self.workforce.begin(params, following, t + 1)
        clip = self.controller.update(state.clip, release)
        ledger = state.ledger.add(release.event)
        return TrainState(params, server, clip, ledger), release
