"""What a task is: data, model, loss and metrics under one name, with settings that work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from ..engine.choose import SMALL_MODEL
from ..engine.parallel.choose import Workers
from ..engine.parallel.forked import usable_cores
from ..engine.parallel.torchrun import torchrun_rank
from ..engine.sparse.row_fields import RowFields
from ..errors import SettingError, refuse
from ..federated.local_sgd import LocalSGD, Loss
from ..federated.population import Population
from ..federated.server_optimisers import ServerAdam, ServerOptimiser, ServerSGD, ServerYogi
from ..training.evaluation import EvaluateModel
from ..training.options import Compute, Privacy
from ..training.training import Training
from .settings import TrainSettings


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """A task with its data in place."""

    population: Population
    make: Callable[[int], nn.Module]  # a new model with the initial parameters of this seed
    loss: Loss
    evaluate: EvaluateModel  # on users outside the population
    reduction: str = "mean"  # of a loss that gives one number for each example
    row_fields: RowFields = field(default_factory=dict)  # parameters of which a user touches few rows

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

    def training(self, settings: TrainSettings, loaded: LoadedTask | None = None) -> Training:
        """Everything checked and ready to run, on data that are loaded already if given."""
        check_device(settings.device)
        loaded = self.load(settings) if loaded is None else loaded
        model = loaded.make(settings.seed)
        noise_source: Any = settings.noise_source
        engine: Any = settings.engine
        precision: Any = settings.precision
        device = chosen_device(settings.device, sum(p.numel() for p in model.parameters()))
        return Training(
            model,
            loaded.loss,
            loaded.population,
            rounds=settings.rounds,
            cohort_size=settings.cohort,
            local=LocalSGD(
                settings.client_lr,
                settings.batch_size,
                settings.client_epochs,
                settings.max_examples,
                loaded.reduction,
            ),
            clip=settings.controller(),
            server=_server(settings),
            privacy=Privacy(
                epsilon=settings.epsilon,
                noise_multiplier=settings.noise_multiplier,
                delta=settings.delta,
                population_size=settings.declared_size,
                sampling=settings.sampling,
                count_stddev=settings.count_stddev,
                max_epsilon=settings.max_epsilon,
                noise_source=noise_source,
            ),
            compute=Compute(device, engine, precision, chosen_workers(settings, device), loaded.row_fields),
            seed=settings.seed,
        )


def chosen_device(name: str, parameters: int) -> torch.device:
    """The torch device: "auto" is the GPU where there is one and the model is large enough to gain from it.

    One by one, a small model spends its time starting kernels, and a processor core starts them faster.
    """
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() and parameters >= SMALL_MODEL else "cpu")
    else:
        device = torch.device(name)
    mine = torchrun_rank()
    return device if mine is None else mine.device(device)


def chosen_workers(settings: TrainSettings, device: torch.device) -> Workers:
    """Those that torchrun started; else as set; else one a core, and no more than users come.

    Where torch sees a GPU one is the default even on the processor: forked copies may not run autograd there.
    """
    if torchrun_rank() is not None:
        if settings.workers not in (None, 1):
            raise refuse("workers", settings.workers, "left out under torchrun", "choose by --nproc-per-node")
        return "torchrun"
    if settings.workers is not None:
        return settings.workers
    return 1 if device.type == "cuda" or torch.cuda.is_available() else min(usable_cores(), settings.cohort)


def check_device(name: str) -> None:
    """Refuse a device that is not there or cannot hold the sums, before any data are drawn."""
    if name == "auto":
        return
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(f"device={name!r} must be auto, cpu or cuda: leave it out to take what is there") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingError(f"device={name!r} must be auto, cpu or cuda (sums are kept in float64): use cpu") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"device={name!r} must be present, and torch finds no CUDA device here: use cpu or auto")


def _server(settings: TrainSettings) -> ServerOptimiser:
    if settings.server == "adam":
        return ServerAdam(settings.server_lr)
    if settings.server == "yogi":
        return ServerYogi(settings.server_lr)
    return ServerSGD(settings.server_lr, settings.server_momentum)
