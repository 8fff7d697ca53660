"""How a training that is timed tells what it has done: a line of JSON at each step, with the time of the machine.

    {"at": 5012.31, "processor": 4.1, "ready": "pfl 0.6.0, torch 2.13.0"}    data and model are in place
    {"at": 5014.87, "processor": 6.2, "round": 1}
    {"at": 5016.02, "processor": 7.3, "round": 2}
    {"at": 5016.05, "processor": 7.3, "result": true}                         the trained parameters are in main memory

`processor` is what this process has had of all cores, without processes that it started.
Whoever started it knows when that was, and what is lost if it is ended early is only what had not been done.
What libraries print goes to standard error. Only the standard library is used here: every environment has it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """What every system is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--store", required=True, help="the folder with the stores train and test")
    parser.add_argument("--even", action="store_true", help="deal the same rows to the same number of users, evenly")
    parser.add_argument("--users", type=int, required=True, help="in a round")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--stop-after", type=int, help="rounds: end there, as if somebody had ended the process")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--settings", type=json.loads, required=True, help="of the task, as JSON")
    parser.add_argument("--cohorts", type=Path, help="of each round, as JSON, for a peer")
    parser.add_argument("--precision", default="float32", help="of pfl: float32 or bf16")
    parser.add_argument("--options", type=json.loads, default={}, help="more of clipline's settings, as JSON")
    return parser.parse_args()


class Marks:
    """The lines. Made before anything is imported that might print."""

    def __init__(self) -> None:
        self._lines = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # a library that prints must not speak for us
        self.rounds = 0

    def ready(self, versions: str) -> None:
        """Data and model are in place."""
        self._say(ready=versions)

    def round(self) -> None:
        """One more round is over."""
        self.rounds += 1
        self._say(round=self.rounds)

    def result(self) -> None:
        """The trained parameters are in main memory."""
        self._say(result=True)

    def _say(self, **what: Any) -> None:
        # CLOCK_MONOTONIC: on Linux the same for all processes.
        now = {"at": time.monotonic(), "processor": time.process_time()}
        print(json.dumps(now | what), file=self._lines, flush=True)
