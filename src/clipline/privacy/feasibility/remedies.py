"""What would make a training work: each remedy alone, with the rest of the plan unchanged, computed to the number.

A remedy brings the norm of the noise on the mean update down to a given ratio of the clip. For a cohort, a population
or an epsilon the noise is fixed by that ratio, and what is searched is where its epsilon meets the promise. The rough
bound decides, which errs on the private side by a few 10^-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import SettingError
from ..accountant import quick_epsilon, rough_epsilon
from ..events import GaussianEvent, sampling_named
from ..ledger import Ledger
from ..noise_split import DeltaNoise, default_count_stddev, join_noise, split_noise
from ..numerics.monotone_search import most_within
from ..relations import Relation
from .noise_norm import Parameters, count_parameters, most_parameters

_MOST_USERS = 10**12


@dataclass(frozen=True)
class Setup:
    """The training that is to be helped. `delta` is given for every number of users, since it may depend on it."""

    population_size: int
    cohort_size: int
    rounds: int
    epsilon: float
    sampling: str
    relation: Relation
    delta: Callable[[int], float]
    count_stddev: float | None  # None: what `default_count_stddev` says

    def spent(self, bound: Callable[..., float], population_size: int, cohort_size: int, noise: float) -> float:
        """Epsilon, by this bound, with so many users and this noise on the summed updates."""
        z = whole_round_noise(noise, cohort_size, self.count_stddev)
        event = GaussianEvent(sampling_named(self.sampling, cohort_size, population_size), z)
        return bound(Ledger().add(event, self.rounds), delta=self.delta(population_size), relation=self.relation)


@dataclass(frozen=True)
class Adapters:
    """Low-rank adapters on every matrix of a frozen model: for (rows, columns) they train rank * (rows + columns)."""

    rank: int
    matrices: int
    parameters: int


@dataclass(frozen=True)
class Remedies:
    """Each alone brings the noise on the mean update to `ratio` clips. None: it cannot, or it is not known."""

    ratio: float
    cohort_size: int | None  # the least, of the same users
    users: tuple[int, int] | None  # the least population, and its cohort, which is the same share of it
    parameters: int  # the most
    adapters: Adapters | None  # of the largest rank that fits
    epsilon: float  # the least

    def to_json(self) -> dict[str, Any]:
        """For programs; an infinite epsilon is null."""
        return {
            "noise_norm": self.ratio,
            "cohort_size": self.cohort_size,
            "population_size": None if self.users is None else self.users[0],
            "population_cohort_size": None if self.users is None else self.users[1],
            "parameters": self.parameters,
            "adapter_rank": None if self.adapters is None else self.adapters.rank,
            "adapter_parameters": None if self.adapters is None else self.adapters.parameters,
            "epsilon": self.epsilon if math.isfinite(self.epsilon) else None,
        }


def find_remedies(setup: Setup, delta_noise_multiplier: float, parameters: Parameters, ratio: float) -> Remedies:
    """What brings noise of this multiplier, which is too much, down to `ratio` clips on the mean update."""
    n, m = setup.population_size, setup.cohort_size
    a_user = ratio / math.sqrt(count_parameters(parameters))  # multiplier of the summed updates, for each user in it

    def users(cohort: int) -> int:
        return -(-cohort * n // m)  # rounded up

    cohort = _least_cohort(setup, a_user, users, most=_MOST_USERS * m // n)
    fitting = math.floor(most_parameters(delta_noise_multiplier, m, ratio))
    return Remedies(
        ratio=ratio,
        cohort_size=_least_cohort(setup, a_user, lambda _: n, most=n),
        users=None if cohort is None else (users(cohort), cohort),
        parameters=fitting,
        adapters=None if isinstance(parameters, int) else adapters_within(parameters, fitting),
        epsilon=setup.spent(rough_epsilon, n, m, a_user * m),
    )


def adapters_within(shapes: Sequence[Sequence[int]], most: int) -> Adapters | None:
    """Adapters of the largest rank that train at most so many parameters. None if not even rank 1 does.

    None too where adapters would train as much as the matrices themselves.
    """
    sizes = [tuple(shape) for shape in shapes if len(shape) == 2]
    each_rank = sum(rows + columns for rows, columns in sizes)
    rank = min(most // each_rank, *(min(size) // 2 for size in sizes)) if sizes else 0
    return Adapters(rank, len(sizes), rank * each_rank) if rank >= 1 else None


def _least_cohort(setup: Setup, a_user: float, users: Callable[[int], int], most: int) -> int | None:
    """The least cohort above that of `setup` that keeps the promise with noise `a_user` for each user of it.

    `users(cohort)` is the population that it is drawn from. None if not even `most` do.
    """

    def bound(of: Callable[..., float]) -> Callable[[int], float]:
        return lambda cohort: setup.spent(of, users(cohort), cohort, a_user * cohort)

    quick, rough = bound(quick_epsilon), bound(rough_epsilon)
    enough = setup.cohort_size
    while quick(enough) > setup.epsilon and rough(enough) > setup.epsilon:
        if enough >= most:
            return None
        enough = min(2 * enough, most)
    # `most_within` looks for the greatest number: with signs reversed it is the least cohort.
    return -most_within([lambda down: rough(-down)], setup.epsilon, -enough, -setup.cohort_size)


def whole_round_noise(delta_noise_multiplier: float, cohort_size: int, count_stddev: float | None) -> float:
    """The noise multiplier of a whole round whose updates have this one, with the count noise of a training."""
    if count_stddev is not None:
        return join_noise(DeltaNoise(delta_noise_multiplier), count_stddev)
    low, high = 0.0, delta_noise_multiplier
    for _ in range(60):  # the default count noise depends on the answer, so it is searched
        middle = (low + high) / 2
        try:
            enough = float(split_noise(middle, default_count_stddev(cohort_size, middle))) <= delta_noise_multiplier
        except SettingError:
            enough = False
        low, high = (middle, high) if enough else (low, middle)
    return low
