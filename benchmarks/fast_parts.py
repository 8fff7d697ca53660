"""What does each fast part buy? A round with it and without it, by turns, each in a process of its own.

Peer: the same round with the part switched off (`FastParts`). What does not make a usual job 1.5 times
faster, or two of the paper's tasks 1.2 times, is taken out.

    python benchmarks/fast_parts.py [--device cpu|cuda] [--parts prefetch ...] [--turns 3] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import recording
import synthetic
from torch.nn import functional

from clipline.engine.core.fast_parts import FastParts
from clipline.engine.gpu.kernels import convolution, lstm
from clipline.engine.stacked import vmap_layers

sys.path.insert(0, str(Path(__file__).with_name("peers")))
from clipline_round import training as even_training

EVERYTHING = FastParts(compiled_steps="always")


@dataclass(frozen=True)
class Bench:
    """Where a part should show."""

    task: str
    users: int
    rounds: int
    workers: int = 1
    precision: str = "float32"


ON_CORES = {
    "prefetch": Bench("so_lr", 20, 9, workers=2),
}
ON_GPU = {
    "compiled_steps": Bench("emnist_cr", 100, 20, precision="bf16"),
    "prefetch": Bench("so_lr", 100, 20),
    "device_noise": Bench("so_lr", 100, 20),
    "kernels": Bench("emnist_cr", 100, 20, precision="bf16"),  # both of the next two
    "lstm_kernel": Bench("shakespeare", 100, 10, precision="bf16"),
    "convolution_kernels": Bench("emnist_cr", 100, 20, precision="bf16"),
    "stacked_product": Bench("emnist_cr", 100, 20, precision="bf16"),  # dense layers, `stacked/vmap_layers.py`
}


def _without(part: str) -> None:
    """Put the plain twin in the place of a single part of what one switch turns off, in this process."""
    if part == "lstm_kernel":
        lstm.fused = lambda tensor: False
    elif part == "convolution_kernels":
        convolution.fused = lambda tensor: False
    elif part == "stacked_product":
        vmap_layers.Linear.forward = lambda self, values: functional.linear(values, self.weight, self.bias)
    else:
        raise SystemExit(f"no such part: {part!r}")


def measured(part: str, bench: Bench, device: str, used: bool) -> float:
    """Median milliseconds of a round in this process."""
    fast = EVERYTHING
    if hasattr(EVERYTHING, part):
        off = "never" if part == "compiled_steps" else False
        fast = EVERYTHING if used else replace(EVERYTHING, **{part: off})
    elif not used:
        _without(part)
    options = {"fast": fast, "workers": bench.workers if device == "cpu" else 1, "precision": bench.precision}
    made = even_training(bench.task, bench.users, device, options)
    with made.backend.running():
        return 1e3 * synthetic.seconds_a_round(made, bench.rounds)[0]


def main() -> None:
    """Measure by turns, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", nargs="*")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--one", nargs=2, metavar=("PART", "USED"), help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    benches = ON_CORES if wanted.device == "cpu" else ON_GPU
    if wanted.one:
        part, used = wanted.one
        print(measured(part, benches[part], wanted.device, used == "True"))
        return
    rows = []
    for part in wanted.parts or benches:
        taken: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(wanted.turns):
            for used in (True, False) if turn % 2 == 0 else (False, True):
                command = [sys.executable, __file__, "--device", wanted.device, "--one", part, str(used)]
                out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                taken[used].append(float(out.split()[-1]))
        fast, plain = (statistics.median(taken[used]) for used in (True, False))
        bench = benches[part]
        what = f"{bench.task}, {bench.users} users"
        least = [f"{min(taken[used]):.1f}" for used in (True, False)]
        rows.append((f"`{part}`", what, f"{fast:.1f}", f"{plain:.1f}", f"{100 * (plain / fast - 1):+.0f}%", *least))
        print(rows[-1], {used: [round(one, 1) for one in all_] for used, all_ in taken.items()}, flush=True)
    text = recording.table(
        ("part", "benchmark", "with, ms a round", "without", "slower without it by", "least with", "least without"),
        rows,
    )
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}"
        recording.record(f"What each fast part buys on {wanted.device}", f"{about}; medians of turns.\n\n{text}")


if __name__ == "__main__":
    main()
