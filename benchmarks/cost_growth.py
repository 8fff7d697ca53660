"""How do time and memory grow with the cohort and with the population? No peer: the law is the question.

To reach: time linear in the cohort and flat in the population, memory flat in both. Each row is a process of its own.

    python benchmarks/cost_growth.py [--task handwriting] [--device cpu|cuda] [--cohorts 10,100,1000,14000]
        [--populations 1000,10000,...] [--examples 16] [--record]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import recording
import rounds
import synthetic
import torch

import clipline


def one_cohort(wanted: argparse.Namespace) -> dict[str, float]:
    """Seconds a round and peak memory with one cohort size, of a population that just holds the largest."""
    largest = max(wanted.cohorts)
    sizes = np.full(largest, wanted.examples)
    training = synthetic.training(
        wanted.task, sizes, wanted.cohort_size, device=wanted.device, precision=wanted.precision, engine=wanted.engine
    )
    seconds, _ = synthetic.seconds_a_round(training, wanted.rounds, warm_up=1)
    return {"seconds": seconds, "bytes": _memory(wanted.device)}


def one_population(wanted: argparse.Namespace) -> dict[str, float]:
    """The same for a stored population of one size, 100 users a round; nothing of it is read but those."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "users"
        command = [sys.executable, __file__, "--write", str(store), "--population", str(wanted.population)]
        subprocess.run(command, check=True)
        population = clipline.Population.open(store)
        model = torch.nn.Linear(8, 4)

        def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            logits = model(batch["x"].float())
            return torch.nn.functional.cross_entropy(logits, batch["y"].long(), reduction="none")

        training = rounds.flat_training(
            model, loss, population, rounds=1000, cohort_size=100, local=clipline.LocalSGD(0.1), seed=0,
            noise_multiplier=1.0,
        )  # fmt: skip
        seconds, _ = synthetic.seconds_a_round(training, 20)
        return {"seconds": seconds, "bytes": recording.own_bytes()}


def write_store(store: Path, users: int) -> None:
    """`users` users with two examples each."""
    offsets = np.arange(users + 1, dtype=np.int64) * 2
    rng = np.random.default_rng(0)
    fields = {"x": rng.integers(0, 256, (2 * users, 8), np.uint8), "y": rng.integers(0, 4, 2 * users, np.uint8)}
    clipline.Population(offsets, fields).save(store)


def _memory(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else recording.peak_bytes()


def ask(wanted: argparse.Namespace, *more: str) -> dict[str, float]:
    """A row, measured in a process of its own."""
    given = [f"--task={wanted.task}", f"--device={wanted.device}", f"--examples={wanted.examples}",
             f"--rounds={wanted.rounds}", f"--precision={wanted.precision}", f"--engine={wanted.engine}",
             "--cohorts=" + ",".join(map(str, wanted.cohorts))]  # fmt: skip
    done = subprocess.run([sys.executable, __file__, *given, *more], check=True, stdout=subprocess.PIPE, text=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def numbers(text: str) -> list[int]:
    """`10,100` as a list."""
    return [int(word) for word in text.split(",") if word]


def main() -> None:
    """Measure row by row, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="handwriting")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--examples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cohorts", type=numbers, default=[10, 100, 1000, 14_000])
    parser.add_argument("--populations", type=numbers, default=[10**k for k in range(3, 8)])
    parser.add_argument("--record", action="store_true")
    for hidden, kind in (("--cohort-size", int), ("--population", int), ("--write", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.write is not None:
        return write_store(wanted.write, wanted.population)
    if wanted.cohort_size is not None or wanted.population is not None:
        return print(json.dumps(one_cohort(wanted) if wanted.cohort_size is not None else one_population(wanted)))
    rows = []
    for cohort in wanted.cohorts:
        row = ask(wanted, f"--cohort-size={cohort}")
        rows.append((f"{cohort:,}", f"{row['seconds']:.3f}", f"{row['seconds'] / cohort * 1e3:.3f}",
                     f"{row['bytes'] / 2**20:.0f}"))  # fmt: skip
    text = recording.table(("users a round", "seconds a round", "ms a user", "peak memory, MiB"), rows)
    rows = []
    for population in wanted.populations:
        row = ask(wanted, f"--population={population}")
        rows.append((f"{population:,}", f"{row['seconds'] * 1e3:.2f}", f"{row['bytes'] / 2**20:.0f}"))
    if rows:
        text += "\n\n" + recording.table(("users stored", "ms a round of 100", "memory beside mapped files, MiB"), rows)
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}."
        what = f"Cohorts: {wanted.task}, {wanted.examples} examples a user. Populations: a linear model, stored users."
        recording.record(f"Growth of cost: {wanted.task} on {wanted.device}", f"{about}\n{what}\n\n{text}")


if __name__ == "__main__":
    main()
