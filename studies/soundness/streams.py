"""Row 1: random streams that another user's coming, going or renaming changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from attack import (
    Attack,
    Fields,
    Measure,
    area,
    classified,
    clips,
    cross_entropies,
    positions,
    private_sum,
    renamed,
    training_of,
    without,
)
from torch import Tensor, nn

from clipline import LocalSGD, Training

TARGET = "a"  # comes first in every order, so that everybody stands behind
EPSILON, DELTA = 0.23, 1e-5
POPULATION, COHORT, RUNS = 2000, 100, 200
OTHERS = [f"u{number:04}" for number in range(POPULATION - 1)]
SAMPLED = OTHERS[:: POPULATION // COHORT]


@cache
def ordinary() -> dict[str, Fields]:
    """Users of a few examples each."""
    return classified(dict.fromkeys((TARGET, *OTHERS), 5))


def network() -> nn.Module:
    """A small network with dropout."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))


def trained_on(users: dict[str, Fields], **changes: Any) -> Training:
    """One round of a few steps with dropout; the rate is large, and most updates reach the clip."""
    usual = {"cohort_size": COHORT, "delta": DELTA, "population_size": POPULATION}
    return training_of(network(), cross_entropies, users, LocalSGD(1.0, 2), **{**usual, **changes})


def removed() -> float:
    """Ordinary data, the user leaves."""
    sums = [private_sum(trained_on(users), SAMPLED) for users in (ordinary(), without(ordinary(), TARGET))]
    return clips(*sums)


def under_another_name() -> float:
    """Ordinary data, the user takes another id."""
    sums = [private_sum(trained_on(users), SAMPLED) for users in (ordinary(), renamed(ordinary(), TARGET, "z"))]
    return clips(*sums)


class Last(nn.Module):
    """One number; a step at rate 1 puts it where the last example was."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(batch,) distances, halved and squared."""
        return (self.place - x).square() / 2


def distances(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,) losses."""
    losses: Tensor = model(batch["x"])
    return losses


def worst_case(users: int = 41, examples: int = 20) -> float:
    """Who knows the seed learns which example each user sees last, with and without the target, and lays data so."""
    names = [f"u{number:02}" for number in range(users)]
    numbered = {user: {"x": 1.0 + np.arange(examples, dtype=np.float32)} for user in (TARGET, *names)}
    last = [
        [
            round(float(private_sum(training, [name], clip=1e6)[0])) - 1
            for training in [training_of(Last(), distances, some, LocalSGD(1.0, 1), population_size=users + 1)]
            for name in names
        ]
        for some in (numbered, without(numbered, TARGET))
    ]
    laid = {TARGET: {"x": np.zeros(examples, np.float32)}}
    for name, here, there in zip(names, *last, strict=True):
        x = np.zeros(examples, np.float32)
        x[there], x[here] = -1.0, 1.0
        laid[name] = {"x": x}
    training = [
        training_of(Last(), distances, some, LocalSGD(1.0, 1), population_size=users + 1)
        for some in (laid, without(laid, TARGET))
    ]
    return clips(*(private_sum(one, names) for one in training))


@dataclasses.dataclass(frozen=True)
class KnownOthers:
    """A sampler whose draw of the others is known, which the promise allows; only the target's coin is secret."""

    before: Any
    others: Sequence[int]
    target: int | None

    def __getattr__(self, name: str) -> Any:
        """All else as declared and accounted."""
        return getattr(self.before, name)

    def draw(self, rng: np.random.Generator, round_index: int = 0) -> Any:
        """The others, and the target at the rate of the plan."""
        drawn = self.before.draw(rng, round_index)
        came = self.target is not None and rng.random() < COHORT / POPULATION
        users = np.sort(np.array([*self.others, *([self.target] if came else [])], dtype=np.int64))
        return dataclasses.replace(drawn, users=users)


@cache
def noise_multiplier() -> float:
    """That the promise of EPSILON asks for."""
    return trained_on(ordinary(), epsilon=EPSILON, noise_multiplier=None).noise_multiplier


def released(users: dict[str, Fields], target: str | None) -> Tensor:
    """What a run of one round with noise from the system lets out: the change of the model."""
    training = trained_on(users, noise_multiplier=noise_multiplier(), noise_source="system")
    place = None if target is None else int(positions(training.population, [target])[0])
    others = positions(training.population, SAMPLED).tolist()
    sampler = KnownOthers(training.algorithm.sampler, others, place)
    training.algorithm = dataclasses.replace(training.algorithm, sampler=sampler)
    return training.run().state.params - training.problem.model.initial


def membership() -> float:
    """Is the target in the data? Score: the release along the difference of the two sums, recomputed from the seed."""
    here, there = ordinary(), without(ordinary(), TARGET)
    sums = [
        private_sum(trained_on(users, noise_multiplier=noise_multiplier(), noise_source="system"), SAMPLED)
        for users in (here, there)
    ]
    direction = sums[0][:-1] - sums[1][:-1]
    scores = [
        [float(released(users, target).double() @ direction) for _ in range(RUNS)]
        for users, target in ((here, TARGET), (there, None))
    ]
    return area(*scores)


_ALLOWED = math.exp(EPSILON) / (1 + math.exp(EPSILON)) + DELTA

ATTACKS = [
    Attack(
        "1",
        "Random streams of the others",
        f"{COHORT} of {POPULATION} users train a network with dropout, float32. The target stands first and "
        "is not sampled. In the worst case 41 users have 20 examples each. These are laid so that the last "
        f"one pulls one way with the target and the other way without. The membership test has {RUNS} runs "
        f"of one round with the target and {RUNS} without. Noise comes from the system. The attacker knows "
        "the others' draw, and recomputes their updates from the stored seed. By chance the area is off by "
        f"some {math.sqrt(1 / (6 * RUNS)):.2f}.",
        [
            Measure("removed", "user not sampled is removed: ordinary data with dropout, clips", "0", removed),
            Measure("renamed", "user not sampled is renamed: the same, clips", "0", under_another_name),
            Measure("worst", "user not sampled is removed: worst data, clips", "0", worst_case),
            Measure(
                "auc",
                f"area under the ROC curve of a membership test, one round at epsilon {EPSILON}",
                f"at most {_ALLOWED:.2f}",
                membership,
            ),
        ],
    )
]
