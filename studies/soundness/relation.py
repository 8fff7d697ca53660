"""Row 4: a sampling rate that moves with the number of users."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from attack import Attack, Fields, Measure, Value, training_of
from numpy.typing import NDArray
from scipy.stats import binom, norm
from torch import Tensor, nn

from clipline import LocalSGD, Training

DELTA = 1e-5
NOISE = {100: 3.0, 40_000: 1.0}
COHORT = {100: 95, 40_000: 300}


class Number(nn.Module):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1))


def pull(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,) losses, by whose sign a user pulls."""
    losses: Tensor = model.place * batch["x"]
    return losses


def of_users(count: int, size: int, **changes: Any) -> Training:
    """A training of `count` users at the noise and cohort meant for `size`."""
    users: dict[str, Fields] = {f"u{number:05}": {"x": np.ones(1, np.float32)} for number in range(count)}
    given = {"cohort_size": COHORT[size], "noise_multiplier": NOISE[size], "delta": DELTA, **changes}
    return training_of(Number(), pull, users, LocalSGD(1.0), engine="one-by-one", **given)


@cache
def true_delta(size: int, declared: bool = False) -> float:
    """At the promised epsilon, the largest found among populations in which all others pull one way, or not at all.

    The neighbour is what the printed relation says: one user less, with the rate that its own training would have; or
    as many users, one of them silent.
    """
    known = {"population_size": size} if declared else {}
    training = of_users(size, size, **known)
    rate = training.algorithm.sampler.sampling.rate
    other = rate
    if str(training.relation) == "add-or-remove":
        other = of_users(size - 1, size, **known).algorithm.sampler.sampling.rate
    factor, worst = math.exp(training.planned.epsilon), 0.0
    for others in (0, size - 1):
        grid, step = _grid(others, rate, NOISE[size])
        there = _mixture(grid, others, other, [(1.0, 0.0)], NOISE[size])
        for pulls in (1.0, -1.0):
            here = _mixture(grid, others, rate, [(1 - rate, 0.0), (rate, pulls)], NOISE[size])
            for one, two in ((here, there), (there, here)):
                worst = max(worst, float(np.maximum(one - factor * two, 0.0).sum() * step))
    return worst


def _grid(others: int, rate: float, stddev: float) -> tuple[NDArray[np.float64], float]:
    """Sums, in clips, outside which nothing worth 1e-12 lies."""
    spread = 10 * (math.sqrt(others * rate) + stddev)
    grid = np.linspace(others * rate - spread, others * rate + spread, 20_001)
    return grid, float(grid[1] - grid[0])


def _mixture(
    grid: NDArray[np.float64], others: int, rate: float, target: list[tuple[float, float]], stddev: float
) -> NDArray[np.float64]:
    """The density of a release: how many of the others came, the target's part, and noise."""
    density = np.zeros_like(grid)
    for count in np.flatnonzero(binom.pmf(np.arange(others + 1), others, rate) > 1e-18):
        for chance, pulls in target:
            density += binom.pmf(count, others, rate) * chance * norm.pdf(grid, count + pulls, stddev)
    return density


def declared_delta() -> Value:
    """The same where the number of users is declared."""
    return true_delta(100, declared=True)


def everybody() -> Value:
    """A cohort of everybody, and what becomes of it when one user is gone."""
    of_users(100, 100, cohort_size=100, population_size=100)
    of_users(99, 100, cohort_size=100, population_size=100)
    return "trains"


ATTACKS = [
    Attack(
        "4",
        "A rate that moves with the number of users",
        "One round. All others pull one way by a clip, or not at all, and the target pulls with them or "
        "against them. The release is a mixture of normals over how many of the others came. Delta is "
        "integrated at the epsilon that the training promises, with the neighbour that its printed relation"
        " names.",
        [
            Measure("relation", "printed relation, 100 users, cohort 95", "", lambda: str(of_users(100, 100).relation)),
            Measure("delta", "true delta, z = 3", f"at most {DELTA:g}", lambda: true_delta(100)),
            Measure("declared", "the same with declared population_size", f"at most {DELTA:g}", declared_delta),
            Measure(
                "large", "true delta, 40,000 users, cohort 300, z = 1", f"at most {DELTA:g}", lambda: true_delta(40_000)
            ),
            Measure("everybody", "cohort of all 100 users, for 99 users", "trains", everybody),
        ],
    )
]
