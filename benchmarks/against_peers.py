"""How long is one round of the same training by clipline, pfl-research, FedJAX and Flower's simulation?

    python benchmarks/against_peers.py --task emnist_cr            prints a table
    python benchmarks/against_peers.py --task so_lr --record       also writes it into benchmarks/results/README.md
    python benchmarks/against_peers.py --quick --json              few users; the last line is one JSON object
    python benchmarks/against_peers.py --data real                 whole trainings on real users: trainings/whole.py

Every system trains the same made-up users with the paper's network, batches and rates (benchmarks/peers/workload.py),
in a process of its own that lives through the whole run. After rounds to warm up they take turns of one round, or of
some in a row as in training, where a system may prepare a round during the one before; nothing outlasts its turn.
Each uses the threads that it takes by default. clipline and pfl clip adaptively and add noise, Flower clips at a fixed
norm and adds noise, FedJAX has neither. A user's data are made ready before the clock starts.

Peers are installed at first use, each into an environment of its own under benchmarks/.peers; one that cannot be
installed or does not run is named and left out. With --here all systems run in this very Python, where peers must be
importable (benchmarks/peers/carry.py gathers them for a machine without network).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peers.systems import (
    OURS,
    PEERS,
    System,
    UnavailableError,
    add_peer_precision,
    check_peer_precision,
    environment_of,
    python_of,
)
from peers.workload import NOISE_MULTIPLIER, WORKLOADS
from recording import gpu_name, record
from trainings import records, whole


@dataclass(frozen=True)
class Measured:
    """One system's rounds."""

    versions: str
    seconds: tuple[float, ...]  # of a round, in each turn that counts
    peak_memory_bytes: int
    peak_device_memory_bytes: int | None

    @property
    def median(self) -> float:
        """Seconds of a usual round."""
        return statistics.median(self.seconds)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked; wrong ones end the program with a line that says what is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(WORKLOADS), default="emnist_cr")
    parser.add_argument("--peers", default=",".join(PEERS), help="some of %(default)s, or none")
    parser.add_argument("--data", help="real or even, for whole trainings with other flags; see --data real --help")
    parser.add_argument("--users", type=int, help="in every round; 100, or 5 with --quick")
    parser.add_argument("--rounds", type=int, help="turns that count; 5, or 2 with --quick")
    parser.add_argument("--in-a-row", type=int, default=1, help="rounds in a turn, of which the mean counts")
    parser.add_argument("--warmups", type=int, help="rounds before those; 2, or 1 with --quick")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="few users and rounds")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON, from system to its numbers")
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/README.md")
    parser.add_argument("--commit", help="to be recorded, where there is no git to ask")
    parser.add_argument("--here", action="store_true", help="use this Python for all systems, install nothing")
    parser.add_argument("--options", nargs="*", default=[], metavar="KEY=VALUE", help="more for clipline's Training")
    add_peer_precision(parser)
    parser.add_argument("--patience", type=float, default=900, help="seconds to wait for a round")
    wanted = parser.parse_args(given)
    for name, usual, quick in (("users", 100, 5), ("rounds", 5, 2), ("warmups", 2, 1), ("in_a_row", 1, 1)):
        if getattr(wanted, name) is None:
            setattr(wanted, name, quick if wanted.quick else usual)
        if getattr(wanted, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(wanted, name)} must be at least 1")
    wanted.peers = [] if wanted.peers == "none" else wanted.peers.split(",")
    for name in wanted.peers:
        if name not in PEERS:
            parser.error(f"--peers has {name!r} but must name some of {', '.join(PEERS)}, or be none")
    check_peer_precision(parser, wanted)
    if wanted.peer_precision == "bf16" and wanted.peers != ["pfl"]:
        parser.error(f"--peer-precision bf16 is known of pfl alone but --peers has {wanted.peers}: give --peers pfl")
    for pair in wanted.options:
        if not pair.partition("=")[0].isidentifier() or "=" not in pair:
            parser.error(f"--options has {pair!r} but must have KEY=VALUE, such as workers=2")
    return wanted


def start(name: str, wanted: argparse.Namespace) -> System:
    """The process of one system, which now prepares itself."""
    reason = PEERS[name].without.get(wanted.task) if name in PEERS else None
    if reason is not None:
        raise UnavailableError(f"cannot do {wanted.task}: {reason}")
    flags = ["--task", wanted.task, "--device", wanted.device]
    for size, count in (
        ("users", wanted.users),
        ("rounds", wanted.rounds * wanted.in_a_row),
        ("warmups", wanted.warmups),
    ):
        flags += [f"--{size}", str(count)]
    if name == "pfl" and wanted.peer_precision:
        flags += ["--precision", wanted.peer_precision]
    if name == OURS and wanted.options:
        flags += ["--options", *wanted.options]
    python = python_of(name, wanted.here)
    patience = wanted.patience * wanted.in_a_row
    return System(name, python, flags, environment_of(name, wanted.device, wanted.here), patience)


def measure(wanted: argparse.Namespace) -> tuple[dict[str, Measured], dict[str, str]]:
    """What each system took, and why others are left out.

    Each is started and warmed up before the next one is, as some start much in the background; then all take turns.
    """
    systems: dict[str, System] = {}
    versions: dict[str, str] = {}
    seconds: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    measured: dict[str, Measured] = {}

    def rounds(name: str, count: int, in_a_row: int = 1) -> list[float]:
        taken = [systems[name].rounds(in_a_row) for _ in range(count)]
        print(f"{name}: {', '.join(f'{one:.3f}' for one in taken)} s", file=sys.stderr)
        return taken

    try:
        for name in (OURS, *wanted.peers):
            try:
                systems[name] = start(name, wanted)
                versions[name] = systems[name].ready()
                rounds(name, wanted.warmups)
                seconds[name] = []
            except UnavailableError as error:
                missing[name] = str(error)
        for turn in range(wanted.rounds + 1):
            for name in [name for name in seconds if name not in missing]:
                try:
                    if turn < wanted.rounds:
                        seconds[name] += rounds(name, 1, wanted.in_a_row)
                    else:
                        peak = systems[name].finish()
                        measured[name] = Measured(versions[name], tuple(seconds[name]), **peak)
                except UnavailableError as error:
                    missing[name] = str(error)
    finally:
        for system in systems.values():
            system.end()
    return measured, missing


def as_json(measured: Mapping[str, Measured], users: int, task: str) -> str:
    """One line, from system to its numbers."""
    return json.dumps(
        {
            name: {
                "seconds_per_round": one.median,
                "least_seconds": min(one.seconds),
                "greatest_seconds": max(one.seconds),
                "milliseconds_per_user": 1e3 * one.median / users,
                "peak_memory_bytes": one.peak_memory_bytes,
                "peak_device_memory_bytes": one.peak_device_memory_bytes,
                "users": users,
                "examples": users * WORKLOADS[task].examples,
                "versions": one.versions,
            }
            for name, one in measured.items()
        }
    )


def as_records(measured: Mapping[str, Measured], wanted: argparse.Namespace, command: str) -> list[records.Record]:
    """A line of benchmarks/results/rounds.jsonl for each system."""
    machine = gpu_name() if wanted.device == "cuda" else f"{os.cpu_count()} cores"
    about = {"date": str(datetime.date.today()), "commit": whole.commit_of(wanted.commit), "command": command}
    return [
        {
            "kind": "round",
            "machine": machine,
            "device": wanted.device,
            "task": wanted.task,
            "system": name,
            "precision": precision(name, wanted),
            "users": wanted.users,
            "seconds": round(one.median, 5),
            "least_s": round(min(one.seconds), 5),
            "greatest_s": round(max(one.seconds), 5),
            "times_ours": round(one.median / measured[OURS].median, 2),
            "versions": one.versions,
            **about,
        }
        for name, one in measured.items()
    ]


def title(wanted: argparse.Namespace) -> str:
    """Of the section: on a GPU, one at equal precision does not replace the one of everybody's fastest."""
    ours, peers = precision(OURS, wanted), precision("pfl", wanted)
    equal = f", both in {ours}" if wanted.device == "cuda" and ours == peers else ""
    return f"Against peers: {wanted.task} on {wanted.device}{equal}"


def precision(name: str, wanted: argparse.Namespace) -> str:
    """The arithmetic that a system was asked for; everybody's default is float32."""
    if name == OURS:
        return dict(pair.partition("=")[::2] for pair in wanted.options).get("precision", records.FLOAT32)
    return (wanted.peer_precision if name == "pfl" else None) or records.FLOAT32


def table(measured: Mapping[str, Measured], missing: Mapping[str, str], users: int) -> str:
    """A row for each system; under it the systems that are left out, and why."""
    lines = [
        "| system | seconds a round (range) | ms a user | times ours | peak memory, MiB | on GPU, MiB | privacy |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    ours = measured[OURS].median if OURS in measured else float("nan")
    for name, one in measured.items():
        device = "" if one.peak_device_memory_bytes is None else f"{one.peak_device_memory_bytes / 2**20:.0f}"
        lines.append(
            f"| {one.versions} | {one.median:.3f} ({min(one.seconds):.3f} to {max(one.seconds):.3f}) | "
            f"{1e3 * one.median / users:.1f} | {one.median / ours:.2f} | {one.peak_memory_bytes / 2**20:.0f} | "
            f"{device} | {PEERS[name].privacy if name in PEERS else 'adaptive clip, noise'} |"
        )
    left_out = [f"Left out: {name}, which {reason}." for name, reason in missing.items()]
    return "\n".join([*lines, *([""] if left_out else []), *left_out])


def section(wanted: argparse.Namespace, text: str, command: str) -> str:
    """What is recorded of this run, without its title."""
    work = WORKLOADS[wanted.task]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if wanted.device == "cuda":
        machine += f", {gpu_name()}"
    return f"""`{command}`, {datetime.date.today()}, {machine}.
{wanted.users} users in every round, each with {work.examples} {work.unit} in batches of {work.batch_size}; about
{work.parameters:,} parameters; noise multiplier {NOISE_MULTIPLIER}. All in one run, by turns, with the threads each
takes by default: medians and ranges of {wanted.rounds} turns of {wanted.in_a_row} rounds in a row, after
{wanted.warmups} rounds to warm up. Memory is the most that a system's processes held.

{text}
"""


def main() -> None:
    """Measure, print, and record if asked to."""
    if any(flag.split("=")[0] == "--data" for flag in sys.argv[1:]):
        whole.main()
        return
    wanted = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing it has started outlives it
    measured, missing = measure(wanted)
    for name, reason in missing.items():
        print(f"{name} is left out: it {reason}", file=sys.stderr)
    if OURS not in measured:
        raise SystemExit(1)
    text = table(measured, missing, wanted.users)
    print(text)
    if wanted.record:
        command = " ".join(["python benchmarks/against_peers.py", *sys.argv[1:]])
        for line in as_records(measured, wanted, command):
            records.append(records.RESULTS / "rounds.jsonl", line)
        record(title(wanted), section(wanted, text, command))
    if wanted.json:
        print(as_json(measured, wanted.users, wanted.task))


if __name__ == "__main__":
    main()
