"""What a round needs before it knows the model: who takes part, and the noise. Drawn while the round before ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..streams import Streams
from .noise import Noise
from .sampling import Cohort, Sampler


@dataclass(frozen=True, eq=False)
class Ahead:
    """Cohort and noise of one round to come: by then the noise is drawn, on cores that would be idle."""

    sampler: Sampler
    streams: Streams
    _drawn: dict[int, tuple[Cohort, Noise]] = field(default_factory=dict, repr=False)

    def draw(self, t: int, params: Tensor, *, nobody: bool = False) -> Cohort:
        """Draw for round t; the noise, for params (dim,) and the count, is drawn in the background.

        With `nobody`, as round t does not come, nothing is drawn.
        """
        self._drawn.clear()
        if nobody:
            return Cohort(np.zeros(0, np.int64), self.sampler.sampling)
        cohort = self.sampler.draw(self.streams.sampling(t))
        self._drawn[t] = cohort, Noise(self.streams.noise(t), len(params) + 1, params.device)
        return cohort

    def take(self, t: int, params: Tensor) -> tuple[Cohort, Noise]:
        """What was drawn for round t, or is now; it is given out once."""
        if t not in self._drawn:
            self.draw(t, params)
        return self._drawn.pop(t)

    def forget(self) -> None:
        """No more rounds come."""
        self._drawn.clear()
