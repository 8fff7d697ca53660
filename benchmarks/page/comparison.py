"""What the records say of one task on one machine: whole trainings on real and even users, and a warm round."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.systems import OURS, PEER_PRECISIONS, PEERS
from trainings.records import FLOAT32, Record, newest, precision_of
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


WORDS = {"bf16": "bfloat16"}


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
    precisions: tuple[str, str] = (FLOAT32, FLOAT32)  # the arithmetic of ours, and of the others
    trainings: dict[tuple[str, str], Training] = field(default_factory=dict)  # (data, system)
    rounds: dict[str, Record] = field(default_factory=dict)  # system
    failed: dict[tuple[str, str], str] = field(default_factory=dict)  # (data, system) -> why

    @property
    def equal(self) -> bool:
        """Whether all compute in the same precision."""
        return self.precisions[0] == self.precisions[1]

    @property
    def arithmetic(self) -> str:
        """The precision of both sides, in words."""
        ours, theirs = (WORDS.get(one, one) for one in self.precisions)
        return f"both sides in {ours}" if self.equal else f"clipline in {ours}, the others in {theirs}"

    @property
    def pair(self) -> str:
        """The same as a cell of a table: ours, and the others'."""
        return " / ".join(self.precisions)

    @property
    def measured(self) -> bool:
        """Whether anything was compared."""
        times = [self.times(data) for data in DATA] + [self.round_times(system) for system in PEERS]
        return any(one is not None for one in times)

    def estimated(self, data: str) -> bool:
        """Whether `times` rests on rounds that were not done."""
        return any(one.estimated for (of, _), one in self.trainings.items() if of == data)

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
        """How much longer a peer's warm round takes than ours; where it took turns with ours, than ours of that run."""
        ours, found = self.rounds.get(OURS), self.rounds.get(system)
        if ours is None or found is None:
            return None
        together = (
            "times_ours" in found and precision_of({**found, "system": OURS, "precision": None}) == self.precisions[0]
        )
        return float(found["times_ours"]) if together else float(found["seconds"]) / float(ours["seconds"])


def comparisons(records: Iterable[Record]) -> list[Comparison]:
    """A row for every task, machine and pair of precisions, whatever is in it; those at equal precision first."""
    kept = list(newest(records).values())
    machines = [*MACHINES, *sorted({record["machine"] for record in kept} - set(MACHINES))]
    rows = [
        _one(machine, task, precisions, kept)
        for machine in machines
        for precisions in _precisions(machine, kept)
        for task in TASKS
    ]
    return sorted(rows, key=lambda row: not row.equal)


def _precisions(machine: str, kept: Sequence[Record]) -> list[tuple[str, str]]:
    """(ours, the others'): float32 on both sides, and whatever else we were measured in."""
    ours = {precision_of(record) for record in kept if (record["machine"], record["system"]) == (machine, OURS)}
    others = sorted(ours - {FLOAT32})
    both = [(one, one) for one in others if one in PEER_PRECISIONS]
    return [(FLOAT32, FLOAT32), *both, *((one, FLOAT32) for one in others)]


def _one(machine: str, task: str, precisions: tuple[str, str], kept: Sequence[Record]) -> Comparison:
    mine = [
        record
        for record in kept
        if (record["machine"], record["task"]) == (machine, task)
        and precision_of(record) == precisions[record["system"] not in (OURS, SECOND)]
    ]
    rounds = {record["system"]: record for record in mine if record["kind"] == "round"}
    row = Comparison(machine, task, precisions, rounds=rounds)
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
