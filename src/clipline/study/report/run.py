"""What the report knows of one run, wherever it was read from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...tasks import main_metric_of
from ...training.diagnosis import BestAndLast

# Columns that are not metrics. Others that start with `unprivate_` are not either.
RELEASED = ("clip", "fraction_within", "epsilon", "delta")
UNPRIVATE = "unprivate_"


@dataclass(frozen=True)
class Promise:
    """The guarantee of a run as far as it is known: `epsilon` is None where nothing is promised."""

    words: str
    epsilon: float | None
    delta: float | None
    relation: str | None
    sampling: str | None
    accountant: str | None
    rounds: int | None


@dataclass(frozen=True)
class ReportedRun:
    """One run: its rounds as columns, its settings, its promise and where it ran. Values are plain."""

    name: str
    path: str
    of_study: bool  # a record of a study, or else a run directory
    state: str  # "finished", "budget", "early", "interrupted", "diverged" or "not ended"
    round: Sequence[int] = ()  # rounds done, from 1 on
    columns: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # of the same length
    final: Mapping[str, float | None] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)  # flat
    resolved: Mapping[str, Any] = field(default_factory=dict)  # what followed from the settings
    about: Mapping[str, Any] = field(default_factory=dict)  # task, data, whom the metrics are about
    circumstances: Mapping[str, Any] = field(default_factory=dict)
    promise: Promise | None = None
    planned: str | None = None  # the guarantee of all rounds asked for, in words
    noise_multiplier: float | None = None  # of a whole round
    problems: Sequence[str] = ()  # what could not be read
    findings: Sequence[str] = ()  # why the training failed, if it did
    best: BestAndLast | None = None  # of the main metric

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics that were measured, the task's own first: as the run says, or as the paper has it."""
        names = [name for name in self.columns if name not in RELEASED and not name.startswith(UNPRIVATE)]
        main = self.about.get("metric") or self.resolved.get("metric") or main_metric_of(self.task)
        return sorted(names, key=lambda name: name != main)  # the others stay in order

    @property
    def planned_rounds(self) -> int | None:
        """How many rounds were asked for."""
        rounds = self.setting("rounds")
        return rounds if isinstance(rounds, int) else None

    @property
    def task(self) -> str:
        """The name of the task, or nothing."""
        return str(self.about.get("task") or self.settings.get("task") or "")

    def setting(self, name: str) -> Any:
        """A setting by the name it has on the command line, also where the run was made by the library."""
        for known in (name, *_LIBRARY.get(name, ())):
            if self.settings.get(known) is not None:
                return self.settings[known]
        return None

    @property
    def clip(self) -> str:
        """How updates were clipped, in a few words."""
        kind = self.setting("clip")
        if self.unclipped:
            return "none"
        if kind in ("quantile", "QuantileClip"):
            return f"quantile {_number(self.target)}"
        if kind in ("fixed", "FixedClip"):
            return f"fixed {_number(self.setting('fixed_clip'))}"
        return f"fixed {_number(kind)}" if isinstance(kind, int | float) else str(kind or "unknown")

    @property
    def target(self) -> float | None:
        """The fraction of users that the clip aims to have within; None for a clip that does not adapt."""
        adapts = self.setting("clip") in ("quantile", "QuantileClip")
        return finite(self.setting("quantile")) if adapts else None

    @property
    def unclipped(self) -> bool:
        """Whether updates of any norm were taken as they are."""
        kind = self.setting("clip")
        endless = self.setting("fixed_clip") == float("inf") and kind in ("fixed", "FixedClip")
        return kind in ("none", float("inf")) or endless


# Names in a settings file that `RunDirectory` wrote itself: the attributes of the objects.
_LIBRARY = {
    "clip": ("clip.type",),
    "quantile": ("clip.quantile",),
    "fixed_clip": ("clip.clip", "clip.value"),
    "noise_source": ("privacy.noise_source",),
    "population_size": ("privacy.population_size",),
    "sampling": ("privacy.sampling",),
    "count_stddev": ("privacy.count_stddev",),
    "relation": ("privacy.relation",),
    "delta": ("privacy.delta",),
}


def finite(value: object) -> float | None:
    """A number, or None for what is none or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _number(value: Any) -> str:
    number = finite(value)
    return "?" if number is None else f"{number:g}"
