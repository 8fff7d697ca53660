"""Whether a training can work within a promise: the noise on its mean update against the clip, and what would help.

Each coordinate of the mean update has noise of standard deviation delta_noise_multiplier * clip / cohort_size. Over
P parameters its norm is about sqrt(P) times that (the root of its mean square). No mean update is longer than the clip,
so the norm in clips is the least that noise over signal can be in a round.

A remedy brings that norm down to a given ratio of the clip, alone, with the rest of the plan unchanged. For a cohort, a
population or an epsilon the noise is fixed by that ratio, and what is searched is where its epsilon meets the promise.
The rough bound decides, which errs on the private side by a few 10^-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any

from ..errors import SettingError, check_whole, refuse
from .accountant import quick_epsilon, rough_epsilon
from .banded_noise import lasting_share
from .events import GaussianEvent, sampling_named
from .guarantee import default_delta, rounded_up
from .ledger import Ledger
from .noise_split import DeltaNoise, default_count_stddev, join_noise, split_noise
from .relations import Relation
from .search import least_whole_within

Parameters = int | Sequence[Sequence[int]]  # how many are trained, or the shape of each tensor of them

_NOTHING_AT_ONE = 0.5  # clips of noise from which handwriting learns nothing at a server rate of 1 (plan.md)
_MOST_USERS = 10**12
# Of the table of noise. More users than the largest cohort are rarely trained in one round.
ROUNDS, _COHORTS, _LARGEST_COHORT = (100, 300, 1000, 3000), 6, 10_000

# Of two users' updates, after clipping: in the first rounds of generated handwriting (studies/noise_norm.py), where
# users agree more than later on.
TYPICAL_COSINE = 0.02


class Verdict(StrEnum):
    """Whether training can work, by the norm of the noise on the mean update in clips, up to `most`.

    The limits are evidence, not theory (plan.md). Comfortable: the paper's six tasks lose at most 5% at z*, where
    the norm is 0.20 to 1.10 (Table 1: z* sqrt(P) / 100), so all of them bear 0.2. Feasible: four of these six bear 0.5
    or more, and none was tried beyond 1.1; generated handwriting, a small model, loses 13% at 0.5 and 21% at 1.
    Doubtful: it loses 30% at 2. Hopeless: more than that, at a server rate chosen in hindsight. Something may be
    learned even then, but not a model that one would use.
    """

    COMFORTABLE = "comfortable"
    FEASIBLE = "feasible"
    DOUBTFUL = "doubtful"
    HOPELESS = "hopeless"

    @property
    def most(self) -> float:
        """The largest ratio that has this verdict."""
        return _MOST[self]


_MOST = {Verdict.COMFORTABLE: 0.2, Verdict.FEASIBLE: 1.0, Verdict.DOUBTFUL: 2.0, Verdict.HOPELESS: math.inf}


def verdict(ratio: float) -> Verdict:
    """The word for noise whose norm on the mean update is `ratio` clips."""
    return next(word for word in Verdict if ratio <= word.most)


def verdict_text(ratio: float) -> str:
    """The verdict with its reason: "hopeless: the noise is 2.7 times the longest possible mean update"."""
    return f"{verdict(ratio)}: the noise is {ratio_text(ratio)} times the longest possible mean update"


def rate_text(ratio: float) -> str | None:
    """What so much noise does to the server's rate; None where it does nothing that was seen."""
    if ratio <= Verdict.COMFORTABLE.most:
        return None
    return "may have to be lower: at 0.5 clips handwriting learns at rate 0.3, and nothing at rate 1"


def rate_warning(ratio: float, server_lr: float | None) -> str | None:
    """What to say of a chosen rate of SGD, if handwriting learned nothing at it; None below."""
    if server_lr is None or server_lr < 1 or ratio < _NOTHING_AT_ONE:
        return None
    return f"server rate {server_lr:g} {rate_text(ratio)}. The noise here is {ratio_text(ratio)} clips."


def ratio_text(ratio: float, digits: int = 2) -> str:
    """A ratio to print: two digits, rounded up, but not because of the last bits of a float."""
    return rounded_up(ratio * (1 - 1e-12), digits)


def count_parameters(parameters: Parameters) -> int:
    """How many parameters these are: a number as it is, shapes multiplied out and added up."""
    way_out = "give the number of trained parameters, or the shape of each trained tensor"
    if isinstance(parameters, Sequence) and not isinstance(parameters, str):
        try:
            parameters = sum(math.prod(shape) for shape in parameters)
        except TypeError:
            raise refuse("parameters", parameters, "a number or a list of shapes", way_out) from None
    return check_whole("parameters", parameters, at_least=1, way_out=way_out)


def update_noise(noise_multiplier: float, cohort_size: int, count_stddev: float | None) -> float:
    """The noise multiplier of the summed updates, with the count noise that a training would have.

    Where the count would reveal more than the round may, no count can be released: all noise goes to the updates.
    """
    stddev = default_count_stddev(cohort_size, noise_multiplier) if count_stddev is None else count_stddev
    try:
        return float(split_noise(noise_multiplier, stddev))
    except SettingError:
        return noise_multiplier


def noise_norm(delta_noise_multiplier: float, cohort_size: int, parameters: int) -> float:
    """The norm of the noise on the mean update, in clips: the root of its mean square."""
    return delta_noise_multiplier / cohort_size * math.sqrt(parameters)


def most_parameters(delta_noise_multiplier: float, cohort_size: int, ratio: float) -> float:
    """How many parameters can be trained with noise of at most `ratio` clips on the mean update."""
    if delta_noise_multiplier == 0:
        return math.inf
    return (ratio * cohort_size / delta_noise_multiplier) ** 2


def mean_update_norm(cohort_size: int, cosine: float) -> float:
    """The norm of the mean, in clips, of updates as long as the clip of which any two have this cosine.

    1 if all users agree, 1 / sqrt(cohort_size) if their updates have nothing in common.
    """
    return math.sqrt(cosine + (1 - cosine) / cohort_size)


def slowdown(ratio: float) -> float:
    """How many times the rounds training takes at least, at the best server rate, for the same descent.

    Assumes a loss that curves alike in every direction, with curvature L. A step of rate s along a mean g with noise of
    norm R lowers it by s |g|^2 - s^2 L (|g|^2 + R^2) / 2 on average. At the best s that is |g|^2 / (2 L) divided by
    1 + (R / |g|)^2, and |g| is at most the clip.
    """
    return 1 + ratio**2


@dataclass(frozen=True)
class Setup:
    """The training that is to be helped."""

    population_size: int
    cohort_size: int
    rounds: int
    epsilon: float
    sampling: str
    relation: Relation
    delta: float | None  # None: `default_delta` of the number of users
    count_stddev: float | None  # None: what `default_count_stddev` says
    bands: int = 1  # of the noise; fewer where groups would be smaller than the cohort

    def spent(self, bound: Callable[..., float], population_size: int, cohort_size: int, noise: float) -> float:
        """Epsilon, by this bound, with so many users and this noise on the summed updates that stays in the models."""
        bands = min(self.bands, population_size // cohort_size)
        z = whole_round_noise(noise / lasting_share(self.rounds, bands), cohort_size, self.count_stddev)
        event = GaussianEvent(sampling_named(self.sampling, cohort_size, population_size, bands), z)
        delta = default_delta(population_size) if self.delta is None else self.delta
        return bound(Ledger().add(event, self.rounds), delta=delta, relation=self.relation)


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


def find_remedies(setup: Setup, delta_noise_multiplier: float, parameters: Parameters) -> Remedies | None:
    """What brings noise of this multiplier down to a feasible norm on the mean update; None where it is feasible.

    Of banded noise the multiplier is that of independent noise that would leave as much in the models.
    """
    n, m, count, ratio = setup.population_size, setup.cohort_size, count_parameters(parameters), Verdict.FEASIBLE.most
    if noise_norm(delta_noise_multiplier, m, count) <= ratio:
        return None
    a_user = ratio / math.sqrt(count)  # multiplier of the summed updates, for each user in it

    def least_cohort(users: Callable[[int], int], most: int) -> int | None:
        """The least cohort, drawn from `users(cohort)`, that keeps the promise with noise `a_user` for each user."""
        bounds = [
            lambda cohort, bound=bound: setup.spent(bound, users(cohort), cohort, a_user * cohort)
            for bound in (quick_epsilon, rough_epsilon)
        ]
        return least_whole_within(bounds, setup.epsilon, m, most)

    def same_share(cohort: int) -> int:
        return -(-cohort * n // m)  # rounded up

    cohort = least_cohort(same_share, _MOST_USERS * m // n)
    fitting = math.floor(most_parameters(delta_noise_multiplier, m, ratio))
    return Remedies(
        ratio=ratio,
        cohort_size=least_cohort(lambda _: n, n),
        users=None if cohort is None else (same_share(cohort), cohort),
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


@dataclass(frozen=True)
class NoiseCell:
    """One cohort and number of rounds, and the noise that they need. Noise multipliers are a few 10^-4 too large."""

    cohort_size: int
    rounds: int
    noise_multiplier: float  # of the whole round
    delta_noise_multiplier: float  # of the summed updates
    bands: int = 1
    lasting_share: float = 1.0  # of banded noise, that stays in the models
    gain: float = 1.0  # how many times less noise stays there than independent noise would leave

    @property
    def lasting_noise(self) -> float:
        """The multiplier on summed updates of independent noise that would leave as much in the models."""
        return self.delta_noise_multiplier * self.lasting_share

    @property
    def most_parameters(self) -> int:
        """How many parameters can be trained with noise on their mean update that is feasible."""
        return math.floor(most_parameters(self.lasting_noise, self.cohort_size, Verdict.FEASIBLE.most))

    def noise_norm(self, parameters: int) -> float:
        """The norm of the noise on the mean update that stays in the models, in clips."""
        return noise_norm(self.lasting_noise, self.cohort_size, parameters)


@dataclass(frozen=True)
class NoiseTable:
    """The noise of every cohort and number of rounds for one promise. Prints as one screen of text."""

    population_size: int
    epsilon: float  # that every cell stays within
    delta: float
    relation: Relation
    sampling: str
    cells: tuple[NoiseCell, ...] = field(repr=False)  # cohorts rise, and within a cohort the rounds
    parameters: int | None = None
    remedies: Remedies | None = field(default=None, repr=False)  # of `best`, where that is not feasible
    banded: bool = False

    @property
    def cohorts(self) -> tuple[int, ...]:
        """The rows."""
        return tuple(dict.fromkeys(cell.cohort_size for cell in self.cells))

    @property
    def rounds(self) -> tuple[int, ...]:
        """The columns."""
        return tuple(dict.fromkeys(cell.rounds for cell in self.cells))

    def least_feasible(self, rounds: int) -> NoiseCell | None:
        """The smallest cohort of the table whose noise is feasible for so many rounds; None if there is none."""
        assert self.parameters is not None
        column = [cell for cell in self.cells if cell.rounds == rounds]
        return next((cell for cell in column if cell.noise_norm(self.parameters) <= Verdict.FEASIBLE.most), None)

    @property
    def best(self) -> NoiseCell:
        """The cell with the least noise on the mean update."""
        return min(self.cells, key=lambda cell: cell.lasting_noise / cell.cohort_size)

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "found": "table",
            "population_size": self.population_size,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "sampling": self.sampling,
            "relation": str(self.relation),
            "sound": self.relation.sound,
            "noise": "banded" if self.banded else "independent",
            "parameters": self.parameters,
            "table": [self._cell_json(cell) for cell in self.cells],
            "remedies": None if self.remedies is None else self.remedies.to_json(),
        }

    def _cell_json(self, cell: NoiseCell) -> dict[str, Any]:
        numbers = {**asdict(cell), "most_parameters": cell.most_parameters}
        if self.parameters is not None:
            norm = cell.noise_norm(self.parameters)
            numbers |= {"noise_norm": norm, "verdict": str(verdict(norm))}
        return numbers

    def __str__(self) -> str:
        # By name, as the words stand above the numbers.
        text: str = import_module("clipline.cli.plan_text").table_text(self)
        return text


def usual_cohorts(population_size: int) -> tuple[int, ...]:
    """Six cohorts of 1, 2 or 5 times a power of ten, the largest at most half of the users and at most 10,000."""
    largest = max(min(population_size // 2, _LARGEST_COHORT), 1)
    steps = [digit * 10**power for power in range(5) for digit in (1, 2, 5)]
    return tuple(step for step in steps if step <= largest)[-_COHORTS:]
