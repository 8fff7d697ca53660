"""Which part of a round of 100 users is not local training? Peer: local training alone.

    python benchmarks/round_overhead.py [--tasks emnist_cr,so_nwp] [--device cuda] [--precision bf16] [--record]

To reach: under 5%. All else counts as outside: drawing the cohort and the noise, gathering, clipping and adding up, the
server, clip and ledger, and waiting. On a GPU training is the recorded steps of a round, replayed alone; on the CPU it
is the time in which this process trains its share of the users, batches included, so that waiting for other workers is
outside too. Rounds are taken in a row, as in training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import recording
import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from clipline_round import training
from rounds import Rounds

from clipline import FastParts, Training
from clipline.engine.gpu.recorded_step import GraphedStep


def rounds_in_a_row(training: Training, count: int) -> float:
    """Mean seconds of a round. The last is over when what it releases can be read, as in `Training.run`."""
    rounds, begun = Rounds(training), time.perf_counter()
    for number in range(count):
        release = rounds.next(last=number == count - 1)
    _ = release.fraction_within
    return (time.perf_counter() - begun) / count


def on_a_gpu(training: Training, count: int) -> tuple[float, float]:
    """Seconds of a round, and of the steps in it."""
    taken: list[tuple[GraphedStep, int]] = []
    replay = GraphedStep.replay

    def noted(self: GraphedStep, active: int) -> None:
        taken.append((self, active))
        replay(self, active)

    rounds_in_a_row(training, 4)  # everything is compiled and recorded
    GraphedStep.replay = noted  # type: ignore[method-assign]
    rounds_in_a_row(training, 1)
    GraphedStep.replay = replay  # type: ignore[method-assign]
    steps, whole = [], []
    assert len({id(own) for own, _ in taken}) == 1, "users of equal size train in one lane"
    for _ in range(3):
        whole.append(rounds_in_a_row(training, count))
        taken[0][0].step_index.zero_()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for own, active in taken:
            replay(own, active)
        torch.cuda.synchronize()
        steps.append(time.perf_counter() - begun)
    return statistics.median(whole), statistics.median(steps)


def on_cores(training: Training, count: int) -> tuple[float, float]:
    """Seconds of a round, and of the training of this process in it."""
    trainer: Any = training.trainer
    train, spent = trainer.train, [0.0]

    def timed(*given: Any) -> Iterator[Any]:
        blocks = train(*given)
        while True:
            begun = time.perf_counter()
            block = next(blocks, None)
            spent[0] += time.perf_counter() - begun
            if block is None:
                return
            yield block

    trainer.train = timed
    rounds_in_a_row(training, 1)
    spent[0] = 0.0
    return rounds_in_a_row(training, count), spent[0] / count


def main() -> None:
    """Measure task by task, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="emnist_cr,so_nwp,so_lr,shakespeare")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--compiled-steps", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--rounds", type=int, help="in a row; 50 on a GPU, 2 on cores")
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    gpu, rows = wanted.device.startswith("cuda"), []
    for task in wanted.tasks.split(","):
        count = wanted.rounds or (50 if gpu else 2)
        fast = FastParts(compiled_steps=wanted.compiled_steps)
        made = training(task, wanted.users, wanted.device, {"precision": wanted.precision, "fast": fast})
        with made.backend.running():
            whole, steps = (on_a_gpu if gpu else on_cores)(made, count)
        rows.append((task, f"{1e3 * whole:.2f}", f"{1e3 * steps:.2f}", f"{100 * (1 - steps / whole):.1f}%"))
        print(*rows[-1], file=sys.stderr)
    text = recording.table(("task", "ms a round", "ms of it training", "outside"), rows)
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}."
        what = f"{wanted.users} users of the sizes that the comparison with peers takes; {count} rounds in a row. "
        recording.record(f"Outside training on {wanted.device}", f"{about}\n{what}Wanted: under 5% outside.\n\n{text}")


if __name__ == "__main__":
    main()
