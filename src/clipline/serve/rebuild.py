"""The code of a stored model, found by what its card says of the task, or by what the caller names."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..errors import RunError, SettingError
from ..federated.local_sgd import Batch
from ..settings import SETTINGS, STAND_IN
from ..tasks import is_task_file, task_named
from ..tasks.own.own_task import model_of
from ..tasks.own.task_file import file_checksum
from ..tasks.task import Task
from .error_advice import PYTHON, WaysOut


class OtherCodeWarning(UserWarning):
    """A model is loaded with another file, or with other layers, than it was trained with."""


@dataclass(frozen=True)
class Code:
    """What makes an untrained model, how it predicts, and what, if that is known."""

    make: Callable[[], nn.Module]
    predict: Callable[[nn.Module, Batch], Tensor | Mapping[str, Tensor]] | None = None
    label: str | None = None  # the field that is predicted, if that is known


def code_of(task: Mapping[str, Any], named: str | None, folder: Path, ways_out: WaysOut = PYTHON) -> Code:
    """The code of a task by name or of a task's file: `named` by the caller, or else what the card says in `task`.

    A file is run only if the caller names it: who wrote the card also wrote the name and the checksum in it, and may
    have put a file of that name beside the folder.
    """
    name = named or task.get("name")
    if not isinstance(name, str):
        raise SettingError(
            f"path={str(folder)!r} does not say what makes its model, as it was not written by clipline train: "
            f"{ways_out.saved}"
        )
    if not is_task_file(name):
        options = task.get("options") if isinstance(task.get("options"), dict) else {}
        return Code(partial(_built_in, task_named(name), dict(options or {})))
    if named is None:
        raise RunError(
            f"the model was defined in the file {name[:200]!r}, and no code is run that you have not named: read that "
            f"file, then {ways_out.file}"
        )
    code = Code(*model_of(name, ways_out.module))
    if isinstance(stored := task.get("code"), str) and file_checksum(name) != stored:
        warnings.warn(
            f"{name!r} is not the file that the model was trained with, or has changed since: compare what it predicts "
            "with the metrics of the card",
            OtherCodeWarning,
            stacklevel=5,
        )
    return code


def _built_in(task: Task, options: Mapping[str, Any]) -> nn.Module:
    """The model of a task of clipline with these options, made on as few generated users as will do."""
    chosen = {name: value for name, value in options.items() if name in SETTINGS}
    few: dict[str, Any] = {"population_size": task.settings.cohort_size}
    if task.settings.test_users is not None:
        few |= {"test_users": 2, "data": STAND_IN}  # one to validate on, one to test on
    return task.load(task.settings.overridden({**chosen, **few}, "the card")).make(0)
