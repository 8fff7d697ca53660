"""clipline's rounds, through `Training` on the task's own model and loss."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import protocol
import torch
from workload import NOISE_MULTIPLIER, SERVER_MOMENTUM, WORKLOADS, user_fields

import clipline
from clipline.engine.workers.forked import usable_cores
from clipline_paper.facts import ENTRIES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rounds import Rounds, flat_training


def value_of(text: str) -> Any:
    """A number, a truth value or None as Python writes it; anything else is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def options_of(pairs: list[str]) -> dict[str, Any]:
    """`["workers=2", "precision=bf16"]` as keyword arguments."""
    return {key: value_of(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def training(task: str, users: int, device: str, options: dict[str, Any]) -> clipline.Training:
    """A training of the paper's length with every user in every round, as in the other systems."""
    work = WORKLOADS[task]
    everyone = [user_fields(task, user) for user in range(users)]
    fields = {name: np.concatenate([user[name] for user in everyone]) for name in everyone[0]}
    population = clipline.Population(np.arange(users + 1, dtype=np.int64) * work.examples, fields)
    settings = clipline.task_named(task).settings
    loaded = importlib.import_module(f"clipline_paper.tasks.{task}").build(settings, population, population)
    usual: dict[str, Any] = {
        "rounds": ENTRIES[task].rounds,
        "cohort_size": users,
        "local": clipline.LocalSGD(work.client_lr, work.batch_size, reduction=loaded.reduction),
        "row_fields": loaded.row_fields,
        "seed": 0,
        "noise_multiplier": NOISE_MULTIPLIER,
        "sampling": "fixed",
        "clip": clipline.QuantileClip(start=work.clip),
        "server": clipline.ServerSGD(work.server_lr, SERVER_MOMENTUM),
        "device": device,
        "workers": usable_cores() if device == "cpu" else 1,  # as `clipline train` does
    }
    return flat_training(loaded.make(0), loaded.loss, population, **{**usual, **options})


def main() -> None:
    """Serve rounds."""
    wanted = protocol.arguments()
    clock = protocol.Clock()
    made = training(wanted.task, wanted.users, wanted.device, options_of(wanted.options))
    rounds = Rounds(made)
    cuda = wanted.device.startswith("cuda")
    with made.backend.running():
        clock.ready(f"clipline {clipline.__version__}, torch {torch.__version__}")
        while clock.go():
            rounds.next(last=clock.last)  # nothing goes on during the others' turn
            clock.done(torch.cuda.synchronize if cuda else None)
        clock.close(torch.cuda.max_memory_allocated() if cuda else None)


if __name__ == "__main__":
    main()
