"""What share of a round is spent on keeping users apart? Peer: the same round without it. Wanted: under 1%.

    python benchmarks/isolation_cost.py [--record]

The time inside `Isolation` (seeding generators, comparing and putting back what a model could remember) and inside the
switching of shared generators is added up, round by round, and divided by the time of the round.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np
import recording
import synthetic
import torch
from rounds import Rounds

from clipline.engine import problem
from clipline.engine.isolation.generators import preserve_generators
from clipline.engine.isolation.guard import Isolation
from clipline.engine.stacked import trainer as stacked

ROUNDS = 9
spent = [0.0]


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; what it takes is added to `spent`."""

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - begun

    return watched


@contextmanager
def timed_generators():  # type: ignore[no-untyped-def]
    """`preserve_generators`, its beginning and its end timed."""
    inside = preserve_generators()
    timed(inside.__enter__)()
    try:
        yield
    finally:
        timed(inside.__exit__)(None, None, None)


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    for name in ("before_block", "seed", "after_user", "after_block"):  # `after_stack` calls the last two
        setattr(Isolation, name, timed(getattr(Isolation, name)))
    problem.preserve_generators = stacked.preserve_generators = timed_generators
    torch.set_num_threads(1)
    rows = []
    for task, engine, size, cohort in (
        ("handwriting", "stacked", 12, 100),
        ("handwriting", "one-by-one", 12, 100),
        ("emnist_cr", "one-by-one", 40, 5),
        ("emnist_ae", "one-by-one", 40, 5),
        ("shakespeare", "one-by-one", 4, 5),
    ):
        sizes = np.full(200, size, np.int64)
        rounds, shares, whole = Rounds(synthetic.training(task, sizes, cohort, engine=engine)), [], []
        for number in range(ROUNDS + 2):
            spent[0], begun = 0.0, time.perf_counter()
            rounds.next()
            took = time.perf_counter() - begun
            if number >= 2:
                shares.append(spent[0] / took)
                whole.append(took)
        rows.append([task, engine, cohort, f"{1e3 * statistics.median(whole):.0f}", f"{statistics.median(shares):.2%}"])
    body = recording.table(["task", "engine", "users a round", "ms a round", "keeping users apart"], rows)
    print(body)
    if wanted.record:
        about = (
            f"`python benchmarks/isolation_cost.py --record`, {recording.machine('cpu')}, one thread. Wanted: under 1%."
        )
        recording.record("## Keeping users apart", f"{about}\n\n{body}")


if __name__ == "__main__":
    main()
