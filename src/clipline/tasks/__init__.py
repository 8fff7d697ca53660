"""Tasks: model, loss, metrics, data and settings under one name, one file (or folder) for each.

Begin with `task`, which says what a task is, and `emnist_cr`, a short one. Each is imported when it is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..errors import check_choice
from .paper_facts import FACTS

if TYPE_CHECKING:
    from .task import Task

TASK_NAMES = tuple(FACTS)
DEFAULT_TASK = "handwriting"


def task_named(name: str) -> Task:
    """The task of this name; an unknown name is refused with the nearest known one."""
    check_choice("task", name, TASK_NAMES)
    task: Task = importlib.import_module(f".{name}", __name__).TASK
    return task
