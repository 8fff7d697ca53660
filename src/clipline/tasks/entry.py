"""What is known of a task before it is loaded. Nothing heavy is imported, so that `clipline tasks` is fast."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from ..errors import RunError

if TYPE_CHECKING:
    from .task import Task


@dataclass(frozen=True)
class TaskEntry:
    """A task as its package registers it, under the entry point group `clipline.tasks`.

    Args:
      name: Name of the task, the same as that of the entry point.
      task: Where its `Task` is, as "package.module:NAME". Imported when the task is used.
      parameters: How many parameters it trains.
      users: Users of the data that the task is about.
      rounds: Rounds of its settings.
      client_lr: Learning rate on a user's device.
      server_lr: Learning rate of the server.
      metric_name: The main metric.
      stand_in_users: Users that are generated where no data are prepared.
      clip_min: Smallest clip that is of use, if that is known.
      clip_max: Largest clip that is of use, if that is known.
      data: "stand-in" if generated users take the place of prepared data, "embedded" if there are no others.
      lower_is_better: Whether the metric is an error.

    Example:
      >>> RIDES = TaskEntry("rides", "rides.task:TASK", 11, 500, 20, 0.1, 1.0, "accuracy", 500)

    """

    name: str
    task: str
    parameters: int
    users: int
    rounds: int
    client_lr: float
    server_lr: float
    metric_name: str
    stand_in_users: int
    clip_min: float | None = None
    clip_max: float | None = None
    data: Literal["stand-in", "embedded"] = "stand-in"
    lower_is_better: bool = False

    def load(self) -> Task:
        """The task itself, imported now."""
        module, _, name = self.task.partition(":")
        try:
            task: Task = getattr(import_module(module), name)
        except Exception as error:  # whatever a module of another package may raise
            told = f"task {self.name!r} cannot be loaded from {self.task!r} ({type(error).__name__}: {error})"
            package = module.partition(".")[0]
            raise RunError(f"{told}: update the package {package}, or uninstall it") from error
        return task


HANDWRITING = TaskEntry(
    "handwriting", "clipline.tasks.handwriting:TASK", 5994, 40_000, 150, 0.5, 1.0, "accuracy", 40_000, data="embedded"
)
