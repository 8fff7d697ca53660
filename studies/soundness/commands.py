"""The command line of the clipline that is importable, run as a process of its own, and small data for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import clipline
from clipline.data.store import write_store

_LONGEST = 160  # characters of a line that are worth reading in a table
MINE = {"source": "made for an attack", "tasks": ["so_lr"], "origin": "substitute"}


@dataclass(frozen=True)
class Answer:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def last(self) -> str:
        """The last line of its errors, or of its output; of a long one the beginning."""
        lines = [line.strip(" │╭╮╰╯─") for line in (self.err.strip() or self.out.strip()).splitlines()]
        line = next((line for line in reversed(lines) if line), "").removeprefix("error: ")
        return line if len(line) <= _LONGEST else line[:_LONGEST].rpartition(" ")[0] + " ..."

    def __str__(self) -> str:
        """In a table: exit code and last line, and whether it was a traceback."""
        if "Traceback (most recent call last)" in self.err:
            return f"traceback, exit {self.code}: {self.last}"
        return f"exit {self.code}: {self.last}" if self.code else "exit 0"


def environment() -> dict[str, str]:
    """Children find the same clipline, and no data but those they are given."""
    source = str(Path(clipline.__file__).resolve().parents[1])
    others = {name: value for name, value in os.environ.items() if name not in ("CLIPLINE_DATA", "PYTHONPATH")}
    return {**others, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUTF8": "1"}


def begun(folder: Path, *arguments: object, program: str | None = None) -> subprocess.Popen[str]:
    """A command that goes on by itself, in `folder`; `program` is Python to run in the place of the command line."""
    start = ["-m", "clipline"] if program is None else ["-c", program]
    command = [sys.executable, *start, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment(), text=True, stdout=pipe, stderr=pipe)


def ended(process: subprocess.Popen[str], seconds: float = 120) -> Answer:
    """What it came to."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        return Answer(124, out, f"{err}\nstill running after {seconds:g} s")
    return Answer(process.returncode, out, err)


def clipline_command(folder: Path, *arguments: object, program: str | None = None) -> Answer:
    """Run a command to its end."""
    return ended(begun(folder, *arguments, program=program))


def write_posts(folder: Path, sizes: Mapping[str, int], seed: int = 0) -> Path:
    """Stores for the task so_lr: users of so many posts of four words and one tag, and two users to measure on."""
    rng = np.random.default_rng(seed)
    for split, users in (("train", sizes), ("test", {"y": 2, "z": 2})):
        ids = np.repeat(np.array(list(users)), list(users.values()))
        words, weights = np.full((len(ids), 128), 10_000, np.int16), np.zeros((len(ids), 128), np.float32)
        words[:, :4], weights[:, :4] = rng.integers(0, 10_000, (len(ids), 4)), 0.25
        tags = rng.integers(0, 500, (len(ids), 1)).astype(np.int16)
        write_store(folder / split, [(ids, {"words": words, "weights": weights, "tags": tags})], **MINE)
    return folder
