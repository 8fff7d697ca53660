"""What do metrics and checkpoints add to a whole training on real users? Peer: the same training with neither.

    python benchmarks/beside_training.py emnist_cr=benchmarks/.stores/emnist62 [so_lr=STORE:800 ...] [--rounds 600] \
        [--device cuda] [--precision bf16] [--turns 2] [--processes] [--record]

To reach: at most 5%. All that `clipline train` does once its modules are imported, from loading the data to the report:
with metrics every ten rounds (and checkpoints as often as they are written), and with metrics after the last round
alone, by turns in one process. One run of as many rounds comes first and is not counted: it compiles what the others
find, and with fewer rounds nothing may be compiled. TASK=STORE:ROUNDS gives a task its own number of rounds. With
--processes each is `clipline train` in a process of its own, from its start to its end.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import recording
import torch

import clipline
from clipline.cli.train import run

EVERY = 10  # rounds: as often metrics are measured


def seconds(task: str, store: str, every: int, rounds: int, wanted: argparse.Namespace, out: Path) -> float:
    """Of one training, from its data to its report."""
    seed = len(list(out.parent.iterdir()))
    if wanted.processes:
        given = {
            "data": store, "rounds": rounds, "cohort-size": wanted.users, "device": wanted.device,
            "precision": wanted.precision, "evaluate-every": every, "seed": seed, "out": out,
        }  # fmt: skip
        flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-m", "clipline", "train", task, *flags], check=True, capture_output=True)
        return time.perf_counter() - begun
    named = clipline.task_named(task)
    settings = replace(
        named.settings, data=store, population_size=None, test_users=None, rounds=rounds, cohort_size=wanted.users,
        device=wanted.device, precision=wanted.precision, evaluate_every=every, seed=seed,
    )  # fmt: skip
    said = io.StringIO()
    begun = time.perf_counter()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        run(named, settings, out, None, False, report=True)
    if wanted.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def main() -> None:
    """Measure by turns, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", nargs="+", metavar="TASK=STORE[:ROUNDS]")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--users", type=int, default=100, help="a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--processes", action="store_true", help="each in a process of its own, from start to end")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="beside-training-") as folder:
        for training in wanted.trainings:
            task, _, where = training.partition("=")
            store, _, own = where.partition(":")
            rounds = int(own or wanted.rounds)
            taken: dict[str, list[float]] = {"without": [], "with": []}
            begun = time.perf_counter()
            seconds(task, store, rounds, rounds, wanted, Path(folder) / f"{task}-first")
            print(f"{task}: {time.perf_counter() - begun:.1f} s, not counted", file=sys.stderr, flush=True)
            for turn in range(wanted.turns):
                for name, every in (("without", rounds), ("with", EVERY)):
                    out = Path(folder) / f"{task}-{turn}-{name}"
                    taken[name].append(seconds(task, store, every, rounds, wanted, out))
                    print(f"{task}, {name} metrics: {taken[name][-1]:.2f} s", file=sys.stderr, flush=True)
            plain, measured = statistics.median(taken["without"]), statistics.median(taken["with"])
            spread = [", ".join(f"{one:.2f}" for one in taken[name]) for name in ("without", "with")]
            rows.append((f"{task}, {rounds} rounds", *spread, f"{100 * (measured / plain - 1):+.1f}%"))
    text = recording.table(("training", "without, s", "with, s", "longer by"), rows)
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}."
        what = f"{wanted.users} real users a round; metrics every {EVERY} rounds. Wanted: at most 5%."
        recording.record(f"Metrics beside training on {wanted.device}", f"{about}\n{what}\n\n{text}")


if __name__ == "__main__":
    main()
