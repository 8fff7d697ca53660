"""What share of a round is spent on keeping users apart? Peer: the same round without it. Wanted: under 1%.

    python benchmarks/isolation_cost.py [--record] [--turns 5]

Everything that is there to keep users apart is timed where it happens, beside the training of which it is a part:
seeding NumPy's and Python's generators, which users would share (*seeding*), seeding torch's and giving all of them
back to the caller (*generators*), and comparing and putting back what a model could remember (*checks*). The tasks are
measured by turns. The time of a part is the median of its calls times their number, so that calls during which another
process had the core do not count; the time of a round is the median on the clock of its thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import textwrap
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import recording
import synthetic
import torch
from rounds import Rounds

from clipline.engine.core import one_by_one, problem
from clipline.engine.isolation.guard import Isolation
from clipline.engine.stacked import trainer as stacked
from clipline.engine.workers import single

clock = time.perf_counter
ROUNDS = 6  # a turn, after one to warm up
TASKS = (
    ("handwriting", "stacked", 12, 100),
    ("handwriting", "one-by-one", 12, 100),
    ("emnist_cr", "one-by-one", 40, 5),
    ("emnist_ae", "one-by-one", 40, 5),
    ("shakespeare", "one-by-one", 4, 5),
)


@dataclass(eq=False)
class Taken:
    """Seconds of the rounds of one task, and of the calls in them."""

    rounds: list[float] = field(default_factory=list)
    all: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    checks: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seeding: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def cells(self, cohort: int) -> list[str]:
        """The line of the table, after the task."""
        whole = statistics.median(self.rounds)
        together, checks, seeding = (
            sum(statistics.median(calls) * len(calls) for calls in kind.values()) / len(self.rounds)
            for kind in (self.all, self.checks, self.seeding)
        )
        shares = [f"{part / whole:.2%}" for part in (seeding, together - checks - seeding, checks, together)]
        return [f"{1e3 * whole:.0f}", *shares, f"{1e6 * together / cohort:.0f}"]


class Spent:
    """Times calls that keep users apart, and writes to `to` what they took."""

    def __init__(self) -> None:
        self.to = Taken()
        self._inside = False
        self._training = 0.0

    def timed(self, name: str, inner: Callable[..., Any], kind: str = "") -> Callable[..., Any]:
        """The same function, timed. One within another counts once; the training of a user within it does not."""

        def outer(*args: Any) -> Any:
            inside, self._inside = self._inside, True
            if not inside:
                self._training = 0.0
            begun = clock()
            try:
                return inner(*args)
            finally:
                took = clock() - begun
                self._inside = inside
                if not inside:
                    self.to.all[name].append(took - self._training)
                if kind:
                    getattr(self.to, kind)[name].append(took)

        return outer

    def training(self, inner: Callable[[], object]) -> Callable[[], object]:
        """The training of one user."""

        def outer() -> object:
            begun = clock()
            try:
                return inner()
            finally:
                took = clock() - begun
                self._training = took

        return outer

    def timed_context(self, name: str, inner: Callable[..., AbstractContextManager[Any]]) -> Callable[..., Any]:
        """The same context manager, its beginning and its end timed."""

        @contextmanager
        def outer(*args: Any) -> Iterator[Any]:
            manager = inner(*args)
            given = self.timed(f"{name} begins", manager.__enter__)()
            try:
                yield given
            finally:
                self.timed(f"{name} ends", manager.__exit__)(None, None, None)

        return outer


def time_everything(spent: Spent) -> None:
    """Time whatever keeps users apart."""
    for name in ("before_block", "after_user", "after_block"):  # `after_stack` calls the last two
        setattr(Isolation, name, spent.timed(name, getattr(Isolation, name), "checks"))
    Isolation.seed = spent.timed("seed", Isolation.seed, "seeding")  # type: ignore[method-assign]
    apart = problem.Problem.users_apart
    problem.Problem.users_apart = spent.timed_context("block", apart)  # type: ignore[method-assign]
    for module in (stacked, single):
        preserve = module.preserve_generators  # type: ignore[attr-defined]
        module.preserve_generators = spent.timed_context(module.__name__, preserve)  # type: ignore[attr-defined]
    isolated = one_by_one.OneByOne._train_isolated

    def train_isolated(self: one_by_one.OneByOne, key: int, train: Callable[[], object]) -> bool:
        return isolated(self, key, spent.training(train))

    one_by_one.OneByOne._train_isolated = spent.timed("user", train_isolated)  # type: ignore[method-assign]


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--turns", type=int, default=5)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    spent = Spent()
    time_everything(spent)
    going = [
        Rounds(synthetic.training(task, np.full(200, size, np.int64), cohort, engine=engine))
        for task, engine, size, cohort in TASKS
    ]
    taken = [Taken() for _ in TASKS]
    for _ in range(wanted.turns):
        for rounds, of_task in zip(going, taken, strict=True):
            spent.to = Taken()
            rounds.next()
            spent.to = of_task
            for _ in range(ROUNDS):
                begun = time.thread_time()
                rounds.next()
                of_task.rounds.append(time.thread_time() - begun)
    rows = [
        [task, engine, cohort, *of_task.cells(cohort)]
        for (task, engine, _, cohort), of_task in zip(TASKS, taken, strict=True)
    ]
    head = ["task", "engine", "users a round", "ms a round", "seeding", "generators", "checks", "together", "µs a user"]
    body = recording.table(head, rows)
    print(body)
    if wanted.record:
        about = (
            f"`{recording.command_line()}`, {recording.machine('cpu')}, load {os.getloadavg()[0]:.0f}, one thread: the "
            "share of a round that is spent on seeding NumPy's and Python's generators for every user (or step of a "
            "stack), on seeding torch's and giving all generators back to the caller, and on comparing and putting "
            f"back what a model could remember. Medians over {wanted.turns * ROUNDS} rounds. Wanted: under 1%."
        )
        recording.record("Keeping users apart", f"{textwrap.fill(about, 135)}\n\n{body}")


if __name__ == "__main__":
    main()
