"""One training as a process: started, followed by its marks, ended at a limit, and its whole time worked out."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from peers.systems import OURS

from .records import Record


def timed(command: Sequence[str], environment: Mapping[str, str], limit: float) -> Record:
    """Run a training and say when it did what, in seconds from its start; ended with all it started at the limit.

    `failed` is there if it broke off, or was ended before its second round.
    """
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(environment), start_new_session=True
        )
        ended: list[bool] = []

        def end() -> None:
            ended.append(True)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout is not None
            with process.stdout:
                marks = [json.loads(line) for line in process.stdout if line.endswith("\n")]  # or it was ended in it
            process.wait()
            wall = time.monotonic() - begun
        finally:
            timer.cancel()
            with contextlib.suppress(ProcessLookupError):  # workers that outlive it, or all if this is interrupted
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        said = [line for line in errors.read().splitlines() if line.strip()]
    found = {"wall_s": wall, **times_of(marks, begun)}
    done = found["rounds_done"]
    if process.returncode and not ended:
        why = f"stopped with code {process.returncode}: {said[-1] if said else 'without a word'}"
        return {"failed": why, "rounds_done": done}
    return found if done > 1 else {"failed": f"did {done} of its rounds in {limit:.0f} s", "rounds_done": done}


def times_of(marks: Sequence[Mapping[str, Any]], begun: float) -> Record:
    """Seconds from `begun` to the first round, and of every round."""
    ready = next((mark for mark in marks if "ready" in mark), None)
    if ready is None:
        return {"rounds_done": 0}
    steps = [ready, *(mark for mark in marks if "round" in mark)]
    pairs = list(itertools.pairwise(steps))
    return {
        "versions": ready["ready"],
        "start_s": ready["at"] - begun,
        "round_s": [after["at"] - before["at"] for before, after in pairs],
        "round_processor_s": [after["processor"] - before["processor"] for before, after in pairs],
        "processor_s": marks[-1]["processor"],
        "rounds_done": len(pairs),
        "finished": "result" in marks[-1],
    }


def summed(found: Record, system: str, batches: Sequence[int], threads: int | None) -> Record:
    """The whole training in seconds, measured or estimated, and the numbers that it is made of.

    `batches` are those of all its rounds. What a peer has not done is estimated by batches, as it trains one after the
    other; what we have not done by rounds, whose time depends on the longest user.
    """
    seconds, of_processor = found.pop("round_s"), found.pop("round_processor_s")
    done, processor = found["rounds_done"], found.pop("processor_s")
    first = done // 2 if system == OURS else 1  # rounds before it are not usual ones
    usual = len(seconds[first:]) if system == OURS else sum(batches[first:done])
    missing = len(batches) - done if system == OURS else sum(batches[done:])
    # Up to the last round if it was ended at its limit: what it did after that is part of the next round.
    measured = found["wall_s"] if found["finished"] else found["start_s"] + sum(seconds)
    made = {
        **found,
        "first_round_s": seconds[0],
        "later_round_s": statistics.mean(seconds[first:]),
        "seconds": measured + missing * sum(seconds[first:]) / usual,
        "usual_round_s": sum(seconds[first:]) / usual * (1 if system == OURS else statistics.mean(batches)),
        "batches": sum(batches),
    }
    if threads == 1:  # else there are processes which the number does not hold
        made["processor_seconds"] = processor + missing * sum(of_processor[first:]) / usual
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in made.items()}
    return {**rounded, "estimated": done < len(batches)}
