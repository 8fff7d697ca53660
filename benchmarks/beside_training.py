"""What do metrics and checkpoints add to a whole training on real users? Peer: the same training with neither.

    python benchmarks/beside_training.py emnist_cr=benchmarks/.stores/emnist62 [so_lr=STORE ...] [--rounds 600] \
        [--device cuda] [--precision bf16] [--turns 2] [--record]

To reach: at most 5%. `clipline train` from the start of the process to the report, with metrics every ten rounds (and
checkpoints as often as they are written), and with metrics after the last round alone, by turns. One run of as many
rounds comes first and is not counted: it compiles what the others load, and with fewer rounds nothing may be compiled.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import recording

SOURCE = Path(__file__).resolve().parents[1] / "src"


def seconds(task: str, store: str, every: int, wanted: argparse.Namespace, scratch: Path, number: int) -> float:
    """Of one `clipline train`, start and report included."""
    command = [sys.executable, "-m", "clipline", "train", task, "--data", store, "--rounds", str(wanted.rounds)]
    command += ["--cohort-size", str(wanted.users), "--device", wanted.device, "--precision", wanted.precision]
    command += ["--evaluate-every", str(every), "--seed", str(number), "--out", str(scratch / f"{task}-{number}")]
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    cache = {"CLIPLINE_CACHE_DIR": str(scratch / "programs"), "TRITON_CACHE_DIR": str(scratch / "triton")}
    begun = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **cache, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"clipline train {task} failed: {done.stderr.strip()[-400:]}")
    return time.perf_counter() - begun


def main() -> None:
    """Measure by turns, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainings", nargs="+", metavar="TASK=STORE")
    parser.add_argument("--rounds", type=int, default=600)
    parser.add_argument("--users", type=int, default=100, help="a round")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="beside-training-") as folder:
        for training in wanted.trainings:
            task, _, store = training.partition("=")
            taken: dict[str, list[float]] = {"without": [], "with": []}
            seconds(task, store, wanted.rounds, wanted, Path(folder), 0)
            for turn in range(wanted.turns):
                for name, every in (("without", wanted.rounds), ("with", 10)):
                    number = 1 + 2 * turn + (name == "with")
                    taken[name].append(seconds(task, store, every, wanted, Path(folder), number))
                    print(f"{task}, {name} metrics every ten rounds: {taken[name][-1]:.1f} s", flush=True)
            plain, measured = statistics.median(taken["without"]), statistics.median(taken["with"])
            spread = [", ".join(f"{one:.1f}" for one in taken[name]) for name in ("without", "with")]
            rows.append((f"{task}, {wanted.rounds} rounds", *spread, f"{100 * (measured / plain - 1):+.1f}%"))
    text = recording.table(("run", "without, s", "with, s", "longer by"), rows)
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}. Wanted: at most 5%."
        recording.record(f"Metrics beside training on {wanted.device}", f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
