"""How a system is asked for rounds: a line on its standard input starts some in a row, a line of JSON says how long
each of them took on average.

    out  {"ready": "pfl 0.6.0, torch 2.13.0"}
    in   3
    out  {"seconds": 1.234}
    in   (closed)
    out  {"peak_memory_bytes": 500000000}

What libraries print goes to standard error. Only the standard library is used here: every environment has it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """What every system is started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--users", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="that are measured")
    parser.add_argument("--warmups", type=int, default=1, help="rounds before those")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", help="of pfl: float32 or bf16")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="for clipline's Training")
    return parser.parse_args()


class Clock:
    """The system's side: `while clock.go(): one round; clock.done()`."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # a library that prints must not answer for us
        self._begun, self._asked, self._left = 0.0, 0, 0

    def ready(self, versions: str) -> None:
        """Data and model are in place."""
        self._say({"ready": versions})

    def go(self) -> bool:
        """Wait until rounds are wanted and start the clock, or go on with the next; false when no more are wanted."""
        if self._left == 0:
            self._asked = self._left = int(sys.stdin.readline() or 0)
            self._begun = time.perf_counter()
        return self._left > 0

    @property
    def last(self) -> bool:
        """Whether this round is the last before the others' turn."""
        return self._left == 1

    def done(self, synchronise: Callable[[], Any] | None = None) -> None:
        """The round is over; after the last in a row only once `synchronise` has waited for the device."""
        self._left -= 1
        if self._left:
            return
        if synchronise is not None:
            synchronise()
        self._say({"seconds": (time.perf_counter() - self._begun) / self._asked})

    def close(self, device_bytes: int | None = None) -> None:
        """No more rounds: say what they took at most."""
        self._say({"peak_memory_bytes": peak_memory(), "peak_device_memory_bytes": device_bytes})

    def _say(self, answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=self._answers, flush=True)


def peak_memory() -> int:
    """Bytes of main memory that this process held at most, plus the same of each process it has started and kept."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return own + sum(_peak_of(process) for process in _descendants(os.getpid()))


def _descendants(ancestor: int) -> list[int]:
    """Numbers of all living processes below this one."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        parent = _status(int(folder.name)).get("PPid")
        if parent is not None:
            children.setdefault(int(parent), []).append(int(folder.name))
    found, unseen = [], [ancestor]
    while unseen:
        below = children.get(unseen.pop(), [])
        found += below
        unseen += below
    return found


def _peak_of(process: int) -> int:
    return int(_status(process).get("VmHWM", "0 kB").split()[0]) * 1024


def _status(process: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except OSError:  # gone meanwhile
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
