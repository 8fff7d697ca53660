"""What a tuning is asked: the trial on proxy data, the target for the private data, and how to search."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ...data.population import Population
from ...errors import CliplineError, SettingError, check_choice, check_number, check_whole, refuse
from ...privacy.accountant import check_delta
from ...privacy.relations import Relation
from ...settings import check
from ...tasks.settings import TrainSettings
from ...tasks.task import Task
from ..runs.data_checksum import data_checksum
from .noise import LEAST
from .scale import Target

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


def target_for(epsilon: object, delta: object, users: object, rounds: int, cohort_size: int, relation: Any) -> Target:
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
    target = Target(
        float(epsilon),  # type: ignore[arg-type]
        None if delta is None else check_delta(delta),  # type: ignore[arg-type]
        number,
        rounds,
        cohort_size,
        named,
    )
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
