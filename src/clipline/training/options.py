"""What decides the promise (`Privacy`) and what decides only the time (`Compute`), told apart."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..engine.choose import ENGINES, Engine
from ..engine.fast_parts import FastParts
from ..engine.parallel.choose import Workers
from ..engine.precision import PRECISIONS, Precision
from ..engine.sparse.row_fields import RowFields
from ..errors import SettingError, check_choice, check_number
from ..privacy.relations import Relation
from ..streams import NoiseSource


@dataclass(frozen=True)
class Privacy:
    """The promise. Give either `epsilon`, which chooses the noise, or `noise_multiplier` (0: no noise, not private).

    `delta` is population_size^-1.1 unless given. `population_size` declares how many users there are, a public constant
    that is not read from the data: the relation is then add-or-remove. Left out, the number of users at hand is public
    and the relation is zero-out, with the same epsilon. `sampling` is "poisson" or "fixed"; a fixed-size cohort makes
    the number of users public too, and its relation is replace-one. `count_stddev` is the noise on the count of users
    within the clip, in users: cohort_size / 20 unless given. Training stops before the round that would pass
    `max_epsilon`. Noise comes from the `seed`, or from the operating system (`noise_source="system"`), which nobody can
    draw again.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    population_size: int | None = None
    sampling: str = "poisson"
    relation: Relation | None = None
    count_stddev: float | None = None
    max_epsilon: float | None = None
    noise_source: NoiseSource = "seed"

    def __post_init__(self) -> None:
        if self.epsilon is None and self.noise_multiplier is None:
            raise SettingError(
                "epsilon=None and noise_multiplier=None, but one of them must be set: give epsilon=4.0, say, or "
                "noise_multiplier=0 to train without privacy"
            )
        if self.epsilon is not None and self.noise_multiplier is not None:
            raise SettingError(
                f"epsilon={self.epsilon!r} and noise_multiplier={self.noise_multiplier!r} are both set but one follows "
                "from the other: drop one of them, or give the limit as max_epsilon"
            )
        for name in ("epsilon", "max_epsilon"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, way_out="give 4.0, say, or leave it out")
        if self.noise_multiplier is not None:
            check_number("noise_multiplier", self.noise_multiplier, at_least=0, way_out="0 is no noise and no privacy")
        if self.delta is not None:
            check_number("delta", self.delta, above=0, below=1, way_out="population_size^-1.1 is the usual choice")
        check_choice("sampling", self.sampling, ("poisson", "fixed"))
        check_choice("noise_source", self.noise_source, ("seed", "system"))


@dataclass(frozen=True)
class Compute:
    """How a cohort is trained. Nothing here changes the guarantee; results change by rounding alone.

    `device` is where users train. `engine` is "one-by-one", "stacked" (many users as one program) or "auto".
    `precision` is that of the training, "float32", "tf32" or "bf16"; sums and noise are float64. `workers` processes of
    this machine share each cohort; "torchrun": those that torchrun started. `row_fields` names parameters of which a
    user's data touch few rows, see docs/engine.md. `fast` switches single fast parts on and off.
    """

    device: torch.device | str = "cpu"
    engine: Engine = "auto"
    precision: Precision = "float32"
    workers: Workers = 1
    row_fields: RowFields = field(default_factory=dict)
    fast: FastParts = field(default_factory=FastParts)

    def __post_init__(self) -> None:
        check_choice("engine", self.engine, ENGINES)
        check_choice("precision", self.precision, PRECISIONS)
