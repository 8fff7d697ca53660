"""What every trainer shares: the working model, the loss, the users' examples and how to train on them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...data.population import Population
from ...errors import ModuleError, check_choice
from ...federated.backend import PersonalRows
from ...federated.local_sgd import Batch, LocalTraining, Loss, OnError, Reference, per_example, takes_reference
from ...lr_schedules import tabulated
from ...random.streams import Streams
from ..isolation.generators import preserve_generators, preserve_torch_generators
from ..isolation.guard import Isolation
from ..isolation.made_up_data import check_trial_batch
from .batches import Examples
from .fast_parts import FastParts
from .notices import Notices
from .precision import Precision, kernels_switched, precision_context
from .row_fields import RowFields, check_row_fields
from .working_model import WorkingModel


class SlowEngineWarning(UserWarning):
    """Users train in a slower way than usual on this device."""


@dataclass(frozen=True)
class LocalRun:
    """What may differ between runs that train side by side: the random streams and the users' learning rate."""

    streams: Streams
    lr: float
    schedule: Callable[[int], float] | None = None  # round -> rate, where it is not always `lr`

    def rate(self, round_index: int) -> float:
        """The users' learning rate in this round."""
        return self.lr if self.schedule is None else self.schedule(round_index)


class Problem:
    """A model, a loss `loss(model, batch)` and a population, on a device; `batch` maps field names to tensors.

    A loss whose third argument is called `reference` is given the round's parameters, see `Reference`.

    The caller's model is copied. `on_error` says what happens to a user whose training fails: "zero" (adds nothing and
    is not within the clip) or "raise", for study only, as an error reveals something about that user. `trial_batch` is
    used for trials instead of made-up examples.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        local: LocalTraining,
        streams: Streams,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
        row_fields: RowFields | None = None,
        on_error: OnError = "zero",
        trial_batch: Mapping[str, Any] | None = None,
        fast: FastParts | None = None,
        rounds: int = 1,
        personal: Sequence[str] = (),
        make_stackable: Callable[[nn.Module], str] | None = None,
    ) -> None:
        """`rounds` of the whole training, for schedules of the learning rate; the last two: see `WorkingModel`."""
        self.fast = FastParts() if fast is None else fast
        self.model = WorkingModel(model, device, personal, make_stackable)
        self.loss = loss
        # Asked while users train, a function that counts its calls would make one user's rate depend on others.
        local = replace(local, lr_schedule=tabulated(local.lr_schedule, rounds))
        self.local, self.rounds = local, rounds
        schedule = None if local.lr_schedule is None else partial(local.rate, rounds=rounds)
        self.runs: Sequence[LocalRun] = (LocalRun(streams, local.lr, schedule),)
        self.takes_reference = takes_reference(loss)
        self.device = torch.device(device)
        self.precision = precision
        self.on_error = check_choice("on_error", on_error, ("zero", "raise"))
        self.row_fields = dict(row_fields or {})
        check_row_fields(self.row_fields, self.model, population)
        if self.row_fields and local.weight_decay:
            raise ModuleError(
                f"weight_decay={local.weight_decay} must be 0 where row_fields name parameters of which a user trains "
                "few rows, as it shrinks all rows: drop it, or drop row_fields"
            )
        self.examples = Examples(population, self.device, self.model.vector.dtype)
        self.isolation = Isolation(
            self.model.module, loss, self.model.trainable, self.model.shared, list(self.model.random_layers.values())
        )
        self.notices = Notices()  # who is told that training waits for a compiler
        self.draws_globally = False  # whether the model was seen to draw from torch's global generator
        fields = population.fields
        self.trial_batch: Mapping[str, NDArray[Any]] | None = (
            None if trial_batch is None else check_trial_batch(trial_batch, fields)
        )

    @property
    def population(self) -> Population:
        """The population whose users train."""
        return self.examples.population

    def losses(self, module: nn.Module, batch: Batch, reference: Reference | None) -> Tensor:
        """What the loss gives for this batch. `reference` counts only if `takes_reference`."""
        return self.loss(module, batch, reference) if self.takes_reference else self.loss(module, batch)

    def reduced(self, losses: Tensor, count: int) -> Tensor:
        """The loss of a batch of `count` examples as one number; refused if it has another form."""
        return self.local.reduced(losses) if per_example(losses, count) else losses

    def personal_rows(self, personal: PersonalRows | None, chosen: NDArray[np.int64]) -> Tensor:
        """(users, personal): what these users' personal parameters start from, a copy on the device."""
        if personal is None:
            return self.model.initial_personal.repeat(len(chosen), 1)
        return personal.start(chosen).to(self.model.initial_personal)

    def steps_of(self, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many local steps each of these users takes."""
        return self.local.steps_of(self.population, users)

    def side_by_side(self, others: Sequence[Problem]) -> Problem:
        """The same problem for all the runs of `others`, in their order."""
        shared = copy.copy(self)
        shared.runs = [run for other in others for run in other.runs]
        shared.rounds = max(other.rounds for other in others)
        shared.notices = Notices([other.notices for other in others])
        return shared

    @contextmanager
    def arithmetic(self, precision: Precision | None = None) -> Iterator[None]:
        """Within, torch computes in the set precision, or this one, and by our kernels unless they are switched off."""
        with precision_context(precision or self.precision, self.device), kernels_switched(self.fast.kernels):
            yield

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
            self.arithmetic(),
            torch.enable_grad(),
        ):
            yield generator


@dataclass(frozen=True, eq=False)
class UserSteps:
    """What one user trains on."""

    params: Tensor
    examples: Batch
    batches: Sequence[Tensor]  # of each step: which of the user's examples
    random_keys: Tensor
    lr: float
    personal: Tensor  # (personal,): what the user starts from, and what came of it
