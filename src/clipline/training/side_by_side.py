"""Several runs in one program: their users train side by side, as more users of the same stack or stacks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..engine.core.problem import Problem
from ..engine.stacked.trainer import Stacked
from ..engine.workers.forked import ForkedBackend
from ..engine.workers.single import SingleProcess
from ..engine.workers.torchrun import TorchrunBackend
from ..errors import SettingError, refuse
from ..federated.backend import Backend, LocalTrainer
from ..federated.local_sgd import LocalTraining
from .callbacks import Callback
from .loop import Run, drive
from .result import TrainResult
from .training import Training


def run_together(
    trainings: Sequence[Training],
    callbacks: Sequence[Sequence[Callback]] | None = None,
    *,
    unprivate_watch: Callable[[LocalTrainer], LocalTrainer] | None = None,
) -> list[TrainResult]:
    """Run several trainings at once. Each result is what that training's own `run()` would give, up to rounding.

    They must share population, architecture, loss, batches, device and precision. Rates, schedules, noise, clip,
    quantile, seed, sampling, cohort size and number of rounds may differ. Users of all runs are shared among as many
    processes as the training with most `workers` has.

    Args:
      trainings: The trainings.
      callbacks: A list of callbacks for each training.
      unprivate_watch: For study: wraps the trainer of all users and so sees every update before it is clipped. The
        guarantee does not cover what it tells. One worker only.

    Returns:
      A result for each training, in order.

    Raises:
      SettingError: If the trainings differ in what they must share.

    Example:
      >>> results = cl.run_together([cl.Training(..., seed=seed) for seed in range(5)])
    """
    if not trainings:
        return []
    if callbacks is not None and len(callbacks) != len(trainings):
        raise refuse("callbacks", len(callbacks), f"{len(trainings)} lists, one a training", "give [] for none")
    for number, training in enumerate(trainings):
        _check_alike(trainings[0].problem, training.problem, number)
    _warn_of_shared_noise(trainings)
    runs = [
        Run(training, () if callbacks is None else callbacks[number], number=number)
        for number, training in enumerate(trainings)
    ]
    return drive(runs, _shared_backend(trainings, unprivate_watch))


class SharedNoiseWarning(UserWarning):
    """Two private runs have the same seed, and so the same noise: who sees both can subtract it."""


def _warn_of_shared_noise(trainings: Sequence[Training]) -> None:
    seeds = Counter(
        training.seed
        for training in trainings
        if training.noise_multiplier > 0 and training.privacy.noise_source == "seed"
    )
    shared = [seed for seed, count in seeds.items() if count > 1]
    if shared:
        warnings.warn(
            f"{seeds[shared[0]]} private runs have the seed {shared[0]} and so the same noise, which the difference of "
            "their models leaves out: their guarantees hold one at a time only; give each a seed of its own",
            SharedNoiseWarning,
            stacklevel=3,
        )


def _check_alike(first: Problem, other: Problem, number: int) -> None:
    same = {
        "population": first.population is other.population,
        "model": first.model.named_shapes == other.model.named_shapes,
        "personal": first.model.personal_shapes == other.model.personal_shapes,
        "loss": first.loss == other.loss,
        "local": _without_rates(first.local) == _without_rates(other.local),
        "device": first.device == other.device,
        "precision": first.precision == other.precision,
        "row_fields": first.row_fields == other.row_fields,
        "on_error": first.on_error == other.on_error,
        "fast": first.fast == other.fast,
        "what is not trained in the model": first.model.same_apart_from_training(other.model),
    }
    for name, alike in same.items():
        if not alike:
            raise SettingError(
                f"{name} of training {number} differs from that of training 0, and runs side by side must share it: "
                "give all trainings the same object, or run this one alone"
            )


def _without_rates(local: LocalTraining) -> LocalTraining:
    return replace(local, lr=1.0, lr_schedule=None)


def _shared_backend(
    trainings: Sequence[Training], unprivate_watch: Callable[[LocalTrainer], LocalTrainer] | None
) -> Backend:
    """One stack for the users of all runs, in as many processes as the training with most workers has."""
    if any(isinstance(training.backend, TorchrunBackend) for training in trainings):
        raise refuse("workers", "torchrun", "a number where runs train side by side", "start without torchrun")
    if any(training.upload is not None for training in trainings):
        raise refuse("upload", "given", "left out where runs train side by side", "run this training alone")
    problem = trainings[0].problem.side_by_side([training.problem for training in trainings])
    users = sum(training.cohort_size for training in trainings)
    trainer = Stacked(trainings[0].one_by_one, users, problem=problem)
    size = max(training.workers for training in trainings)
    if unprivate_watch is not None and size > 1:
        raise refuse("workers", size, "1 where updates are watched", "leave unprivate_watch out, or take one worker")
    if size == 1:
        return SingleProcess(trainer if unprivate_watch is None else unprivate_watch(trainer))
    samplings = [training.algorithm.sampler.sampling for training in trainings]
    return ForkedBackend(trainer, problem, samplings, size)
