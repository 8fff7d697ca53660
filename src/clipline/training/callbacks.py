"""What may look on while a model trains. A callback is given released numbers only."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from ..federated.round import TrainState
from .reports import Metrics, RoundReport

if TYPE_CHECKING:
    from .result import TrainResult
    from .training import Training


class Callback:
    """Called by `Training.run`, in the order of the list. Derive from it and write the methods you need.

    A callback with an attribute `charged`, the `Ledger` of all that it has ever written down, comes before the others,
    so that a round is on record before anything else is done with it; the result's guarantee covers that ledger too.
    One with a true `stop_requested` ends the run after the round: as "interrupted", to be resumed, or with
    `stop_reason = "early"` for good. One with `kept`, the model of an earlier round, puts that into the result. With a
    true `waits_for_metrics` the next round begins when this one is measured, so that it never depends on the clock
    after which round a run is stopped. If no callback `reads_guarantee`, rounds are not accounted as they end; the
    result is all the same, and whoever asks a report for its guarantee gets it.
    """

    reads_guarantee = True

    def on_start(self, training: Training, state: TrainState) -> None:
        """Before the first round of this call; `state` is what it begins from. An error here stops the run."""

    def on_wait(self, reason: str | None) -> None:
        """Training waits for something that is done once: "compiling, about 15 s, once". None: it goes on.

        Which users are drawn may decide when: the guarantee does not cover it, as it does not cover times.
        """

    def on_release(self, state: TrainState) -> None:
        """As soon as a round has released, before the new state is measured or shown: to write its event down."""

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """After a round, in order; the next may train meanwhile. `state` is what came of the round."""

    def on_end(self, result: TrainResult) -> None:
        """After the last round, also where the budget or Ctrl-C stopped the run; not after an error."""

    def close(self) -> None:
        """Always, at last, once `on_start` has returned: let go of files, threads and the screen."""


class Measuring(Callback):
    """A callback whose numbers belong into the report: `measure` is asked first, `on_round` sees the result."""

    def measure(self, state: TrainState, *, last: bool) -> Future[Metrics] | None:
        """Metrics of this state, begun in the background; None if this round is not measured."""
        return None
