"""The code of a stored model, found by what its card says of the task, or by what the caller names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..data.chunks import is_file
from ..errors import RunError, SettingError
from ..federated.local_sgd import Batch
from ..settings import SETTINGS, STAND_IN
from ..tasks import file_and_name, is_task_file, task_named
from ..tasks.own.own_task import model_of
from ..tasks.own.task_file import file_checksum
from ..tasks.task import Task


@dataclass(frozen=True)
class Code:
    """What makes an untrained model, and how it predicts, if that is known."""

    make: Callable[[], nn.Module]
    predict: Callable[[nn.Module, Batch], Tensor | Mapping[str, Tensor]] | None = None


def code_of(task: Mapping[str, Any], named: str | None, folder: Path) -> Code:
    """The code of a task by name or of a task's file: `named` by the caller, or else what the card says in `task`."""
    name = named or task.get("name")
    if not isinstance(name, str):
        raise SettingError(
            f"path={str(folder)!r} does not say what makes its model, as it was not written by clipline train: give "
            "load(path, model=MyModel()), an untrained one of the same class and shapes"
        )
    if not is_task_file(name):
        options = task.get("options") if isinstance(task.get("options"), dict) else {}
        return Code(partial(_built_in, task_named(name), dict(options or {})))
    if named is None:
        _check_file(name, task.get("code"), folder)
    return Code(*model_of(name))


def _check_file(name: str, checksum: object, folder: Path) -> None:
    """Refuse to run a file that nobody named, unless it is the one that was trained with, outside the folder."""
    way_out = "give load(path, model=FILE), the file that defines it, or model=MyModel()"
    path = Path(file_and_name(name)[0])
    if not is_file(path):
        raise RunError(f"the model was defined in {name[:200]!r}, and there is no such file here: {way_out}")
    # As written too: a link inside the folder may lead to a file that came along, outside of it.
    written = Path(os.path.normpath(path.absolute())), Path(os.path.normpath(folder.absolute()))
    if written[0].is_relative_to(written[1]) or path.resolve().is_relative_to(folder.resolve()):
        raise RunError(f"the model was defined in {name!r}, a file inside the folder that is loaded: {way_out}")
    if file_checksum(name) != checksum:
        raise RunError(f"the model was defined in {name!r}, and that file has changed since: {way_out}")


def _built_in(task: Task, options: Mapping[str, Any]) -> nn.Module:
    """The model of a task of clipline with these options, made on as few generated users as will do."""
    chosen = {name: value for name, value in options.items() if name in SETTINGS}
    few: dict[str, Any] = {"population_size": task.settings.cohort_size}
    if task.settings.test_users is not None:
        few |= {"test_users": 2, "data": STAND_IN}  # one to validate on, one to test on
    return task.load(task.settings.overridden({**chosen, **few}, "the card")).make(0)
