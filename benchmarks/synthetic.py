"""Users with any number of random examples in a task's own form, and trainings on them, for the benchmarks."""

from __future__ import annotations

import importlib
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rounds import Rounds, flat_training

import clipline
from clipline.federated.round import TrainState

NOISE_MULTIPLIER = 0.1


def fields(task: str, count: int) -> dict[str, NDArray[Any]]:
    """`count` random examples."""
    rng = np.random.default_rng(2021)
    if task in ("handwriting", "emnist_cr", "emnist_ae"):
        classes = 10 if task == "handwriting" else 62
        return {
            "pixels": rng.integers(0, 256, (count, 28, 28), dtype=np.uint8),
            "labels": rng.integers(0, classes, count, dtype=np.uint8),
        }
    if task == "shakespeare":
        return {"tokens": rng.integers(1, 90, (count, 81), dtype=np.uint8)}
    if task == "so_nwp":
        return {"tokens": rng.integers(1, 10_004, (count, 21), dtype=np.int16)}
    raise SystemExit(f"no random examples for {task!r}: take handwriting, emnist_cr, emnist_ae, shakespeare or so_nwp")


def training(task: str, sizes: NDArray[np.int64], cohort: int, **options: Any) -> clipline.Training:
    """A training on users of these sizes, with the task's own settings where nothing else is said."""
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    population = clipline.Population(offsets, fields(task, int(offsets[-1])))
    settings = clipline.task_named(task).settings
    if task == "handwriting":
        from clipline.tasks.handwriting import HandwritingNet, loss
        from clipline.tasks.task import initialised

        model, reduction, row_fields = initialised(lambda: HandwritingNet(10), 0), "mean", {}
    else:
        loaded = importlib.import_module(f"clipline_paper.tasks.{task}").build(settings, population, population)
        model, loss, reduction, row_fields = loaded.make(0), loaded.loss, loaded.reduction, loaded.row_fields
    usual: dict[str, Any] = {
        "rounds": 10_000,
        "cohort_size": cohort,
        "local": clipline.LocalSGD(settings.client_lr, settings.batch_size, reduction=reduction),
        "seed": 0,
        "noise_multiplier": NOISE_MULTIPLIER,
        "sampling": "fixed",
        "row_fields": row_fields,
    }
    return flat_training(model, loss, population, **{**usual, **options})


def seconds_a_round(training: clipline.Training, rounds: int, warm_up: int = 2) -> tuple[float, TrainState]:
    """The median of rounds in a row, after some to warm up.

    A round is over when what it releases can be read; as in `Training.run`, that is asked once the next has been begun.
    """
    going, taken = Rounds(training), list[float]()
    for count in (warm_up, rounds):
        taken.clear()
        previous, begun = going.next(), time.perf_counter()
        for number in range(count):
            release = going.next(last=number == count - 1)
            _ = previous.fraction_within
            now = time.perf_counter()
            taken.append(now - begun)
            previous, begun = release, now
        _ = previous.fraction_within
        if training.device.type == "cuda":
            torch.cuda.synchronize()
    return float(np.median(taken)), going.state
