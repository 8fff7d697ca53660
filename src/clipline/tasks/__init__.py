"""Tasks: model, loss, metrics, data and settings under one name. Packages add theirs by entry points.

Begin with `task`, which says what a task is, and `handwriting`, clipline's own. Each is imported when it is asked for.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .. import registry
from ..errors import RunError, check_choice, refuse
from ..lazy_names import lazily

if TYPE_CHECKING:
    from ..federated.local_sgd import Batch
    from ..metric_direction import better_facts, lower_is_better
    from .handwriting import writers_population
    from .metrics import Counts, evaluator, hits_without, sequence_loss
    from .task import LoadedTask, Task, initialised
    from .task_file import own_task
    from .train_settings import TrainSettings

__all__ = [
    "DEFAULT_TASK",
    "Batch",
    "Counts",
    "LoadedTask",
    "Task",
    "TaskEntry",
    "TrainSettings",
    "better_facts",
    "evaluator",
    "hits_without",
    "initialised",
    "is_task_file",
    "lower_is_better",
    "own_task",
    "sequence_loss",
    "task_entries",
    "task_entry",
    "task_named",
    "task_names",
    "writers_population",
]  # fmt: skip
_FILE = re.compile(r"(.*\.py)(?::(\w*))?", re.DOTALL)


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
DEFAULT_TASK = HANDWRITING.name


def task_names() -> Sequence[str]:
    """The names of all tasks: clipline's own, then those of installed packages. Nothing of theirs is imported."""
    return registry.names("tasks", [DEFAULT_TASK])


def task_entry(name: str) -> TaskEntry:
    """What is known of a task before it is loaded; an unknown name is refused with the nearest known one."""
    known = task_names()
    if str(name).endswith(".toml"):
        raise refuse("task", name, f"one of {', '.join(known)}, or FILE.py", f"give settings as --config {name}")
    if check_choice("task", name, known) == DEFAULT_TASK:
        return HANDWRITING
    entry = registry.registered("tasks", name, TaskEntry)
    if entry.name != name:
        raise RunError(f"the entry point {name!r} of clipline.tasks is the task {entry.name!r}: give both one name")
    return entry


def task_entries() -> dict[str, TaskEntry]:
    """All tasks by name. Warns of those that cannot be used, and leaves them out."""
    found = {}
    for name in task_names():
        try:
            found[name] = task_entry(name)
        except RunError as error:
            warnings.warn(str(error), registry.BrokenPackageWarning, stacklevel=2)
    return found


def main_metric_of(name: str) -> str | None:
    """The metric that a task by name is judged by; None for a name that nobody registered, such as a file's."""
    return task_entry(name).metric_name if name in task_names() else None


def task_named(name: str) -> Task:
    """The task of this name.

    Args:
      name: Such as "handwriting". `clipline tasks` lists them.

    Returns:
      The task: data, model, loss, metrics and settings.

    Raises:
      SettingError: If there is none. The text has the nearest known name.

    Example:
      >>> settings = cl.task_named("handwriting").settings
    """
    return task_entry(name).load()


def is_task_file(name: object) -> bool:
    """Whether this names a file of one's own, `FILE.py` or `FILE.py:name`, and not a task of clipline."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def file_and_name(task: str) -> tuple[str, str | None]:
    """The path of a task's file, and which of its tasks is meant: `rides.py:wide` is ("rides.py", "wide")."""
    match = _FILE.fullmatch(task)
    assert match is not None, "is_task_file comes first"
    return match[1], match[2]


def short_name(task: str) -> str:
    """A task's name, for folders and tables: `some/rides.py` is rides, `some/rides.py:wide` is rides-wide."""
    if not is_task_file(task):
        return task
    path, name = file_and_name(task)
    return "-".join([Path(path).stem, *([name] if name else [])])


__getattr__, __dir__ = lazily(
    __name__,
    {
        ".handwriting": "writers_population",
        ".metrics": "Counts evaluator hits_without sequence_loss",
        ".task_file": "own_task",
        ".train_settings": "TrainSettings",
        ".task": "LoadedTask Task initialised",
        "..federated.local_sgd": "Batch",
        "..metric_direction": "better_facts lower_is_better",
    },
)
