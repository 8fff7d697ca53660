"""The Renyi curve of one round, for every entry of the table."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .events import GaussianEvent
from .halves import Array
from .loss import coarse_curve
from .pairs import check_supported, dominating_pair
from .relations import Relation


@lru_cache(maxsize=2048)
def renyi_curve(event: GaussianEvent, relation: Relation, orders: tuple[float, ...]) -> Array:
    """The Renyi divergence of one round at each order (all above 1): read-only, and kept, since rounds repeat.

    Infinite at every order for a round without noise. Entries without a closed curve (Poisson sampling with
    replace-one, fixed-size sampling with zero-out) get one from a lattice of losses: an upper bound within a
    few hundredths of the truth, which holds but for an event of probability below 10^-60 a round.
    """
    check_supported(event, relation)
    at = np.array(orders, dtype=np.float64)
    if event.noise_multiplier == 0:
        curve = np.full(len(orders), np.inf)
    else:
        pair = dominating_pair(event, relation)
        curve = pair.curve(at) if pair.curve else np.max([coarse_curve(way, at) for way in pair.directions], axis=0)
    curve.flags.writeable = False
    return curve
