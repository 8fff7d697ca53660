"""What a task is: data, model, loss and metrics under one name, with settings that work."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from ..data.population import Population
from ..data.task_stores import DataUsed, data_used
from ..engine.core.row_fields import RowFields
from ..engine.workers.torchrun import torchrun_rank
from ..errors import refuse
from ..federated.local_sgd import Loss
from ..random.streams import Streams
from ..training.evaluation import EvaluateModel
from ..training.options import Compute
from ..training.training import Training
from .train_settings import TrainSettings


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """A task with its data in place."""

    population: Population
    make: Callable[[int], nn.Module]  # a new model with the initial parameters of this seed
    loss: Loss
    evaluate: EvaluateModel  # on users outside the population
    reduction: str = "mean"  # of a loss that gives one number for each example
    row_fields: RowFields = field(default_factory=dict)  # parameters of which a user touches few rows
    personal: Sequence[str] = ()  # parameters that stay with their user
    metric_name: str | None = None  # the main one, where the task itself does not know it
    baseline: float | None = None  # of that metric without a model, on the same users: of the most common label, say

    def __post_init__(self) -> None:
        if self.population.user_ids is None:  # users drawn by rule: the number of a user is the user's id
            ids = np.arange(len(self.population))
            object.__setattr__(self, "population", replace(self.population, user_ids=ids))


@dataclass(frozen=True, eq=False)
class Task:
    """A task by name. `load` draws or opens the data that the settings ask for."""

    name: str
    title: str
    metric_name: str
    settings: TrainSettings
    load: Callable[[TrainSettings], LoadedTask]
    data: str = "embedded"  # "stand-in" where generated users take the place of the original ones
    describe: Callable[[TrainSettings], DataUsed] | None = None  # what there is to train on, of a task of one's own
    better: Mapping[str, str] = field(default_factory=dict)  # metric -> "lower" or "higher", where its name misleads
    code: str | None = None  # checksum of the file that defines it: a run goes on only with the same model and loss

    def data_used(self, settings: TrainSettings) -> DataUsed:
        """What these settings train and measure on, in words; a store that cannot be used is refused."""
        if self.describe is not None:
            return self.describe(settings)
        title = self.title if settings.stored else self.title.format(users=f"{settings.drawn_users():,}")
        return data_used(self.name, self.data, title, settings.data)

    def training(self, settings: TrainSettings, loaded: LoadedTask | None = None) -> Training:
        """Everything checked and ready to run, on data that are loaded already if given."""
        compute = _compute(settings)
        compute.check_device()
        loaded = self.load(settings) if loaded is None else loaded
        model = loaded.make(settings.seed)
        return Training(
            model,
            loaded.loss,
            loaded.population,
            rounds=settings.rounds,
            cohort_size=settings.cohort_size,
            local=settings.local(loaded.reduction),
            clip=settings.controller(),
            noise=settings.correlation(),
            server=settings.server_optimiser(),
            average=None if settings.average is None else settings.average == "on",
            privacy=settings.privacy(),
            compute=replace(compute, row_fields=loaded.row_fields),
            seed=settings.seed,
            personal=loaded.personal,
        )


def _compute(settings: TrainSettings) -> Compute:
    """As set; under torchrun its own processes are the workers."""
    compute = settings.compute()
    if torchrun_rank() is None:
        return compute
    if settings.workers not in (None, 1, "torchrun"):
        raise refuse("workers", settings.workers, "left out under torchrun", "choose by --nproc-per-node")
    return replace(compute, workers="torchrun")


def initialised(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A new model with the initial parameters of this seed; torch's own generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Streams(seed).initial())
        return make()
