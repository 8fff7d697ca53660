"""Algorithm 1 of the paper, on one screen."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..privacy.events import GaussianEvent
from ..privacy.ledger import Ledger
from ..streams import Streams
from .clients import Clients
from .controllers import ClipController, ClipState
from .mechanism import GaussianMechanism, Release
from .noise import Noise
from .sampling import Cohort, Sampler
from .server import ServerOptimiser, ServerState
from .workers import Workforce


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
    clients: Clients
    workforce: Workforce
    mechanism: GaussianMechanism
    server: ServerOptimiser
    controller: ClipController
    streams: Streams
    _drawn: dict[int, tuple[Cohort, Noise]] = field(default_factory=dict, init=False, repr=False)  # ahead of the round

    @property
    def event(self) -> GaussianEvent:
        """What every round will be charged as."""
        return GaussianEvent(self.sampler.sampling, self.mechanism.noise_multiplier)

    def first(self) -> TrainState:
        """The state before round 0."""
        params = self.clients.flat.initial.clone()
        return TrainState(params, self.server.first(params), self.controller.first(), Ledger())

    def round(self, state: TrainState) -> tuple[TrainState, Release]:
        """One round: sample, train and clip and add up, add noise, move the model, move the clip, write the ledger."""
        t = state.round_index
        cohort, noise = self._drawn.pop(t) if t in self._drawn else self._draw(t, state.params)
        total = self.workforce.clipped_sum(state.params, cohort, t, state.clip.clip)
        self._look_ahead(t + 1, state.params)
        release = self.mechanism.release(total, noise)
        params, server = self.server.update(state.params, state.server, release)
        clip = self.controller.update(state.clip, release)
        ledger = state.ledger.add(release.event)
        return TrainState(params, server, clip, ledger), release

    def forget(self) -> None:
        """Let go what was drawn ahead, when no more rounds come."""
        self._drawn.clear()

    def _draw(self, t: int, like: Tensor) -> tuple[Cohort, Noise]:
        """Who takes part in a round, and its noise, whose numbers are drawn in the background from now on."""
        return self.sampler.draw(self.streams.sampling(t)), Noise(self.streams.noise(t), len(like) + 1, like.device)

    def _look_ahead(self, t: int, like: Tensor) -> None:
        """Draw for the next round and let the workforce prepare: a GPU is still busy, or all cores but one are idle."""
        self._drawn.clear()
        self._drawn[t] = self._draw(t, like)
        self.workforce.foresee(self._drawn[t][0], t)
