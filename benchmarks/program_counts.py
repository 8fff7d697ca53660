"""How many programs are compiled and steps recorded on real users? Counted on the CPU, without training anything.

    python benchmarks/program_counts.py so_lr=STORE [emnist_cr=STORE ...] [--rounds 300] [--cohort-size 100] [--record]

Cohorts, blocks and numbers of users at every step are those that a GPU would see. A step of some number of users is
recorded when it comes for the third time (`_WARM_UP` of engine/gpu/recorded_step.py).
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import recording

import clipline
from clipline.engine.gpu.recorded_step import _MOST_GRAPHS, _WARM_UP, graph_width
from clipline.engine.stacked.trainer import Stacked
from clipline.federated.backend import CohortRequest
from clipline.training.loop import draws_of


def steps_of_a_round(stack: Any, request: CohortRequest) -> list[tuple[Any, ...]]:
    """(rows of small matrices, number of users) of every step of a round."""
    users, owners, places = stack._sorted_by_work([request])
    found = []
    for start in range(0, len(users), stack.block_size):
        part = slice(start, start + stack.block_size)
        for block in stack._prepare([request], users[part], owners[part], places[part]):
            rooms = tuple(touched.rows.shape[1] for touched in block.rows.values())
            active = (block.steps.counts > 0).sum(axis=0).tolist()
            found += [(rooms, min(graph_width(count), stack.block_size)) for count in active if count]
    return found


def counted(task: str, store: str, rounds: int, cohort_size: int) -> tuple[str, ...]:
    """A row of the table."""
    settings = clipline.task_named(task).settings.overridden(
        {"data": store, "rounds": rounds, "cohort_size": cohort_size, "device": "cpu", "workers": 1, "seed": 0},
        "the benchmark",
    )
    training = clipline.task_named(task).training(settings)
    varying = cohort_size + 4 * int(cohort_size**0.5)  # as `Stacked` chooses on a GPU with room for all
    stack = Stacked(training.one_by_one, cohort_size, block_size=varying, compiled=True)
    draws, params = draws_of(training, rounds), training.problem.model.initial
    programs, recordings = dict[Any, int](), dict[Any, int]()
    calls, recorded = Counter[Any](), Counter[Any]()
    for number in range(rounds):
        cohort, _ = draws.take(number)
        draws.prefetch(number + 1)
        for step in steps_of_a_round(stack, CohortRequest(params, cohort, number, lambda: 1.0)):
            programs.setdefault(step[0], number)
            calls[step] += 1
            if calls[step] == _WARM_UP + 1 and recorded[step[0]] < _MOST_GRAPHS:
                recorded[step[0]] += 1
                recordings[step] = number
    draws.close()
    late = sum(first >= rounds // 3 for first in recordings.values())
    when = ", ".join(str(first) for first in sorted(programs.values()))
    return task, str(len(programs)), when, str(len(recordings)), str(late), f"{sum(calls.values()):,}"


def main() -> None:
    """Count, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+", metavar="TASK=STORE")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--cohort-size", type=int, default=100)
    parser.add_argument("--record", action="store_true")
    wanted = parser.parse_args()
    rows = [counted(*one.split("=", 1), wanted.rounds, wanted.cohort_size) for one in wanted.stores]
    third = wanted.rounds // 3
    header = ("task", "programs", "first needed in round", "recordings", f"of these after round {third}", "steps")
    text = recording.table(header, rows)
    print(text)
    if wanted.record:
        about = (
            f"`{recording.command_line()}`, {recording.machine('cpu')}. Cohorts of {wanted.cohort_size} of real users"
        )
        recording.record("Programs and recordings on real users", f"{about}, {wanted.rounds} rounds.\n\n{text}")


if __name__ == "__main__":
    main()
