"""`clipline selftest`: whether the installed code does on this machine what the guarantee rests on."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..console import say
from ..errors import refuse
from ..tasks import is_task_file
from .parser import JSON, Command, Option

if TYPE_CHECKING:
    from ..tasks.task import Task
    from ..trust.self_test import Checked, Subject

_ENOUGH = {
    "rounds": 1,
    "cohort_size": 1,
    "client_lr": 0.1,
    "noise_multiplier": 1.0,
}  # where the file leaves these to the command line
_WORDS = {True: "pass", False: "FAIL", None: "skip"}


def selftest(model: str | None, data: str | None, user_column: str | None, thorough: bool, as_json: bool) -> int:
    """Check the installed code on this machine: sensitivity, noise, sampling, accounting, and what is on disk when.

    Made-up users train; no data of yours is used, but for the names and types of its columns. Ends with exit code 1 if
    a check fails. A statistical check fails on sound code less than once in ten million times.
    """
    from ..trust.self_test import self_test

    own = None if model is None else subject_of_file(model, {"data": data, "user_column": user_column})

    def tell(one: Checked) -> None:
        if not as_json:
            say(f"{_WORDS[one.passed]}  {one.name}: {one.measured}")

    begun = time.perf_counter()
    found = self_test(own, thorough=thorough, tell=tell)
    failed, skipped = (sum(one.passed is value for one in found) for value in (False, None))
    if as_json:
        print(json.dumps({"passed": not failed, "checks": [asdict(one) for one in found]}))
    else:
        how = "all passed" if not failed else f"{failed} FAILED: do not rely on this installation"
        not_run = f", {skipped} could not run here" if skipped else ""
        say(f"{len(found)} checks in {time.perf_counter() - begun:.0f} s: {how}{not_run}")
    return 1 if failed else 0


def task_of_file(model: str, given: dict[str, Any]) -> Task:
    """The task that a file defines, with settings where it leaves these to the command line."""
    from ..tasks.task_file import TaskFile, own_task

    if not is_task_file(model):
        raise refuse("model", model, "FILE.py or FILE.py:name", "give the file that clipline train would be given")
    file = TaskFile(model)
    stored = file.value("SETTINGS", {})
    missing = {} if file.makes_task else {name: value for name, value in _ENOUGH.items() if name not in stored}
    if "epsilon" in stored:
        missing.pop("noise_multiplier", None)
    return own_task(model, {**missing, **{name: value for name, value in given.items() if value is not None}})


def subject_of_file(model: str, given: dict[str, Any]) -> Subject:
    """The model and loss that a file defines, for made-up users."""
    from ..trust.self_test import subject_of

    task = task_of_file(model, given)
    loaded, settings = task.load(task.settings), task.settings
    return subject_of(
        lambda: loaded.make(0), loaded.loss, loaded.population, settings.local(loaded.reduction),
        row_fields=loaded.row_fields, personal=loaded.personal,
    )  # fmt: skip


command = Command(
    "selftest",
    selftest,
    [
        Option(["--model"], metavar="FILE.py:name", help="Also check your own model and loss, as train takes them."),
        Option(["--data"], metavar="PATH", help="The table or folder that --model trains on."),
        Option(["--user-column"], metavar="NAME", help="The column of the table that says whose row it is."),
        Option(["--thorough"], is_flag=True, help="Ten times as many draws, and every made-up user comes and goes."),
        JSON,
    ],
)
