"""Step 1, the rule: which pairs of client and server rates to try, and which one wins.

Rates lie on a lattice of half decades around the ones that the task brings. All neighbours of those are tried first;
then those of the best pair, until the best has been compared with each of its eight neighbours, or until a pair that
has been is nearly as good. So the search leaves the place where it began only for something better: client and server
rates make up for each other, and along that ridge it could walk for ever without gaining anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .noise import degradation

STEP = 10**0.5  # half a decade, from one rate to the next
WORTH = 0.01  # of the metric, relative: less than this is no reason to search on
_LARGEST = 1e30  # of a rate, as the settings allow

Offsets = tuple[int, int]  # steps from the task's client rate and from its server rate


@dataclass(frozen=True)
class RateGrid:
    """The lattice. `reach` steps to each side are tried first: 1 is a grid of 3 x 3."""

    client_lr: float
    server_lr: float
    reach: int = 1

    def rates(self, offsets: Offsets) -> tuple[float, float]:
        """(client rate, server rate) of a point."""
        return self.client_lr * STEP ** offsets[0], self.server_lr * STEP ** offsets[1]

    def first(self) -> list[Offsets]:
        """The points to begin with."""
        side = range(-self.reach, self.reach + 1)
        return [(client, server) for client in side for server in side if self._allowed((client, server))]

    def next(self, scores: Mapping[Offsets, float], *, lower_is_better: bool) -> list[Offsets]:
        """The neighbours of the best point that were not tried; none if the search is at its end."""
        first = best(scores, lower_is_better=lower_is_better)
        inside = (point for point in scores if not self._untried(point, scores))
        for point in inside:
            if degradation(scores[first], scores[point], lower_is_better=lower_is_better) <= WORTH:
                return []
        return self._untried(first, scores)

    def _untried(self, point: Offsets, scores: Mapping[Offsets, float]) -> list[Offsets]:
        around = [(point[0] + i, point[1] + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        return [other for other in around if other not in scores and self._allowed(other)]

    def _allowed(self, point: Offsets) -> bool:
        return all(0 < rate <= _LARGEST for rate in self.rates(point))


def best(scores: Mapping[Offsets, float], *, lower_is_better: bool) -> Offsets:
    """The point with the best score; of equals the one nearest to where the search began.

    A run that diverged has the worst score there is. Where all of them did, the smallest rates count as the best, so
    that the search turns there.
    """
    sign = 1 if lower_is_better else -1

    def order(point: Offsets) -> tuple[float, int, Offsets]:
        client, server = point
        return sign * scores[point], client**2 + server**2 if math.isfinite(scores[point]) else sum(point), point

    return min(scores, key=order)


def runs_with_fixed_clips(runs: int, clips: Sequence[float] | int = 5) -> int:
    """How many runs the same search takes where the clip is one more thing to try: the paper tries five clips."""
    return runs * (clips if isinstance(clips, int) else len(clips))
