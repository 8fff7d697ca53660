"""A task of a few milliseconds a run, as a file for `own_task`, and what other processes do with it."""

import multiprocessing
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from samples import cross_entropies, small_population
from torch import nn

from clipline.study.execution import Recorder
from clipline.study.record import RunSpec
from clipline.study.study import Study
from clipline.tasks.task import LoadedTask, Task, initialised
from clipline.tasks.task_file import own_task
from clipline.tasks.train_settings import TrainSettings


def load(settings: TrainSettings) -> LoadedTask:
    test = small_population(20, seed=1)
    x, y = torch.from_numpy(test.fields["x"]).float(), torch.from_numpy(test.fields["y"])

    def evaluate(model: nn.Module) -> dict[str, float]:
        time.sleep(float(os.environ.get("STUDY_TASK_SECONDS", "0")))
        return {"accuracy": float((model(x).argmax(dim=1) == y).double().mean())}

    make = partial(initialised, partial(nn.Linear, 6, 3))
    return LoadedTask(small_population(settings.drawn_users()), make, cross_entropies, evaluate)


TASK = Task(
    name="tiny",
    title="{users} small users",
    metric_name="accuracy",
    settings=TrainSettings(
        task="tiny", rounds=6, cohort_size=10, client_lr=0.5, population_size=60, noise_multiplier=0.0,
        evaluate_every=2, workers=1, device="cpu",
    ),
    load=load,
)  # fmt: skip


def tiny_task() -> Task:
    return own_task(str(Path(__file__)), {})


def seeds(count: int, **changes) -> list[RunSpec]:
    base = replace(tiny_task().settings, **changes)
    return [RunSpec(replace(base, seed=seed)) for seed in range(count)]


def process_of(target, *arguments):
    """A real process, started from one that has imported what takes long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "clipline.study.study", "clipline.tasks.task_file"])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happens any more"
        time.sleep(0.005)


def work(folder: str, count: int, log: str, side_by_side: int, seconds: str) -> None:
    """A process that wants these runs, and logs what it begins and what it writes: lines `begin|add ID PID`."""
    os.environ["STUDY_TASK_SECONDS"] = seconds
    torch.set_num_threads(1)
    study = Study(folder, tiny_task(), side_by_side=side_by_side)

    def line(word: str, run: str) -> None:
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(f"{word} {run} {os.getpid()}\n")

    add, start = study.directory.add, Recorder.on_start

    def on_start(self, training, state):
        line("begin", self._planned.id)
        start(self, training, state)

    def logged(record):
        add(record)
        line("add", record.id)

    Recorder.on_start, study.directory.add = on_start, logged
    study.results(seeds(count))
