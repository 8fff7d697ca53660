"""What do users of very different sizes cost? The same number of steps, skewed and spread evenly.

Peer: the same engine on even users. To reach: within 1.25 times.

    python benchmarks/uneven_users.py [--task emnist_cr] [--device cuda] [--precision bf16]
        [--cohort-size 100] [--record]
"""

from __future__ import annotations

import argparse

import numpy as np
import recording
import synthetic
from numpy.typing import NDArray

import clipline

POPULATION = 400


def emnist_sizes(rng: np.random.Generator) -> NDArray[np.int64]:
    """As EMNIST's writers: 198 examples on average, from about 20 to 418."""
    return np.exp(rng.normal(np.log(180), 0.42, POPULATION)).clip(19, 418).round().astype(np.int64)


def stack_overflow_sizes(rng: np.random.Generator) -> NDArray[np.int64]:
    """As Stack Overflow's users, capped at 1000: a long tail, many users with few."""
    return np.exp(rng.normal(np.log(150), 1.2, POPULATION)).clip(4, 1000).round().astype(np.int64)


def main() -> None:
    """Measure by turns, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="emnist_cr")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--cohort-size", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    rows = []
    for name, draw in (("EMNIST", emnist_sizes), ("Stack Overflow", stack_overflow_sizes)):
        sizes = draw(np.random.default_rng(1))
        seconds = {}
        for kind in ("skewed", "even"):
            spread = sizes if kind == "skewed" else np.full(POPULATION, round(sizes.mean()))
            training = synthetic.training(
                wanted.task, spread, wanted.cohort_size, device=wanted.device, precision=wanted.precision
            )
            taken, _ = synthetic.seconds_a_round(training, wanted.rounds)
            batch = clipline.task_named(wanted.task).settings.batch_size
            steps = np.ceil(spread / batch).mean() * wanted.cohort_size
            seconds[kind] = taken / steps
        ratio = seconds["skewed"] / seconds["even"]
        rows.append((name, f"{sizes.min()} to {sizes.max()}, mean {sizes.mean():.0f}",
                     f"{seconds['skewed'] * 1e6:.0f}", f"{seconds['even'] * 1e6:.0f}", f"{ratio:.2f}"))  # fmt: skip
    text = recording.table(("sizes as", "examples a user", "skewed, us a step", "even, us a step", "ratio"), rows)
    print(text)
    if wanted.record:
        about = f"`{recording.command_line()}`, {recording.machine(wanted.device)}. Medians of {wanted.rounds} rounds"
        recording.record(
            f"Uneven users: {wanted.task} on {wanted.device}",
            f"{about};\na step is one batch of one user. Wanted: a ratio of 1.25 or less.\n\n{text}",
        )


if __name__ == "__main__":
    main()
