"""Rounds of a training one by one, as `Training.run` takes them, for benchmarks that time them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import clipline
from clipline.federated.draws import Draws, Noise
from clipline.federated.mechanism import Release
from clipline.federated.sampling import Cohort
from clipline.training.loop import draws_of, one_round


def flat_training(model: Any, loss: Any, population: clipline.Population, **settings: Any) -> clipline.Training:
    """A `Training` from plain keywords: those of `Privacy` and `Compute` go there."""
    parts = {"privacy": clipline.Privacy, "compute": clipline.Compute}
    made = {
        name: kind(**{field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings})
        for name, kind in parts.items()
    }
    return clipline.Training(model, loss, population, **made, **settings)


class Rounds:
    """The rounds of a training, from its first state on. Within `training.backend.running()`."""

    def __init__(self, training: clipline.Training) -> None:
        self.training, self.state = training, training.init()
        self._draws = draws_of(training, until=2**62)

    def next(self, *, last: bool = False) -> Release:
        """One more round. After the `last` in a row nothing goes on in the background."""
        draws: Draws = _NoPrefetch(self._draws) if last else self._draws
        training = self.training
        self.state, release = one_round(training.algorithm, self.state, draws, training.backend)
        return release


@dataclass(frozen=True, eq=False)
class _NoPrefetch:
    draws: Draws

    def take(self, round_index: int) -> tuple[Cohort, Noise]:
        return self.draws.take(round_index)

    def prefetch(self, round_index: int) -> None:
        pass

    def close(self) -> None:
        pass
