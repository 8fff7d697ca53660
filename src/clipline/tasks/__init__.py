"""Tasks: model, loss, metrics, data and settings under one name, one file (or folder) for each.

Begin with `task`, which says what a task is, and `emnist_cr`, a short one. Each is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from clipline_paper.facts import FACTS

from ..errors import check_choice, refuse

if TYPE_CHECKING:
    from .task import Task

TASK_NAMES = tuple(FACTS)
DEFAULT_TASK = "handwriting"
_FILE = re.compile(r"(.*\.py)(?::(\w*))?", re.DOTALL)


def task_named(name: str) -> Task:
    """The task of this name; an unknown name is refused with the nearest known one."""
    if str(name).endswith(".toml"):
        raise refuse("task", name, f"one of {', '.join(TASK_NAMES)}, or FILE.py", f"give settings as --config {name}")
    check_choice("task", name, TASK_NAMES)
    task: Task = importlib.import_module(
        ".handwriting" if name == DEFAULT_TASK else f"clipline_paper.tasks.{name}", __name__
    ).TASK
    return task


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
