"""The best released model of a run so far, by a metric on users outside the training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from ..errors import SettingError, nearest
from ..federated.round import TrainState
from .callbacks import Callback
from .reports import Metrics, RoundReport


@dataclass(frozen=True, eq=False)
class Kept:
    """A copy of released parameters, with their metrics and after how many rounds they were released."""

    params: Tensor
    metrics: Metrics
    rounds: int


def check_measured(metric: str, asked: str, measuring: Sequence[Callback]) -> None:
    """Refuse a metric that nothing measures, where all names are known; `asked` is the setting that names it."""
    names = [getattr(one, "names", None) for one in measuring]
    known = [name for some in names if some is not None for name in some]
    if None in names or metric in known:
        return
    limit, way_out = "nothing is", "add Evaluate(test, metric) to the callbacks"
    if known:
        limit, way_out = f"those are {', '.join(known)}", nearest(metric, known)
    raise SettingError(f"{asked} must be one that is measured, and {limit}: {way_out}")


class Best:
    """Compares measurements one after the other; `kept` has the best one's parameters if `keeps`."""

    def __init__(self, metric: str, mode: Literal["min", "max"], *, min_delta: float = 0.0, keeps: bool = True) -> None:
        self.metric, self.mode, self.min_delta, self.keeps = metric, mode, min_delta, keeps
        self.value: float | None = None
        self.round_index: int | None = None  # as reports count them, from 0
        self.kept: Kept | None = None

    def take(self, report: RoundReport, state: TrainState) -> bool:
        """Whether this measurement is better than the best so far by more than `min_delta`; NaN never is."""
        value, sign = report.metrics[self.metric], 1 if self.mode == "max" else -1
        gain = 0.0 if self.value is None else (value - self.value) * sign
        if not ((self.value is None and value == value) or gain > self.min_delta):
            return False
        self.value, self.round_index = value, report.round_index
        if self.keeps:  # a few vectors of this length are there anyway
            self.kept = Kept(state.params.clone(), report.metrics, state.round_index)
        return True
