"""Question: what do the syncs of a run directory cost, and does charging ahead keep them below 2%?

Peer: the same training with every sync of files and folders left out. Run `python benchmarks/sync_cost.py` in the
installed environment. Turns alternate in one process. Each row is a training; the latency of the disk is measured
first, as an append of one line with its sync.

Last result, 2026-11-19, x86_64, 2 idle cores, ext4 with 0.11 ms an append, torch 2.13.0, 3 turns, ms a round with and
without syncs: main job, noise from a seed 132.0 and 137.0 (-3.6%); main job, from the system 119.2 and 124.8 (-2.6%);
30 users a round, from a seed 36.3 and 36.0 (+0.3%). So the cost is below what these timings can tell, and below 2%.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import clipline as cl
from clipline.tasks import task_named

CASES = (  # users a round, rounds
    ("main job", 300, 60),
    ("small rounds", 30, 400),
)


def latency(folder: Path, times: int = 200) -> float:
    """Median seconds of an append that is on disk when it returns."""
    taken = []
    with (folder / "probe").open("ab") as file:
        for _ in range(times):
            begun = time.perf_counter()
            file.write(b"x" * 200)
            file.flush()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


@contextmanager
def without_syncs() -> Iterator[None]:
    """Let nothing wait for the disk."""
    with mock.patch.multiple(os, fsync=lambda descriptor: None, fdatasync=lambda descriptor: None):
        yield


def seconds(case: tuple[str, int, int], source: str, folder: Path) -> float:
    """A training of the handwriting task into a new run directory, without the making of its data."""
    _, cohort, rounds = case
    task = task_named("handwriting")
    settings = dataclasses.replace(
        task.settings,
        cohort_size=cohort,
        rounds=rounds,
        population_size=3000,
        epsilon=None,
        noise_multiplier=0.05,
        noise_source=source,
        workers=1,
    )
    training = task.training(settings)
    begun = time.perf_counter()
    training.run([cl.RunDirectory(folder)])
    return time.perf_counter() - begun


def main() -> None:
    """Print a table: a row for each case and source of noise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="a folder on the disk in question", default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        root = Path(folder)
        print(f"one append with its sync: {1000 * latency(root):.2f} ms")
        print("case          noise   rounds  ms a round  without syncs  cost")
        for case in CASES:
            for source in ("seed", "system"):
                pairs = []
                for turn in range(args.turns):
                    name = f"{case[0]} {source} {turn}"
                    with without_syncs():
                        bare = seconds(case, source, root / f"{name} bare")
                    pairs.append((seconds(case, source, root / name), bare))
                synced, bare = (statistics.median(one) / case[2] for one in zip(*pairs, strict=True))
                cost = statistics.median(one / other for one, other in pairs) - 1
                print(f"{case[0]:13} {source:7} {case[2]:6d}  {1000 * synced:10.2f}  {1000 * bare:13.2f}  {cost:+.1%}")


if __name__ == "__main__":
    main()
