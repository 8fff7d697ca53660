"""The tables and lists at the top of the performance page, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peers.systems import OURS, PEERS
from recording import table
from trainings.records import FLOAT32, Record, precision_of
from trainings.whole import SECOND

from .comparison import DATA, NAMES, SYSTEMS, Comparison, Training

NO_BREAK, NO_BREAK_HYPHEN, LINE = "\u00a0", "\u2011", "\u2028"  # in cells; a line is a tag in the end
PAPER_USERS = 100  # in a round
EVEN_ANYWAY = ("cifar100",)  # tasks whose real users all have as many examples
PAPER = """## At the paper's rounds

Whole trainings on real users, 100 a round, of the paper's rounds. Where a system did not do all of them (≈) the rest is
estimated: clipline's by the mean of the later half of the rounds that it did, pfl-research's by the seconds of its
batches."""
# Sentences that stand on the page where a table has what they explain.
PROCESSOR = """
- *(processor)*: seconds of one core that was at work, not of the clock, which other work on the machine disturbed more;
  both are in [the parts](#what-whole-trainings-are-made-of)."""
PROCESSOR_COLUMN = "*Processor*: seconds of a core, estimated like the whole, where each had one thread. "
SECOND_START = """*Second start*: once more in a new process, which finds the compiled programs of the first; all others
start without any. """
NO_SECOND_START = "Every process starts without compiled programs. "
FEW_ROUNDS = 50  # nobody's whole training
NOT_MEASURED = "not measured"
GOAL = 50  # times pfl-research, whole trainings at the paper's rounds on a GPU


def answer(rows: Sequence[Comparison]) -> str:
    """How fast it is, in a sentence for each machine and pair of precisions; those at equal precision first."""
    return "\n".join(f"- {_said(of)}" for of in by_arithmetic(rows).values() if of[0].measured or _compared(of, rows))


def by_arithmetic(rows: Sequence[Comparison]) -> dict[tuple[str, str], list[Comparison]]:
    """The rows of each machine and pair of precisions, those with something to show first."""
    found: dict[tuple[str, str], list[Comparison]] = {}
    for row in rows:
        found.setdefault((row.machine, row.arithmetic), []).append(row)
    return {place: sorted(of, key=lambda row: not row.measured) for place, of in found.items()}


def _compared(of: Sequence[Comparison], rows: Sequence[Comparison]) -> bool:
    """Whether the machine was compared at all, if not in this arithmetic."""
    return any(row.measured for row in rows if row.machine == of[0].machine)


def _said(of: Sequence[Comparison]) -> str:
    on = f"On {'an ' if 'NVIDIA' in of[0].machine else ''}{short(of[0].machine)}, {of[0].arithmetic}"
    trained = [row for row in of if row.times("real") is not None]
    if not trained:
        rounds = [(ratio, row.task) for row in of if (ratio := row.round_times("pfl")) is not None]
        if not rounds:
            return f"{on}: not measured."
        return (
            f"{on}, a warm round takes pfl-research **{_times(min(rounds)[0])} to {_times(max(rounds)[0])} times** as "
            f"long as clipline ({', '.join(f'{task} {_times(ratio)}' for ratio, task in sorted(rounds))}). Whole "
            "trainings were not measured."
        )
    ratios = [ratio for row in trained if (ratio := row.times("real")) is not None]
    ours = [row.trainings["real", OURS] for row in trained]
    rounds_done = sorted(int(one.turns[-1]["rounds"]) for one in ours)
    taken = sorted(one.seconds for one in ours)
    what = "whole trainings" if rounds_done[-1] > FEW_ROUNDS else "trials"
    estimated = " (estimated from some of its rounds)" if any(row.estimated("real") for row in trained) else ""
    return (
        f"{on}, {what} on real users, {rounds_done[0]:,} to {rounds_done[-1]:,} rounds, take clipline "
        f"{seconds(taken[0])} to {seconds(taken[-1])}, and pfl-research **{_times(min(ratios))} to "
        f"{_times(max(ratios))} times** as long{estimated}."
    )


def top(rows: Sequence[Comparison]) -> str:
    """One row for each task on each machine."""
    pair = "ours / pfl"
    head = [
        "machine",
        "arithmetic: ours / pfl",
        "task",
        f"**real users**: {pair}",
        "**times**",
        f"even users: {pair}",
        "times",
    ]
    head += [f"warm round: {pair}", "times", "FedJAX", "Flower", "date, commit"]
    lines = []
    for of in by_arithmetic(rows).values():
        if of[0].measured:
            lines += [_row(row) for row in rows if row in of]
        else:
            blank = [short(of[0].machine), of[0].pair, "all tasks", *["", NOT_MEASURED] * 3]
            lines.append([*blank, *[""] * (len(head) - len(blank))])
    return table(head, [[cell.replace(" ", NO_BREAK) for cell in line] for line in lines]).replace(LINE, "<br>")


def short_top(rows: Sequence[Comparison]) -> str:
    """The same with fewer columns: trainings on real users, and warm rounds, of what was measured."""
    pair = "clipline / pfl-research"
    head = ["machine", "precision", "task", f"whole training: {pair}", "times", f"warm round: {pair}", "times"]
    lines = [_row(row) for of in by_arithmetic(rows).values() if of[0].measured for row in rows if row in of]
    return table(head, [line[:5] + line[7:9] for line in lines])


def _row(row: Comparison) -> list[str]:
    cells = [short(row.machine), row.pair, f"`{row.task}`"]
    for data in DATA:
        processor = row.by_processor(data)
        both = [_training(row.trainings.get((data, system)), processor) for system in (OURS, "pfl")]
        times = _times(row.times(data))
        if data == "even" and row.task in EVEN_ANYWAY and not both[0]:
            cells += ["the same users", ""]
            continue
        cells += [
            _pair(both) + (" (processor)" if processor else ""),
            NOT_MEASURED if not times else f"**{times}**" if data == "real" else times,
        ]
    ours, pfl, *others = (_round(row.rounds.get(system)) for system in SYSTEMS)
    return [*cells, _pair([ours, pfl]), _times(row.round_times("pfl")) or NOT_MEASURED, *others, _measured(row)]


def _pair(both: Sequence[str]) -> str:
    """Ours and pfl's; empty if one is not there."""
    return " / ".join(both) if all(both) else ""


def short(machine: str) -> str:
    """A GPU without its maker."""
    return machine.removeprefix("NVIDIA ")


def sizes(rows: Sequence[Comparison]) -> str:
    """How long the trainings are, in a sentence for each machine."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for rounds, users in sorted({(x["rounds"], x["users"]) for one in row.trainings.values() for x in one.turns}):
            tasks = found.setdefault(row.machine, {}).setdefault(f"{rounds} rounds of {users} users", [])
            tasks += [row.task] if row.task not in tasks else []
    return " ".join(
        f"On {'the ' if 'NVIDIA' in machine else ''}{short(machine)}: "
        + "; ".join(f"{size} ({', '.join(tasks)})" for size, tasks in of.items())
        + "."
        for machine, of in found.items()
    )


def _training(one: Training | None, processor: bool) -> str:
    if one is None:
        return ""
    value = one.processor_seconds if processor and one.processor_seconds is not None else one.seconds
    return ("≈ " if one.estimated else "") + seconds(value)


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
    trainings = [row.trainings[data, OURS].turns for data in DATA if (data, OURS) in row.trainings]
    latest = [*(found[-1] for found in trainings), *row.rounds.values()]
    return LINE.join(dict.fromkeys(f"{record['date']} `{record['commit']}`" for record in latest)).replace(
        "-", NO_BREAK_HYPHEN
    )


def empty_cells(rows: Sequence[Comparison]) -> str:
    """Why cells are empty: one line for each reason, with the tasks and machines that have it."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        places = dict.fromkeys(SYSTEMS, f"{row.task} on {row.machine}, {row.precisions[1]}")
        places[OURS] = f"{row.task} on {row.machine}, {row.precisions[0]}"
        for data in DATA:
            for system in (OURS, "pfl"):
                if (data, system) not in row.trainings:
                    why = row.failed.get((data, system), "not measured yet")
                    reason = f"whole training of {NAMES[system]}, {data} users: {why}"
                    reasons.setdefault(reason, []).append(places[system])
        asked = SYSTEMS if row.precisions[1] == FLOAT32 else (OURS, "pfl")  # other peers have no such setting
        for system in asked:
            if system not in row.rounds:
                why = PEERS[system].without.get(row.task, "not measured") if system in PEERS else "not measured"
                reasons.setdefault(f"warm round of {NAMES[system]}: {why}", []).append(places[system])
    return "\n".join(f"- {why}: {_joined(dict.fromkeys(places))}." for why, places in reasons.items())


def _joined(places: Iterable[str]) -> str:
    """Tasks of one machine together."""
    tasks: dict[str, list[str]] = {}
    for place in places:
        task, _, machine = place.partition(" on ")
        tasks.setdefault(machine, []).append(task)
    return "; ".join(f"{', '.join(found)} on {short(machine)}" for machine, found in tasks.items())


def parts(rows: Sequence[Comparison]) -> str:
    """What whole trainings are made of, one line for each process that was started."""
    head = ["machine", "task", "users", "system", "whole, s", "rounds done", "start, s", "first round, s",
            "later round, s", "threads", "processor, s", "load", "arithmetic", "versions", "date, commit"]  # fmt: skip
    lines = []
    for row in rows:
        for (data, system), one in row.trainings.items():
            about = [short(row.machine), f"`{row.task}`", data, NAMES[system]]
            lines += [[*about, *_process(turn, whole=system != SECOND)] for turn in one.turns]
    lines = [line for place, line in enumerate(lines) if line not in lines[:place]]  # a peer's stand in several rows
    filled = [place for place in range(len(head)) if any(line[place] for line in lines)]  # some were never measured
    return table([head[place] for place in filled], [[line[place] for place in filled] for line in lines])


def notes(rows: Sequence[Comparison]) -> dict[str, str]:
    """By its name in the template, each sentence that explains what only some results have; empty where none has it."""
    trainings = [(system, one) for row in rows for (_, system), one in row.trainings.items()]
    second = any(system == SECOND for system, _ in trainings)
    return {
        "processor": PROCESSOR if any(row.by_processor(data) for row in rows for data in DATA) else "",
        "processor_column": PROCESSOR_COLUMN if any(one.processor_seconds for _, one in trainings) else "",
        "second_start": SECOND_START if second else NO_SECOND_START,
    }


def _process(turn: Record, whole: bool) -> list[str]:
    """Without the whole of a second start, which does few rounds and shows how soon they begin."""
    return [
        f"{turn['seconds']:.1f}" if whole else "",
        f"{turn['rounds_done']} of {turn['rounds']}",
        f"{turn['start_s']:.1f}",
        f"{turn['first_round_s']:.3f}",
        f"{turn['later_round_s']:.3f}",
        str(turn.get("threads", "default")),
        f"{turn['processor_seconds']:.1f}" if "processor_seconds" in turn else "",
        f"{turn['load'][0]:.1f} to {turn['load'][1]:.1f}",
        precision_of(turn),
        turn["versions"],
        f"{turn['date']} `{turn['commit']}`",
    ]


def at_paper_rounds(rows: Sequence[Comparison], rounds: dict[str, int]) -> str:
    """Both systems' trainings on real users continued to the paper's rounds, of GPUs that had the paper's users."""
    lines = []
    for row in rows:
        both = [row.trainings.get(("real", system)) for system in (OURS, "pfl")]
        if None in both or not all(_can_go_on(one) for one in both if one is not None):
            continue
        ours, pfl = (_continued(one, rounds[row.task]) for one in both if one is not None)
        reached = "yes" if pfl / ours >= GOAL else "no"
        taken = [_about(one, rounds[row.task]) for one in both if one is not None]
        cells = [short(row.machine), row.pair, f"`{row.task}`", f"{rounds[row.task]:,}", *taken]
        lines.append([*cells, _times(pfl / ours), reached])
    head = [
        "machine",
        "arithmetic: ours / pfl",
        "task",
        "rounds",
        "clipline",
        "pfl-research",
        "times",
        f"our goal: {GOAL}",
    ]
    return f"{PAPER}\n\n{table(head, lines)}" if lines else ""


def _can_go_on(one: Training) -> bool:
    return all(turn["device"] == "cuda" and turn["users"] == PAPER_USERS for turn in one.turns)


def _about(one: Training, rounds: int) -> str:
    done = not one.estimated and int(one.turns[-1]["rounds"]) == rounds
    return ("" if done else "≈ ") + seconds(_continued(one, rounds))


def _continued(one: Training, rounds: int) -> float:
    turn = one.turns[-1]
    return one.seconds + (rounds - int(turn["rounds"])) * float(turn["usual_round_s"])
