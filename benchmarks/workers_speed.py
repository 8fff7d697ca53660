"""How much faster is a round with more worker processes? Run: OMP_NUM_THREADS=1 python benchmarks/workers_speed.py [N]

One round of emnist_cr (20 users of a fixed-size cohort), with 1 worker and with N (2) in turn, so that a busy machine
disturbs both; the ratio of each pair is what counts. Where others use the same cores, the ratio of this process's own
processor seconds says what idle cores would give. Starting the workers is not in the round; it is printed apart.

2026-11-15, 2 cores that others were using: processor seconds 4.52 and 2.44, ratio 1.84 (1.76 to 1.95), wall clock 0.94
(0.65 to 1.17) as there was no second core to be had; start 0.035 s. On the same cores nearly idle, `clipline train`
with the same settings: 5.05 s and 2.67 s, ratio 1.89, one pair.
"""

import statistics
import sys
import time
from dataclasses import replace

from rounds import Rounds

from clipline import task_named

WORKERS = int(sys.argv[1]) if len(sys.argv) > 1 else 2
PAIRS = 6

task = task_named("emnist_cr")
settings = replace(
    task.settings,
    population_size=50,
    cohort_size=20,
    rounds=1,
    sampling="fixed",
    epsilon=None,
    noise_multiplier=0.0,
    device="cpu",
)
trainings = {workers: task.training(replace(settings, workers=workers)) for workers in (1, WORKERS)}
seconds: dict[int, list[float]] = {1: [], WORKERS: []}
busy: dict[int, list[float]] = {1: [], WORKERS: []}
starts = []
for _ in range(PAIRS):
    for workers, training in trainings.items():
        rounds = Rounds(training)
        begun = time.perf_counter()
        with training.backend.running():
            ready, used = time.perf_counter(), time.process_time()
            rounds.next(last=True)
            seconds[workers].append(time.perf_counter() - ready)
            busy[workers].append(time.process_time() - used)
        if workers > 1:
            starts.append(ready - begun)
for name, taken in (("seconds", seconds), ("processor seconds here", busy)):
    ratios = [one / many for one, many in zip(taken[1], taken[WORKERS], strict=True)]
    medians = ", ".join(f"{statistics.median(taken[workers]):.2f} with {workers}" for workers in taken)
    print(f"{name}: {medians}; ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
print(f"start: {statistics.median(starts):.3f} s")
