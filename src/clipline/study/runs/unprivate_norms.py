"""The true quantiles of update norms, for study: without noise, and so outside every guarantee."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...federated.backend import CohortRequest, LocalTrainer
from ...federated.clipping import UserUpdates
from .record import QUANTILES


class UnprivateNorms:
    """A trainer that hands on what `trainer` gives, and writes down quantiles of the norms of the updates.

    `of_run(number)` has a row of quantiles for each round of a run; see `unprivate_quantiles_of` for what they are.
    """

    def __init__(self, trainer: LocalTrainer) -> None:
        self._trainer = trainer
        self._rounds: dict[int, dict[int, list[float | None]]] = {}  # run -> round -> quantiles

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[UserUpdates, NDArray[np.int64]]]:
        """The blocks of the trainer, unchanged."""
        norms: list[list[NDArray[np.float64]]] = [[] for _ in requests]
        for updates, owners in self._trainer.train(requests):
            values = _numbers(updates.norms())
            for index in np.unique(owners):
                norms[index].append(values[owners == index])
            yield updates, owners
        for request, blocks in zip(requests, norms, strict=True):
            of_round = unprivate_quantiles_of(np.concatenate(blocks) if blocks else np.empty(0))
            self._rounds.setdefault(request.run, {})[request.round_index] = of_round

    def of_run(self, number: int) -> dict[int, list[float | None]]:
        """The quantiles of each round of this run: round -> one number for each of `QUANTILES`."""
        return self._rounds.get(number, {})


def unprivate_quantiles_of(norms: NDArray[np.float64]) -> list[float | None]:
    """For each of `QUANTILES` the smallest norm that at least this share of the norms do not exceed.

    A norm that is not finite counts as infinite. None where nobody came, and in the place of infinity.
    """
    if not len(norms):
        return [None] * len(QUANTILES)
    finite = np.nan_to_num(norms, nan=math.inf, posinf=math.inf)
    values = np.quantile(finite, QUANTILES, method="inverted_cdf")
    return [float(value) if math.isfinite(value) else None for value in values]


def _numbers(norms: Tensor) -> NDArray[np.float64]:
    values: NDArray[np.float64] = norms.detach().to("cpu", torch.float64).numpy()
    return values.copy()
