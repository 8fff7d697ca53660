"""Who trains in which round: drawn once, by clipline's own stream, so that a peer trains the same users."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .users import StoredUsers

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))


@dataclass(frozen=True)
class Cohorts:
    """Of a whole training: the users of each round, those without examples left out, and the batches they train on."""

    users: list[list[int]]
    batches: list[int]


def cohorts_of(stored: StoredUsers, cohort_size: int, rounds: int, batch_size: int, seed: int) -> Cohorts:
    """The cohorts that `clipline train --seed SEED` draws by Poisson sampling.

    A peer cannot train nobody: in a round without anybody it has the first user who has examples.
    """
    from clipline.federated.sampling import sampler_named
    from clipline.random.streams import Streams

    sampler, streams, sizes = sampler_named("poisson", len(stored), cohort_size, None), Streams(seed), stored.sizes()
    first = int(np.flatnonzero(sizes)[0])
    drawn = [sampler.draw(streams.sampling(number)).users for number in range(rounds)]
    users = [[int(user) for user in cohort if sizes[user]] or [first] for cohort in drawn]
    return Cohorts(users, [int(np.ceil(sizes[cohort] / batch_size).sum()) for cohort in users])
