"""What a tuning is asked: the trial on proxy data, the target for the private data, and how to search."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from ...data.population import Population
from ...errors import CliplineError, SettingError, check_choice, check_number, check_whole, refuse
from ...privacy.accountant import account, check_delta
from ...privacy.banded_noise import bands_and_noise, lasting_share
from ...privacy.calibration import least_scale, noise_multiplier_for, rounds_within
from ...privacy.events import GaussianEvent, PoissonSampling, sampling_named
from ...privacy.guarantee import Guarantee, rounded_up
from ...privacy.ledger import Ledger
from ...privacy.noise_split import default_count_stddev
from ...privacy.relations import Relation
from ...settings import check
from ...tasks.task import Task
from ...tasks.train_settings import TrainSettings
from ..record import data_checksum

_MOST_USERS = 10**12
_MOST_DEGRADED = 0.99  # of the metric: --degradation is below 100%

Losses = Sequence[tuple[float, float]]  # (noise, degradation) of the trials of step 2


@dataclass(frozen=True)
class Target:
    """What is to be promised for how many users and rounds, and the cohort of the trial, from which it is scaled.

    Sampling is Poisson: of a fixed size the cohort would have to be two to three times as large. The trial has
    independent noise; the final training may have `banded` noise, of which as much stays in the models.
    """

    epsilon: float
    delta: float | None  # None: population_size^-1.1
    population_size: int
    rounds: int
    cohort_size: int
    relation: Relation = Relation.ADD_OR_REMOVE
    banded: bool = False

    @property
    def delta_value(self) -> float:
        """Delta as a number."""
        return self.population_size**-1.1 if self.delta is None else self.delta

    def event(self, cohort_size: int, noise_multiplier: float, bands: int = 1) -> GaussianEvent:
        """One round of the final training."""
        return GaussianEvent(sampling_named("poisson", cohort_size, self.population_size, bands), noise_multiplier)

    def ledger(self, cohort_size: int, noise_multiplier: float, bands: int = 1) -> Ledger:
        """All rounds of the final training."""
        return Ledger().add(self.event(cohort_size, noise_multiplier, bands), self.rounds)

    def guarantee(self, cohort_size: int, noise_multiplier: float, bands: int = 1) -> Guarantee:
        """What the final training promises with this cohort and this noise."""
        return account(self.ledger(cohort_size, noise_multiplier, bands), **self.terms)

    def bands(self, cohort_size: int) -> tuple[int, float]:
        """The bands with which the least noise stays in the models at the target, and that noise, rounded up."""
        bands, z, _ = bands_and_noise(cohort_size, self.population_size, self.rounds, self.epsilon, **self.terms)
        return bands, z * lasting_share(self.rounds, bands)

    def enough_noise(self) -> float:
        """The noise with which the cohort of the trial itself meets the target: no scaling is needed then."""
        return self.least_noise(self.cohort_size)

    def least_noise(self, cohort_size: int) -> float:
        """The least noise with which this cohort meets the target; of banded noise what stays in the models."""
        if self.banded:
            return self.bands(cohort_size)[1]
        sampling = PoissonSampling(cohort_size / self.population_size)
        return noise_multiplier_for(sampling=sampling, rounds=self.rounds, epsilon=self.epsilon, **self.terms)

    @property
    def terms(self) -> dict[str, Any]:
        """Delta and relation, as the accountant takes them."""
        return {"delta": self.delta_value, "relation": self.relation}


@dataclass(frozen=True)
class Scaled:
    """The final cohort and noise: the trial's, both times `alpha`. Noise on the count grows along, cohort / 20.

    Of banded noise it is the part that stays in the models that is `alpha` times the trial's.
    """

    cohort_size: int
    noise_multiplier: float
    alpha: float
    guarantee: Guarantee
    bands: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the final training that follow."""
        found = {"cohort_size": self.cohort_size, "noise_multiplier": self.noise_multiplier}
        if self.bands == 1:
            return {**found, "noise": "independent", "bands": "auto"}
        count_stddev = max(self.cohort_size / 20, default_count_stddev(self.cohort_size, self.noise_multiplier))
        return {**found, "noise": "banded", "bands": self.bands, "count_stddev": count_stddev}


@dataclass(frozen=True)
class Alternative:
    """One change with which the target would be met, and what it means."""

    change: str
    meaning: str


class Unreachable(SettingError):
    """No cohort of the users there are meets the target; `alternatives` are what would."""

    def __init__(self, message: str, alternatives: list[Alternative]) -> None:
        super().__init__(message + "".join(f"\n  - {one.change}: {one.meaning}" for one in alternatives))
        self.alternatives = alternatives


def scale_up(target: Target, noise_multiplier: float, losses: Losses = ()) -> Scaled:
    """The least cohort m' >= m such that (m', z m' / m) meets the target; refused if it would exceed the users.

    `account` confirms the answer. A cohort of one user less would not do, unless m itself meets the target. `losses`
    are those of step 2, by which a refusal says how much more degradation would have to be allowed.
    """
    m, cohort_size = target.cohort_size, least_cohort(target, noise_multiplier)
    if cohort_size is None:
        raise _unreachable(target, noise_multiplier, losses)
    bands = target.bands(cohort_size)[0] if target.banded else 1
    z = noise_multiplier * cohort_size / m / lasting_share(target.rounds, bands)
    return Scaled(cohort_size, z, cohort_size / m, target.guarantee(cohort_size, z, bands), bands)


def _unreachable(target: Target, noise_multiplier: float, losses: Losses) -> Unreachable:
    """The refusal, with the nearest changes that would do, each computed with all else kept."""
    n, m = target.population_size, target.cohort_size
    return Unreachable(
        f"epsilon={target.epsilon:g} at delta={target.delta_value:.3g} must be met with a cohort of at most the "
        f"{n:,} users there are, and is not: scaled from m={m}, z={noise_multiplier:g} over {target.rounds} rounds, "
        f"all {n:,} users in every round reach epsilon "
        f"{target.guarantee(n, noise_multiplier * n / m).epsilon_text}. Each of these alone would do:",
        alternatives(target, noise_multiplier, losses),
    )


def alternatives(target: Target, noise_multiplier: float, losses: Losses) -> list[Alternative]:
    """The least change of each kind with which the target is met, in the order of what it asks of people."""
    n, m = target.population_size, target.cohort_size
    z = noise_multiplier * n / m  # all users in every round: the most private there is
    best = target.guarantee(n, z)
    found = []
    users = _least_users(target, noise_multiplier)
    if users is not None:
        cohort = least_cohort(replace(target, population_size=users), noise_multiplier) or users
        found.append(Alternative(f"--users {users}", f"declared, with {cohort:,} of them a round"))
    if best.private:
        epsilon = rounded_up(best.epsilon, 3)
        found.append(Alternative(f"--epsilon {epsilon}", "all users in every round reach it"))
    rounds = rounds_within(target.event(n, z), epsilon=target.epsilon, at_most=target.rounds, **target.terms)
    if rounds:
        found.append(Alternative(f"--rounds {rounds}", f"of {target.rounds}; the search is made again with these"))
    try:
        needed = target.least_noise(n) * m / n
    except SettingError:  # not with any noise
        return found
    # All noise below has to count as borne too.
    enough = [(max(loss for z, loss in losses if z <= tried), tried) for tried, _ in losses if tried >= needed]
    loss, tried = min(enough, default=(math.inf, 0.0))
    if loss <= _MOST_DEGRADED:
        percent = rounded_up(max(100 * loss, 0.1), 2)
        found.append(Alternative(f"--degradation {percent}%", f"then z = {tried:g} counts as borne, which was tried"))
    else:
        found.append(
            Alternative(f"a model that bears z = {rounded_up(needed, 3)} at m = {m}", "smaller, or with other rates")
        )
    return found


@lru_cache(maxsize=256)  # a page asks for the same cohort in several places
def least_cohort(target: Target, noise_multiplier: float) -> int | None:
    """The least cohort that meets the target when the noise grows with it; None if the users are too few.

    With banded noise it is at most a hundredth larger than the least.
    """
    try:
        cohort = least_scale(
            cohort_size=target.cohort_size, noise_multiplier=noise_multiplier, population_size=target.population_size,
            sampling="poisson", rounds=target.rounds, epsilon=target.epsilon, **target.terms,
        )  # fmt: skip
    except SettingError:
        return None  # of all users in every round, banded noise is no better
    if not target.banded:
        return cohort
    m = target.cohort_size
    return least(m - 1, cohort, lambda cohort: target.bands(cohort)[1] <= noise_multiplier * cohort / m, share=0.01)


def _least_users(target: Target, noise_multiplier: float) -> int | None:
    """The least population above the present one whose users, all in every round, meet the target.

    The default delta falls with the number of users, slowly: noise in proportion to them always wins.
    """

    def meets(users: int) -> bool:
        larger = replace(target, population_size=users)
        return larger.guarantee(users, noise_multiplier * users / target.cohort_size).epsilon <= target.epsilon

    low, high = target.population_size, min(2 * target.population_size, _MOST_USERS)
    while not meets(high):
        if high == _MOST_USERS:
            return None
        high = min(2 * high, _MOST_USERS)
    return least(low, high, meets)


def least(low: int, high: int, meets: Callable[[int], bool], share: float = 0.0) -> int:
    """The least whole number above `low` with `meets`, which `high` does and which once true stays true.

    Or one that is larger by at most this share.
    """
    while high - low > max(1, share * low):
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


LEAST = 0.01  # noise of the search for rates; the paper's
COHORT = 100  # of the trial: the paper's "m about 100"
DEGRADATION = 0.05
MOST_RUNS = 25  # of step 1
GENERATED = 4000  # users of a generated proxy, at most: the recipe needs comparatively few
_NOT_CHOSEN = ("seed", "epsilon", "max_epsilon", "count_stddev", "delta", "relation", "fixed_clip")

SAMPLERS = ("tpe", "random", "qmc", "gp")  # of Optuna
PRUNERS = ("median", "halving", "none")

Search = Literal["grid", "optuna"]


class SharedUsersWarning(UserWarning):
    """Users of the proxy have ids that private users have too, and other rows: the same people, or ids that recur."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One tuning, complete and checked. `trial` are the settings of its runs, but for rates and noise.

    `private_data` is where the final training will read its users, None if that is not known yet or if they are
    generated. With `private_search` the trial itself runs on them, and the search is charged: see `private_search`.
    """

    task: Task
    trial: TrainSettings
    target: Target
    private_data: str | None = None
    degradation: float = DEGRADATION
    search: Search = "grid"
    runs: int = MOST_RUNS
    reach: int = 1
    sampler: str = "tpe"
    pruner: str = "median"
    private_search: bool = False
    noise_multiplier: float = LEAST
    metric: str | None = None
    lower_is_better: bool | None = None

    def __post_init__(self) -> None:
        check_choice("search", self.search, ("grid", "optuna"))
        check_choice("sampler", self.sampler, SAMPLERS)
        check_choice("pruner", self.pruner, PRUNERS)
        if self.search == "optuna" and importlib.util.find_spec("optuna") is None:
            raise SettingError("search='optuna' needs Optuna: pip install 'clipline[search]', or drop it")
        check_number("degradation", self.degradation, at_least=0, below=1, way_out="5% is the paper's")
        check_whole("runs", self.runs, at_least=1, at_most=100_000, way_out="25 are usually enough")
        check_whole(
            "reach", self.reach, at_least=0, at_most=10, way_out="1 is a grid of 3 x 3 to begin with, 2 of 5 x 5"
        )
        check_number("noise", self.noise_multiplier, above=0, below=self.most_noise, way_out="0.01 is the paper's")
        if self.trial.sampling != "poisson":
            raise refuse("sampling", self.trial.sampling, "'poisson' to tune", "see clipline plan --scale for others")
        if self.trial.clip != "quantile":
            raise refuse("clip", self.trial.clip, "'quantile' to tune, which leaves no clip to search", "drop it")
        self._check_data()

    def _check_data(self) -> None:
        """Refuse private data that cannot be used, and to search on them unless that is charged."""
        try:
            self.task.data_used(self.trial)
        except CliplineError as error:
            if self.private_search:
                raise
            raise SettingError(str(error).replace("data=", "proxy=", 1)) from None  # as it was given
        if self.private_search or self.private_data is None:
            return
        private = self.trial.overridden({"data": self.private_data}, "the private data")
        self.task.data_used(private)
        if not self.trial.stored:
            return
        same = data_checksum(self.trial) == data_checksum(private)
        shared = 0 if same else shared_users(*(self.task.load(one).population for one in (self.trial, private)))
        if same or shared is None:
            raise refuse(
                "proxy", self.trial.data, "other data than the private ones, on which a search is not free",
                "give other data, or --private-search to charge the search",
            )  # fmt: skip
        if shared:
            warnings.warn(
                f"proxy={self.trial.data!r} and data={self.private_data!r} have {shared} user ids in common: if these "
                "are the same people, the search is not free, whatever is said below; give data of other people, or "
                "--private-search",
                SharedUsersWarning,
                stacklevel=2,
            )

    @property
    def most_noise(self) -> float:
        """The most noise that the trial can have: up to the noise on its count, which is cohort_size / 20."""
        return self.trial.cohort_size / 20

    @property
    def window(self) -> int:
        """Over how many rounds at the end the metric is averaged: a fifth of them, and the paper's 100 at most."""
        return max(1, min(100, self.trial.rounds // 5))


def shared_users(proxy: Population, private: Population) -> int | None:
    """How many ids are in both; None where most of these have the same rows in both, and so are the same users.

    A table and a store made from it, or a part of a table, have other checksums and the same users. Up to 1000 of the
    users in common are compared.
    """
    places = {str(user): place for place, user in enumerate(_ids(private))}
    both = [(place, places[str(user)]) for place, user in enumerate(_ids(proxy)) if str(user) in places]
    compared = [(proxy.of(here), private.of(there)) for here, there in both[:1000]]
    alike = sum(_same_rows(here, there) for here, there in compared)
    return None if 2 * alike > len(compared) else len(both)


def _ids(population: Population) -> list[Any]:
    return [] if population.user_ids is None else population.user_ids.tolist()


def _same_rows(here: Mapping[str, Any], there: Mapping[str, Any]) -> bool:
    """Whether two users have the same fields with the same values, of at least one example."""
    if here.keys() != there.keys():
        return False
    pairs = [(np.asarray(here[name]), np.asarray(there[name])) for name in here]
    return all(len(one) and one.shape == other.shape and (one == other).all() for one, other in pairs)


def target_for(
    epsilon: object,
    delta: object,
    users: object,
    rounds: int,
    cohort_size: int,
    relation: Any,
    *,
    banded: bool = False,
) -> Target:
    """The target, checked: each number alone, the users against the cohort, and whether any noise could reach it."""
    check("epsilon", epsilon)
    if epsilon is None:
        raise SettingError("epsilon is missing: give --epsilon, the privacy that the final training must have")
    if users is None:
        raise SettingError("users is missing: give --users, the number of private users, known beforehand")
    number = check_whole("users", users, at_least=2, at_most=10**12, way_out="give the number of private users")
    if number < cohort_size:
        limit = f"at least the cohort of the trial, {cohort_size}"
        raise refuse("users", number, limit, "give the number of private users, or lower --cohort-size")
    named = Relation.ADD_OR_REMOVE if relation is None else Relation.named(relation)
    if not named.sound:
        raise refuse("relation", named.value, "one that a guarantee can be given for", "leave it out")
    delta_given = None if delta is None else check_delta(delta)  # type: ignore[arg-type]
    banded = banded and named is not Relation.REPLACE_ONE  # which banded noise cannot be accounted for
    target = Target(float(epsilon), delta_given, number, rounds, cohort_size, named, banded)  # type: ignore[arg-type]
    target.enough_noise()  # refuses what no noise can reach
    return target


def final_settings(question: Question, found: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the final training: those of the trial, with the private users and what was `found`.

    The seed is left out and the noise comes from the system: a model that is given away needs noise that nobody can
    draw again. The noise on the count grows with the cohort.
    """
    trial, target = question.trial, question.target
    kept = {name: value for name, value in asdict(trial).items() if name not in _NOT_CHOSEN and value is not None}
    if question.private_data is not None:
        kept |= {"data": question.private_data}
        kept.pop("test_users", None)
    elif trial.stored:
        kept.pop("data", None)  # the proxy is not what to train on
    return {
        **kept,
        "population_size": target.population_size,
        "delta": target.delta_value,
        "relation": target.relation.value,
        "max_epsilon": target.epsilon,
        "noise_source": "system",
        "count_stddev": found["cohort_size"] / 20,
        **found,
    }
