"""How long does EMNIST-CR take from beginning to end: 1500 rounds of 100 users, with evaluation? No peer.

To reach on one H200: under 90 seconds at the real user sizes (about 3400 users, 198 examples on average).

    python benchmarks/whole_task.py [--rounds 1500] [--device cuda] [--precision bf16] [--record]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import recording
import torch

import clipline
from clipline.federated.round import TrainState
from clipline.training.result import RoundReport


class Printed(clipline.Callback):
    """A line every 250 rounds."""

    def on_round(self, report: RoundReport, state: TrainState) -> None:
        """Print it."""
        if (report.round_index + 1) % 250 == 0:
            print(f"round {report.round_index + 1}: {dict(report.metrics)}, clip {report.clip:.3f}", flush=True)


def main() -> None:
    """Train the task as `clipline train emnist_cr` does, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--population-size", type=int, default=3400)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    task = clipline.task_named("emnist_cr")
    settings = replace(
        task.settings,
        rounds=wanted.rounds,
        population_size=wanted.population_size,
        device=wanted.device,
        precision=wanted.precision,
    )
    begun = time.perf_counter()
    loaded = task.load(settings)
    training = task.training(settings, loaded)
    ready = time.perf_counter()

    result = training.run([clipline.Evaluate(loaded.evaluate, every=settings.evaluate_every), Printed()])
    done = time.perf_counter()
    seconds = sorted(report.unprivate_seconds for report in result.reports)
    examples = loaded.population.examples / len(loaded.population)
    memory = torch.cuda.max_memory_allocated() if wanted.device.startswith("cuda") else recording.peak_bytes()
    rows = [
        ("drawing and uploading the users", f"{ready - begun:.1f} s"),
        ("training and evaluating, compilation included", f"{done - ready:.1f} s"),
        ("a round, median", f"{seconds[len(seconds) // 2] * 1e3:.1f} ms"),
        ("the 20 slowest rounds together (compilation)", f"{sum(seconds[-20:]):.1f} s"),
        ("peak memory", f"{memory / 2**30:.2f} GiB"),
        ("accuracy on validation users", f"{result.metrics['accuracy']:.4f}"),
    ]
    text = recording.table(("what", "measured"), rows)
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}."
        what = f"Stand-in users: {len(loaded.population)} with {examples:.0f} examples on average; Poisson sampling, "
        what += f"100 a round, {wanted.rounds} rounds, evaluated every 10; {result.guarantee}."
        recording.record(f"A whole task on {wanted.device}", f"{about}\n{what}\n\n{text}")


if __name__ == "__main__":
    main()
