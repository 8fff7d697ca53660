"""What the records say of one task on one machine: whole trainings on real and even users, and a warm round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.systems import OURS, PEERS
from trainings.records import Record, newest
from trainings.whole import SECOND

TASKS = ("emnist_cr", "emnist_ae", "cifar100", "shakespeare", "so_nwp", "so_lr")
MACHINES = ("NVIDIA H200", "2 cores")  # others follow
DATA = ("real", "even")
SYSTEMS = (OURS, *PEERS)
NAMES = {
    OURS: "clipline",
    SECOND: "clipline, second start",
    "pfl": "pfl-research",
    "fedjax": "FedJAX",
    "flower": "Flower",
}


@dataclass(frozen=True)
class Training:
    """A whole training of one system: the median of its turns."""

    turns: tuple[Record, ...]

    @property
    def seconds(self) -> float:
        """From the start of the process to its end."""
        return statistics.median(turn["seconds"] for turn in self.turns)

    @property
    def estimated(self) -> bool:
        """Whether some of its rounds were not done."""
        return any(turn["estimated"] for turn in self.turns)

    @property
    def disturbed(self) -> bool:
        """Whether more was running than the machine has cores: one more where a system takes all cores itself."""
        return any(max(turn["load"]) > turn["cores"] + ("threads" not in turn) for turn in self.turns)

    @property
    def processor_seconds(self) -> float | None:
        """Of one thread, where that was measured."""
        found = [turn["processor_seconds"] for turn in self.turns if "processor_seconds" in turn]
        return statistics.median(found) if found else None


@dataclass(frozen=True)
class Comparison:
    """One row of the table."""

    machine: str
    task: str
    trainings: dict[tuple[str, str], Training] = field(default_factory=dict)  # (data, system)
    rounds: dict[str, Record] = field(default_factory=dict)  # system
    failed: dict[tuple[str, str], str] = field(default_factory=dict)  # (data, system) -> why

    def times(self, data: str) -> float | None:
        """How much longer pfl's whole training takes than ours.

        By seconds on the clock; by processor seconds where other work disturbed one of the two and both have them.
        """
        ours, pfl = (self.trainings.get((data, system)) for system in (OURS, "pfl"))
        if ours is None or pfl is None:
            return None
        if self.by_processor(data):
            return float(pfl.processor_seconds or 0) / float(ours.processor_seconds or 1)
        return pfl.seconds / ours.seconds

    def by_processor(self, data: str) -> bool:
        """Whether `times` is of processor seconds."""
        both = [self.trainings[data, system] for system in (OURS, "pfl") if (data, system) in self.trainings]
        measured = len(both) == 2 and all(one.processor_seconds is not None for one in both)
        return measured and any(one.disturbed for one in both)

    def round_times(self, system: str) -> float | None:
        """How much longer a peer's warm round takes than ours."""
        found = self.rounds.get(system)
        return None if found is None else float(found["times_ours"])


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """A row for every task on every machine that was measured, whatever is in it."""
    kept = list(newest(records).values())
    machines = [*MACHINES, *sorted({record["machine"] for record in kept} - set(MACHINES))]
    return [_one(machine, task, kept) for machine in machines for task in TASKS]


def _one(machine: str, task: str, kept: Sequence[Record]) -> Comparison:
    mine = [record for record in kept if (record["machine"], record["task"]) == (machine, task)]
    row = Comparison(machine, task, rounds={record["system"]: record for record in mine if record["kind"] == "round"})
    whole = [record for record in mine if record["kind"] == "training"]
    for data in DATA:
        for system in (OURS, SECOND, "pfl"):
            found = [record for record in whole if (record["data"], record["system"]) == (data, system)]
            good = _like_the_latest([record for record in found if "failed" not in record])
            if good:
                row.trainings[data, system] = Training(tuple(good))
            elif found:
                row.failed[data, system] = found[-1]["failed"]
    return row


def _like_the_latest(records: Sequence[Record]) -> list[Record]:
    """Those with rounds, users and threads of the last one: others are no turns of the same training."""

    def size(record: Record) -> tuple[Any, ...]:
        return record["rounds"], record["users"], record.get("threads")

    return [record for record in records if size(record) == size(records[-1])]
