"""What a task is: data, model, loss and metrics under one name, with settings that work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..errors import SettingError, refuse
from ..federated.hosts import Workers, place
from ..federated.local import LocalSGD, Loss
from ..federated.local_workers import usable_cores
from ..federated.population import Population
from ..federated.server import ServerAdam, ServerOptimiser, ServerSGD, ServerYogi
from ..federated.training import Evaluate, Training
from .settings import TrainSettings

SMALL_MODEL = 100_000  # parameters below which one processor core is faster than two, or than a GPU


@dataclass(frozen=True, eq=False)
class LoadedTask:
    """A task with its data in place."""

    population: Population
    model: nn.Module
    loss: Loss
    evaluate: Evaluate  # on users outside the population
    reduction: str = "mean"  # of a loss that gives one number for each example


@dataclass(frozen=True, eq=False)
class Task:
    """A task by name. `load` draws or opens the data that the settings ask for."""

    name: str
    title: str
    metric_name: str
    settings: TrainSettings
    load: Callable[[TrainSettings], LoadedTask]
    data: str = "embedded"  # "stand-in" where generated users take the place of the original ones

    def training(self, settings: TrainSettings) -> Training:
        """Everything checked and ready to run."""
        check_device(settings.device)
        loaded = self.load(settings)
        noise_source: Any = settings.noise_source
        device = chosen_device(settings.device, sum(p.numel() for p in loaded.model.parameters()))
        return Training(
            loaded.model,
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
            seed=settings.seed,
            epsilon=settings.epsilon,
            noise_multiplier=settings.noise_multiplier,
            delta=settings.delta,
            sampling=settings.sampling,
            clip=settings.controller(),
            server=_server(settings),
            count_stddev=settings.count_stddev,
            max_epsilon=settings.max_epsilon,
            noise_source=noise_source,
            evaluate=loaded.evaluate,
            evaluate_every=settings.evaluate_every,
            device=device,
            workers=chosen_workers(settings, device),
        )


def chosen_device(name: str, parameters: int) -> torch.device:
    """The torch device: "auto" is the GPU where there is one and the model is large enough to gain from it.

    One by one, a small model spends its time starting kernels, and a processor core starts them faster.
    """
    if name == "auto":
        device = torch.device("cuda" if torch.cuda.is_available() and parameters >= SMALL_MODEL else "cpu")
    else:
        device = torch.device(name)
    mine = place()
    return device if mine is None else mine.device(device)


def chosen_workers(settings: TrainSettings, device: torch.device) -> Workers:
    """Those that torchrun started; else as set; else one a core, and no more than users come.

    Where torch sees a GPU one is the default even on the processor: forked copies may not run autograd there.
    """
    if place() is not None:
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
