"""What share of a round is spent on keeping users apart? Peer: the same round without it. Wanted: under 1%.

    python benchmarks/isolation_cost.py [--record] [--turns 5]

Everything that is there to keep users apart is timed where it happens, beside the training of which it is a part:
seeding the generators that users would share and giving them back to the caller (*generators*), and comparing and
putting back what a model could remember (*checks*). The tasks are measured by turns, and everything is timed on the
clock of the thread, which other processes do not move. Reading it takes half a microsecond; what the parts hold of that
is taken off.
"""

from __future__ import annotations

import argparse
import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import recording
import synthetic
import torch
from rounds import Rounds

from clipline.engine import one_by_one, problem
from clipline.engine.isolation.guard import Isolation
from clipline.engine.parallel import single
from clipline.engine.stacked import trainer as stacked

clock = time.thread_time
ROUNDS = 6  # a turn, after one to warm up
TASKS = (
    ("handwriting", "stacked", 12, 100),
    ("handwriting", "one-by-one", 12, 100),
    ("emnist_cr", "one-by-one", 40, 5),
    ("emnist_ae", "one-by-one", 40, 5),
    ("shakespeare", "one-by-one", 4, 5),
)


class Spent:
    """Seconds of the round so far: all that keeps users apart, and of these the checks."""

    def __init__(self) -> None:
        self.all = self.checks = 0.0
        self._inside = False
        self._reading = min(timeit.repeat(clock, number=1000, repeat=50)) / 1000  # seconds to read the clock

    def timed(self, inner: Callable[..., Any], *, check: bool = False) -> Callable[..., Any]:
        """The same function, timed. One within another counts once."""

        def outer(*args: Any) -> Any:
            inside, self._inside = self._inside, True
            begun = clock()
            try:
                return inner(*args)
            finally:
                took = clock() - begun - self._reading
                self._inside = inside
                self.all += -2 * self._reading if inside else took
                if check:
                    self.checks += took

        return outer

    def training(self, inner: Callable[[], object]) -> Callable[[], object]:
        """The training of one user, which is part of what is timed and does not count."""

        def outer() -> object:
            self._inside = False
            begun = clock()
            try:
                return inner()
            finally:
                self.all -= clock() - begun + self._reading
                self._inside = True

        return outer

    def timed_context(self, inner: Callable[..., AbstractContextManager[None]]) -> Callable[..., Any]:
        """The same context manager, its beginning and its end timed."""

        @contextmanager
        def outer(*args: Any) -> Iterator[None]:
            manager = inner(*args)
            self.timed(manager.__enter__)()
            try:
                yield
            finally:
                self.timed(manager.__exit__)(None, None, None)

        return outer


def time_everything(spent: Spent) -> None:
    """Time whatever keeps users apart."""
    for name in ("before_block", "after_user", "after_block"):  # `after_stack` calls the last two
        setattr(Isolation, name, spent.timed(getattr(Isolation, name), check=True))
    Isolation.seed = spent.timed(Isolation.seed)  # type: ignore[method-assign]
    problem.Problem.users_apart = spent.timed_context(problem.Problem.users_apart)  # type: ignore[method-assign]
    for module in (stacked, single):
        module.preserve_generators = spent.timed_context(module.preserve_generators)  # type: ignore[attr-defined]
    isolated = one_by_one.OneByOne._train_isolated

    def train_isolated(self: one_by_one.OneByOne, key: int, train: Callable[[], object]) -> bool:
        return isolated(self, key, spent.training(train))

    one_by_one.OneByOne._train_isolated = spent.timed(train_isolated)  # type: ignore[method-assign]


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
    taken: list[list[tuple[float, float, float]]] = [[] for _ in TASKS]  # round, generators, checks: seconds
    for _ in range(wanted.turns):
        for rounds, seconds in zip(going, taken, strict=True):
            for number in range(ROUNDS + 1):
                spent.all = spent.checks = 0.0
                begun = time.thread_time()
                rounds.next()
                took = time.thread_time() - begun
                if number:
                    seconds.append((took, spent.all - spent.checks, spent.checks))
    rows = [row(*task, seconds) for task, seconds in zip(TASKS, taken, strict=True)]
    head = ["task", "engine", "users a round", "ms a round", "generators", "checks", "together", "µs a user"]
    body = recording.table(head, rows)
    print(body)
    if wanted.record:
        about = (
            f"`{recording.command_line()}`, {recording.machine('cpu')}, one thread: the share of a round that is spent "
            "on seeding generators and giving them back, and on comparing and putting back what a model could "
            f"remember; medians of {wanted.turns * ROUNDS} rounds. Wanted: under 1%."
        )
        recording.record("Keeping users apart", f"{about}\n\n{body}")


def row(task: str, engine: str, _: int, cohort: int, seconds: list[tuple[float, float, float]]) -> list[object]:
    """A line of the table."""
    whole = statistics.median(took for took, _, _ in seconds)
    generators = statistics.median(part / took for took, part, _ in seconds)
    checks = statistics.median(part / took for took, _, part in seconds)
    together = statistics.median((one + other) / took for took, one, other in seconds)
    shares = [f"{share:.2%}" for share in (generators, checks, together)]
    return [task, engine, cohort, f"{1e3 * whole:.0f}", *shares, f"{1e6 * together * whole / cohort:.0f}"]


if __name__ == "__main__":
    main()
