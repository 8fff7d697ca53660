"""What do 20 seeds cost in one program, against 20 runs one after the other? Peer: the same engine, run by run.

python benchmarks/many_runs.py [--runs 20] [--rounds 10] [--device cpu|cuda] [--record]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import recording
import torch

import clipline
from clipline.federated.clients import SMALL_MODEL


def main() -> None:
    """Measure both ways on the same data, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--cohort", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    task = clipline.task_named("handwriting")
    base = replace(
        task.settings, users=3000, cohort=wanted.cohort, rounds=wanted.rounds, device=wanted.device,
        engine="stacked", evaluate_every=wanted.rounds,
    )  # fmt: skip
    loaded = task.load(base)
    settings = [replace(base, seed=seed) for seed in range(wanted.runs)]

    def trainings() -> list[clipline.Training]:
        return [task.training(one, loaded) for one in settings]

    made = trainings()  # calibrations and compilers warm up here, for both
    begun = time.perf_counter()
    alone = [training.run() for training in made]
    apart = time.perf_counter() - begun
    made = trainings()
    begun = time.perf_counter()
    together = clipline.run_together(made)
    side_by_side = time.perf_counter() - begun
    gap = max(float((a.state.params - b.state.params).abs().max()) for a, b in zip(alone, together, strict=True))
    assert made[0].plain.flat.dim < SMALL_MODEL
    rows = [
        ("one after the other", f"{apart:.2f}", f"{apart / wanted.runs:.3f}", "1.0"),
        ("side by side", f"{side_by_side:.2f}", f"{side_by_side / wanted.runs:.3f}", f"{apart / side_by_side:.1f}"),
    ]
    text = recording.table(("way", "seconds", "seconds a run", "times faster"), rows)
    text += f"\n\nThe greatest difference of any parameter between the two ways is {gap:.1g}."
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}."
        what = f"{wanted.runs} seeds of handwriting, {wanted.cohort} of 3000 users a round, {wanted.rounds} rounds."
        recording.record(f"Many runs in one program on {wanted.device}", f"{about}\n{what}\n\n{text}")


if __name__ == "__main__":
    main()
