"""What every trainer shares: the working model, the loss, the users' examples and how to train on them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..errors import check_choice
from ..federated.local_sgd import LocalSGD, Loss, OnError
from ..federated.population import Population
from ..streams import Streams
from .batches import Examples
from .fast_parts import FastParts
from .isolation.generators import preserve_generators, preserve_torch_generators
from .isolation.guard import Isolation
from .isolation.made_up_data import check_trial_batch
from .precision import Precision, precision_context
from .sparse.row_fields import RowFields, check_row_fields
from .working_model import WorkingModel


@dataclass(frozen=True)
class LocalRun:
    """What may differ between runs that train side by side: the random streams and the users' learning rate."""

    streams: Streams
    lr: float


class Problem:
    """A model, a loss `loss(model, batch)` and a population, on a device; `batch` maps field names to tensors.

    The caller's model is copied. `on_error` says what happens to a user whose training fails: "zero" (adds nothing and
    is not within the clip) or "raise", for study only, as an error reveals something about that user. `trial_batch` is
    used for trials instead of made-up examples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        local: LocalSGD,
        streams: Streams,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
        row_fields: RowFields | None = None,
        on_error: OnError = "zero",
        trial_batch: Mapping[str, Any] | None = None,
        fast: FastParts | None = None,
    ) -> None:
        self.fast = FastParts() if fast is None else fast
        self.model = WorkingModel(model, device)
        self.loss = loss
        self.local = local
        self.runs: Sequence[LocalRun] = (LocalRun(streams, local.lr),)
        self.device = torch.device(device)
        self.precision = precision
        self.on_error = check_choice("on_error", on_error, ("zero", "raise"))
        self.row_fields = dict(row_fields or {})
        check_row_fields(self.row_fields, self.model, population)
        self.examples = Examples(population, self.device, self.model.vector.dtype)
        self.isolation = Isolation(self.model.module, loss, self.model.trainable, self.model.shared)
        self.draws_globally = False  # whether the model was seen to draw from torch's global generator
        fields = population.fields
        self.trial_batch: Mapping[str, NDArray[Any]] | None = (
            None if trial_batch is None else check_trial_batch(trial_batch, fields)
        )

    @property
    def population(self) -> Population:
        """The population whose users train."""
        return self.examples.population

    def steps_of(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many local steps each of these users takes."""
        return self.local.steps_of(self.population, users)

    def side_by_side(self, others: Sequence[Problem]) -> Problem:
        """The same problem for all the runs of `others`, in their order."""
        shared = copy.copy(self)
        shared.runs = [run for other in others for run in other.runs]
        return shared

    @contextmanager
    def users_apart(self) -> Iterator[torch.Generator]:
        """Within, users may train in the set precision; on leaving, the caller's random generators are restored.

        Gives torch's global generator of the device, to be seeded for every user.
        """
        self.model.module.train()
        self.isolation.before_block()
        with (
            preserve_generators(),
            preserve_torch_generators(self.device) as generator,
            precision_context(self.precision, self.device),
            torch.enable_grad(),
        ):
            yield generator
