"""What do 20 seeds cost in one program, against 20 runs one after the other? Peer: the same engine, run by run.

python benchmarks/many_runs.py [--runs 20] [--rounds 20] [--device cpu|cuda] [--alone 5] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import recording

import clipline
from clipline.engine.choose import SMALL_MODEL

SKIPPED = 4  # rounds


def usual_round(result: clipline.TrainResult) -> float:
    """Median seconds of a run's rounds but the first: the mean would be that of the one round that compiles."""
    return statistics.median(report.unprivate_seconds for report in result.reports[SKIPPED:])


def main() -> None:
    """Measure both ways on the same data, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cohort-size", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--alone", type=int, help="how many of the runs to measure one after the other; all")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    wanted.alone = wanted.alone or wanted.runs
    task = clipline.task_named("handwriting")
    base = replace(
        task.settings, population_size=3000, cohort_size=wanted.cohort_size, rounds=wanted.rounds, device=wanted.device,
        engine="stacked", compiled_steps="always", evaluate_every=wanted.rounds,
    )  # fmt: skip
    loaded = task.load(base)
    settings = [replace(base, seed=seed) for seed in range(wanted.runs)]

    def trainings() -> list[clipline.Training]:
        return [task.training(one, loaded) for one in settings]

    made = trainings()  # calibrations are kept, for both ways
    begun = time.perf_counter()
    alone = [training.run() for training in made[: wanted.alone]]
    apart = (time.perf_counter() - begun) * wanted.runs / len(alone)
    made = trainings()
    begun = time.perf_counter()
    together = clipline.run_together(made)
    side_by_side = time.perf_counter() - begun
    gap = max(float((a.state.params - b.state.params).abs().max()) for a, b in zip(alone, together, strict=False))
    assert made[0].dim < SMALL_MODEL
    steady = [statistics.mean(map(usual_round, alone)) * wanted.runs, max(map(usual_round, together))]
    ways = zip(("one after the other", "side by side"), (apart, side_by_side), steady, strict=True)
    rows = [
        (name, f"{whole:.2f}", f"{apart / whole:.1f}", f"{1000 * later:.1f}", f"{steady[0] / later:.1f}")
        for name, whole, later in ways
    ]
    header = (
        "way",
        "seconds, all runs",
        "times faster",
        f"ms, a usual later round of all {wanted.runs}",
        "times faster",
    )
    text = recording.table(header, rows)
    text += f"\n\nA usual round is the median of all but the first {SKIPPED}, in which a GPU's programs are compiled."
    if len(alone) < wanted.runs:
        text += f" One after the other: {len(alone)} runs, times {wanted.runs} / {len(alone)}."
    text += f"\nThe greatest difference of any parameter between the two ways is {gap:.1g}."
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}."
        what = (
            f"{wanted.runs} seeds of handwriting, {wanted.cohort_size} of 3000 users a round, {wanted.rounds} rounds."
        )
        recording.record(f"Many runs in one program on {wanted.device}", f"{about}\n{what}\n\n{text}")


if __name__ == "__main__":
    main()
