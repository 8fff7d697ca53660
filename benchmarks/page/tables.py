"""The tables and lists at the top of the performance page, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from peers.systems import OURS, PEERS
from recording import table
from trainings.records import Record

from .comparison import DATA, NAMES, SYSTEMS, Comparison, Training

PAPER_USERS = 100  # in a round
PAPER = """## At the paper's rounds

Whole trainings on real users, 100 a round, continued to the paper's rounds. Both systems are estimated: clipline by the
mean of the later half of the rounds that it did, pfl-research by the seconds of its batches. The start counts once."""
GOAL = 50  # times pfl-research, whole trainings at the paper's rounds on a GPU


def top(rows: Sequence[Comparison]) -> str:
    """One row for each task on each machine."""
    head = [
        "machine", "task", "rounds x users",
        "**real users**: clipline", "pfl-research", "**times**",
        "even users: clipline", "pfl-research", "times",
        "one warm round: clipline", "pfl-research", "FedJAX", "Flower", "times pfl",
        "measured, commit",
    ]  # fmt: skip
    return table(head, [_row(row) for row in rows])


def _row(row: Comparison) -> list[str]:
    cells = [row.machine, f"`{row.task}`", _size(row)]
    for data in DATA:
        cells += [_training(row.trainings.get((data, system))) for system in (OURS, "pfl")]
        times = _times(row.times(data)) + (" †" if row.by_processor(data) else "")
        cells.append(f"**{times}**" if times and data == "real" else times)
    cells += [_round(row.rounds.get(system)) for system in SYSTEMS]
    return [*cells, _times(row.round_times("pfl")), _measured(row)]


def _size(row: Comparison) -> str:
    sizes = {(turn["rounds"], turn["users"]) for one in row.trainings.values() for turn in one.turns}
    return ", ".join(f"{rounds} x {users}" for rounds, users in sorted(sizes))


def _training(one: Training | None) -> str:
    return "" if one is None else ("≈ " if one.estimated else "") + seconds(one.seconds)


def _round(one: Record | None) -> str:
    return "" if one is None else seconds(one["seconds"])


def _times(ratio: float | None) -> str:
    """Two digits of what is small, none after the point of what is not."""
    return (
        "" if ratio is None else f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 2 else f"{ratio:.2f}"
    )


def seconds(value: float) -> str:
    """In the unit that a reader would use."""
    if value < 1:
        return f"{1e3 * value:.0f} ms"
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"


def _measured(row: Comparison) -> str:
    trainings = [turn for one in row.trainings.values() for turn in one.turns]
    parts = [
        f"{name} {record['date']} `{record['commit']}`"
        for name, found in (("trainings", trainings), ("rounds", list(row.rounds.values())))
        for record in found[-1:]
    ]
    return "; ".join(parts)


def empty_cells(rows: Sequence[Comparison]) -> str:
    """Why cells are empty: one line for each reason, with the tasks and machines that have it."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        place = f"{row.task} on {row.machine}"
        for data in DATA:
            for system in (OURS, "pfl"):
                if (data, system) not in row.trainings:
                    why = row.failed.get((data, system), "not measured yet")
                    reasons.setdefault(f"whole training of {NAMES[system]}, {data} users: {why}", []).append(place)
        for system in SYSTEMS:
            if system not in row.rounds:
                why = PEERS[system].without.get(row.task, "not measured") if system in PEERS else "not measured"
                reasons.setdefault(f"warm round of {NAMES[system]}: {why}", []).append(place)
    return "\n".join(f"- {why}: {_joined(places)}." for why, places in reasons.items())


def _joined(places: Sequence[str]) -> str:
    """Tasks of one machine together."""
    tasks: dict[str, list[str]] = {}
    for place in places:
        task, _, machine = place.partition(" on ")
        tasks.setdefault(machine, []).append(task)
    return "; ".join(f"{', '.join(found)} on {machine}" for machine, found in tasks.items())


def parts(rows: Sequence[Comparison]) -> str:
    """What whole trainings are made of, one line for each process that was started."""
    head = ["machine", "task", "users", "system", "whole, s", "rounds done", "start, s", "first round, s",
            "later round, s", "processor, s", "load", "arithmetic", "versions", "date, commit"]  # fmt: skip
    lines = [
        [
            row.machine, f"`{row.task}`", data, NAMES[system], f"{turn['seconds']:.1f}",
            f"{turn['rounds_done']} of {turn['rounds']}", f"{turn['start_s']:.1f}", f"{turn['first_round_s']:.3f}",
            f"{turn['later_round_s']:.3f}", f"{turn['processor_seconds']:.1f}" if "processor_seconds" in turn else "",
            f"{turn['load'][0]:.1f} to {turn['load'][1]:.1f}", turn.get("precision", ""), turn["versions"],
            f"{turn['date']} `{turn['commit']}`",
        ]
        for row in rows
        for (data, system), one in row.trainings.items()
        for turn in one.turns
    ]  # fmt: skip
    return table(head, lines)


def at_paper_rounds(rows: Sequence[Comparison], rounds: dict[str, int]) -> str:
    """Both systems' trainings on real users continued to the paper's rounds, where they had the paper's users."""
    lines = []
    for row in rows:
        both = [row.trainings.get(("real", system)) for system in (OURS, "pfl")]
        if None in both or not all(_can_go_on(one) for one in both if one is not None):
            continue
        ours, pfl = (_continued(one, rounds[row.task]) for one in both if one is not None)
        reached = "yes" if pfl / ours >= GOAL else "no"
        cells = [row.machine, f"`{row.task}`", f"{rounds[row.task]:,}", seconds(ours), seconds(pfl)]
        lines.append([*cells, _times(pfl / ours), reached])
    head = ["machine", "task", "rounds", "clipline", "pfl-research", "times", f"at least {GOAL}"]
    return f"{PAPER}\n\n{table(head, lines)}" if lines else ""


def _can_go_on(one: Training) -> bool:
    return all(turn["users"] == PAPER_USERS and "usual_round_s" in turn for turn in one.turns)


def _continued(one: Training, rounds: int) -> float:
    turn = one.turns[-1]
    return one.seconds + (rounds - int(turn["rounds"])) * float(turn["usual_round_s"])
