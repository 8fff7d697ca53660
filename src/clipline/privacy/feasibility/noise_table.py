"""The noise that a promise asks for, for several cohorts and numbers of rounds at once: where a plan begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from ..calibration import rough_noise_multiplier_for
from ..events import sampling_named
from ..relations import Relation
from .noise_norm import Verdict, most_parameters, noise_norm, update_noise, verdict
from .remedies import Remedies

ROUNDS = (100, 300, 1000, 3000)
_COHORTS = 6
_LARGEST_COHORT = 10_000  # more users than this are rarely trained in one round


@dataclass(frozen=True)
class NoiseCell:
    """One cohort and number of rounds, and the noise that they need. Noise multipliers are a few 10^-4 too large."""

    cohort_size: int
    rounds: int
    noise_multiplier: float  # of the whole round
    delta_noise_multiplier: float  # of the summed updates

    @property
    def most_parameters(self) -> int:
        """How many parameters can be trained with noise on their mean update that is feasible."""
        return math.floor(most_parameters(self.delta_noise_multiplier, self.cohort_size, Verdict.FEASIBLE.most))

    def noise_norm(self, parameters: int) -> float:
        """The norm of the noise on the mean update, in clips."""
        return noise_norm(self.delta_noise_multiplier, self.cohort_size, parameters)


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
        return min(self.cells, key=lambda cell: cell.delta_noise_multiplier / cell.cohort_size)

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
            "parameters": self.parameters,
            "table": [self._cell_json(cell) for cell in self.cells],
            "remedies": None if self.remedies is None else self.remedies.to_json(),
        }

    def _cell_json(self, cell: NoiseCell) -> dict[str, Any]:
        numbers: dict[str, Any] = {
            "cohort_size": cell.cohort_size,
            "rounds": cell.rounds,
            "noise_multiplier": cell.noise_multiplier,
            "delta_noise_multiplier": cell.delta_noise_multiplier,
            "most_parameters": cell.most_parameters,
        }
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


def noise_cells(
    *,
    population_size: int,
    cohorts: Sequence[int],
    rounds: Sequence[int],
    epsilon: float,
    delta: float,
    sampling: str,
    relation: Relation,
    count_stddev: float | None,
) -> tuple[NoiseCell, ...]:
    """The least noise of every cohort and number of rounds within (epsilon, delta)."""
    cells = []
    for cohort_size in cohorts:
        for count in rounds:
            z = rough_noise_multiplier_for(
                sampling=sampling_named(sampling, cohort_size, population_size),
                rounds=count,
                epsilon=epsilon,
                delta=delta,
                relation=relation,
            )
            cells.append(NoiseCell(cohort_size, count, z, update_noise(z, cohort_size, count_stddev)))
    return tuple(cells)
