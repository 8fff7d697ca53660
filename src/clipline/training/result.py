"""What a training gives: the model, the guarantee, and what was reported on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee
from .diagnosis import BestAndLast, Finding
from .reports import RoundReport, history

Stopped = Literal["finished", "budget", "early", "interrupted"]


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and the guarantee that covers everything seen on the way.

    It holds neither the data nor the loss. `torch.save` and pickle store it if they can store the model itself.

    `findings` says what went wrong, a sentence each with what to do; a training that looks well has none. `best` has
    the main metric's best and last values. `model_rounds` tells after how many rounds `model` was released: all that
    were run, unless the best model was asked for. `state` is always that of the last round.
    """

    model: nn.Module = field(repr=False)
    state: TrainState = field(repr=False)
    guarantee: Guarantee
    metrics: Mapping[str, float]  # of `model`
    reports: tuple[RoundReport, ...] = field(repr=False)
    stopped: Stopped
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)  # see `about_training`
    findings: tuple[Finding, ...] = ()
    best: BestAndLast | None = None
    model_rounds: int = 0

    def save(self, path: str | Path) -> Path:
        """Write the model, its guarantee and its settings into a new or empty folder, for `clipline.load`.

        model.safetensors has everything; card.md is the same to read and card.json for programs. All of it is
        released: the seed, the data and the times of rounds are not in it. Nothing is pickled. Adapters of PEFT are
        also written in PEFT's own format.
        """
        from .storage.model_card import save_result

        return save_result(self, Path(path))

    def history(self, *, unprivate_timing: bool = False) -> dict[str, list[Any]]:
        """The rounds of this call as columns by name, as in metrics.jsonl: `pandas.DataFrame(result.history())`.

        Where a round has no number there is None: a metric that was not measured, and of 200 rounds or more the epsilon
        and delta of those between every hundredth part of them. How long rounds took is left out unless
        `unprivate_timing`.
        """
        return history(self.reports, unprivate_timing)

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        said = "".join(f"\nwarning: {finding}" for finding in self.findings)
        return f"{metrics + '; ' if metrics else ''}{self.guarantee}{said}"
