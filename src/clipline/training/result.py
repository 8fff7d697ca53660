"""What a training gives: the model, the guarantee, and what was reported on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee
from .reports import RoundReport

Stopped = Literal["finished", "budget", "interrupted"]


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and the guarantee that covers everything seen on the way.

    It holds neither the data nor the loss. `torch.save` and pickle store it if they can store the model itself.
    """

    model: nn.Module = field(repr=False)
    state: TrainState = field(repr=False)
    guarantee: Guarantee
    metrics: Mapping[str, float]  # of the final model
    reports: tuple[RoundReport, ...] = field(repr=False)
    stopped: Stopped

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        return f"{metrics + '; ' if metrics else ''}{self.guarantee}"
