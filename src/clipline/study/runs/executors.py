"""Who makes a group of runs: this process, or (in `cluster`) the machines of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ...engine.choose import SMALL_MODEL
from ...tasks.settings import TrainSettings
from ...tasks.task import LoadedTask, Task
from .group import Failure, data_key, group_size, run_group
from .record import RunRecord
from .recording import PlannedRun


class Executor(Protocol):
    """Makes groups of runs, one or several at a time."""

    def free_slots(self) -> int:
        """How many groups may be started now."""
        ...

    def most(self, settings: TrainSettings) -> int:
        """How many runs like this one make a group."""
        ...

    def start(self, group: Sequence[PlannedRun]) -> None:
        """Begin a group, whose runs share a shape."""
        ...

    def wait(self) -> list[tuple[Sequence[PlannedRun], list[Failure]]]:
        """The groups that have ended since the last call, with the runs that failed. May come back with none."""
        ...

    def close(self) -> None:
        """Give up what has not ended."""
        ...


class LocalExecutor:
    """Makes one group at a time, in this process. The task's data are loaded once for all that share them."""

    def __init__(self, task: Task, add: Callable[[RunRecord], None], on_round: Callable[[str], None]) -> None:
        self.task, self._add, self._on_round = task, add, on_round
        self._group: Sequence[PlannedRun] = ()
        self._loaded: tuple[Any, LoadedTask] | None = None

    def divert(self, add: Callable[[RunRecord], None]) -> None:
        """Hand records to `add` from now on."""
        self._add = add

    def free_slots(self) -> int:
        """One, unless it is taken."""
        return 0 if self._group else 1

    def most(self, settings: TrainSettings) -> int:
        """What fits the memory of the device and still gains speed."""
        return group_size(settings, self.load(settings))

    def start(self, group: Sequence[PlannedRun]) -> None:
        """Remember it: it is made in `wait`."""
        self._group = group

    def wait(self) -> list[tuple[Sequence[PlannedRun], list[Failure]]]:
        """Make the group."""
        group, self._group = self._group, ()
        settings = group[0].spec.settings
        loaded = self.load(settings)
        with _threads_for(loaded, settings):
            return [(group, run_group(self.task, loaded, group, self._add, self._on_round))]

    def close(self) -> None:
        """Nothing is left over: what was not made has no record."""

    def load(self, settings: TrainSettings) -> LoadedTask:
        """The task with its data in place."""
        key = data_key(settings)
        if self._loaded is None or self._loaded[0] != key:
            self._loaded = None  # before the next is loaded: there need not be memory for both
            settings.compute().check_device()
            self._loaded = key, self.task.load(settings)
        return self._loaded[1]


@contextmanager
def _threads_for(loaded: LoadedTask, settings: TrainSettings) -> Iterator[None]:
    """One thread for a small model, whose operations are too short to share; as before on leaving."""
    before = torch.get_num_threads()
    if sum(parameter.numel() for parameter in loaded.make(settings.seed).parameters()) < SMALL_MODEL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
