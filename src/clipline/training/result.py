"""What a training gives: a report of each round, and at its end the model, the guarantee and the findings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..federated.round import TrainState
from ..privacy.guarantee import Guarantee
from .diagnosis import BestAndLast, Finding
from .run_files import finite_or_none

Metrics = Mapping[str, float]
Stopped = Literal["finished", "budget", "early", "interrupted"]


@dataclass(frozen=True, eq=False)
class RoundReport:
    """What one round released, and what was measured after it. Callbacks are given it."""

    round_index: int
    clip: float  # that clipped in this round
    fraction_within: float | None  # noisy
    metrics: Metrics  # empty where this round was not evaluated
    unprivate_seconds: float  # how long the round took, which depends on which users were drawn
    account_now: Callable[[], Guarantee] = field(repr=False)
    accounted: bool = True  # beside training; see `GuaranteesAhead` in loop.py

    @cached_property
    def guarantee(self) -> Guarantee:
        """Of all rounds so far. Where it was not `accounted` it is now, which may take longer than a round."""
        return self.account_now()


def round_json(report: RoundReport, unprivate_timing: bool = False) -> dict[str, Any]:
    """One round as a line of metrics.jsonl; epsilon is null where there is no guarantee, and left out if not accounted.

    How long the round took is left out unless asked for: it tells whether a user with much data took part.
    """
    seconds = {"unprivate_seconds": round(report.unprivate_seconds, 6)} if unprivate_timing else {}
    guarantee = report.guarantee if report.accounted else None
    spent = {} if guarantee is None else {"epsilon": finite_or_none(guarantee.epsilon), "delta": guarantee.delta}
    numbers = round_numbers(report)
    first = {name: numbers.pop(name) for name in ("round", "clip", "fraction_within")}
    return {**first, **spent, **seconds, **numbers}


def round_numbers(report: RoundReport) -> dict[str, Any]:
    """The same without a guarantee, which need not be accounted for this: what tells how a training goes."""
    return {
        "round": report.round_index,
        "clip": finite_or_none(report.clip),
        "fraction_within": report.fraction_within,
        **{name: finite_or_none(value) for name, value in report.metrics.items()},
    }


@dataclass(frozen=True, eq=False)
class TrainResult:
    """A trained model and the guarantee that covers everything released on the way. `Training.run` returns it.

    It holds neither the data nor the loss. `torch.save` and pickle store it if they can store the model itself.

    Args:
      model: The trained module: the last one, the best one if that was asked for, or the average of the released
        models.
      state: What came of the last round.
      guarantee: What is promised.
      metrics: Those of `model`. Names such as `last/accuracy` are of the last model.
      reports: What each round released.
      stopped: Why the run ended: "finished", "budget", "interrupted" or "early".
      about: Facts that are stored with the model.
      findings: What went wrong, a sentence each with what to do. A training that looks well has none.
      best: The main metric's best and last values.
      model_rounds: After how many rounds `model` was released.
      released_names: Names of the parameters that were released.

    Example:
      >>> result = training.run()
      >>> print(result.guarantee, result.metrics)
      >>> result.save("models/rides")
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
    released_names: tuple[str, ...] = field(default=(), repr=False)  # of the parameters in `state`, in order

    @cached_property
    def last(self) -> nn.Module:
        """The model of the last round, without an average."""
        return self._with(self.state.params)

    @cached_property
    def averaged(self) -> nn.Module | None:
        """The exponential average of the models of all rounds; None where it was not kept."""
        return self._with(self.state.returned) if self.has_average else None

    @property
    def has_average(self) -> bool:
        """Whether the training averaged its models."""
        return self.state.returned is not self.state.params

    @property
    def saved(self) -> str:
        """Which of the released models `model` is, in words."""
        if not self.has_average:
            return f"the model released after {self.model_rounds} rounds"
        return f"the exponential average (0.9) of the models released in {self.model_rounds} rounds"

    def _with(self, params: Tensor) -> nn.Module:
        """A copy of `model` with these parameters."""
        module = copy.deepcopy(self.model)
        named = dict(module.named_parameters())
        pieces = torch.split(params.cpu(), [named[name].numel() for name in self.released_names])
        for name, piece in zip(self.released_names, pieces, strict=True):
            named[name].data.copy_(piece.view_as(named[name]))
        return module

    def predict(
        self, data: Any, predict: Any = None, *, classes: str | Sequence[str] | None = None, **options: Any
    ) -> Any:
        """What `model` says of each example, in eval mode, as the saved model does.

        Args:
          data: A dataframe, a table file, a `Population`, a mapping from fields to arrays, or a single array.
          predict: `predict(model, batch)` makes the predictions of a batch. Left out, the model is called with the
            fields that its `forward` names, or with the only field.
          classes: Names of the model's outputs in order, or the field that is predicted.
          **options: `text`, `keep` and `batch_size`, as `predict` of a model from `clipline.load` takes them.

        Returns:
          An array (examples, ...), or several by name.

        Raises:
          PopulationError: If a column is missing or cannot become its field.

        Example:
          >>> result.predict({"x": images})
        """
        from .model_card import card_of

        saved = import_module("clipline.serve.load").SavedModel
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            loaded = saved(self.model, self.guarantee, self.metrics, card_of(self), predict, classes)
            return loaded.predict(data, **options)
        finally:
            for module, mode in modes.items():
                module.training = mode

    def save(self, path: str | Path, *, frozen: bool = True) -> Path:
        """Write the model, its guarantee and its settings into a folder, for `clipline.load`.

        model.safetensors has everything; card.md is the same to read and card.json for programs. All of it is released:
        the seed, the data and the times of rounds are not in it. Nothing is pickled. Adapters of PEFT are also written
        in PEFT's own format.

        Args:
          path: A new or empty folder. If it is in use, the model goes into a free one beside it, such as `rides-2`,
            with a warning.
          frozen: False leaves out the parameters that did not train, such as the base under adapters. `clipline.load`
            then takes them from the `model=` that it is given, which must have the same.

        Returns:
          The folder that was written.
        """
        from .model_card import save_result

        return save_result(self, Path(path), frozen=frozen)

    def history(self, *, unprivate_timing: bool = False) -> dict[str, list[Any]]:
        """The rounds of this call as columns by name, as in metrics.jsonl.

        Where a round has no number there is None: a metric that was not measured, or an epsilon that was not accounted.
        Of 200 rounds or more, about a hundred have an epsilon.

        Args:
          unprivate_timing: Add how long rounds took, which the guarantee does not cover.

        Returns:
          A list for each column: `pandas.DataFrame(result.history())`.
        """
        rows = [round_json(report, unprivate_timing) for report in self.reports]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def __str__(self) -> str:
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items())
        said = "".join(f"\nwarning: {finding}" for finding in self.findings)
        model = f"; saved: {self.saved}" if self.has_average else ""
        return f"{metrics + '; ' if metrics else ''}{self.guarantee}{model}{said}"
