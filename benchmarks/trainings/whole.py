r"""Whole trainings on real users, from the start of the process to the trained parameters: clipline and pfl-research.

    python benchmarks/against_peers.py --data real,even                                     this machine's cores
    python benchmarks/against_peers.py --data real --device cuda --here --precision bf16 \
        --budget 300 --results benchmarks/results/real_h200.jsonl                           a GPU, in five minutes

At equal precision: --precision float32 for float32 on both sides, --precision bf16 --peer-precision bf16 for bfloat16.

Real users are those of the stores that studies/data/convert.py makes; a store that is not in --stores is made from
--shared. Even users are as many, on the same rows, but everybody has the mean number of examples. Both systems train
the same users in the same rounds, drawn by Poisson sampling, with the paper's settings; both clip adaptively and add
noise. Neither evaluates, and clipline writes no run directory. Each uses the threads and processes that it takes by
default; on a machine with other work, where threads wait for each other, take --threads 1: then processor seconds are
recorded too, which such work disturbs less.

Every measurement is a process of its own, which starts with empty caches of compiled programs. Its clock runs from its
start to its end: imports, data, compilation and all rounds. pfl does --pfl-rounds rounds; the rest is estimated from
those after the first, by the number of batches. A training that meets the end of its share of --budget is estimated in
the same way, clipline's by the mean of the later half of its rounds.

--rounds paper takes as many rounds as the paper has for the task, 1,200 to 4,000. Where the budget ends first,
clipline's whole time too is an estimate, and is marked as one.

--systems clipline,second,pfl starts clipline a second time, with the compiled programs of the first process at hand,
for as many rounds as pfl does.

Each result is a line in --results at once, and what stands there is not measured again (--again does): a run that was
ended is repeated with the same command. `python benchmarks/performance_page.py` then writes the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.systems import (
    OURS,
    UnavailableError,
    add_peer_precision,
    check_peer_precision,
    environment_of,
    python_of,
)
from recording import gpu_name

from .cohorts import cohorts_of
from .process import summed, timed
from .records import RESULTS, Record, append, key, newest, read
from .users import StoredUsers

ROOT = Path(__file__).resolve().parents[2]
SECOND = "second"  # clipline once more, in a new process that finds the programs of the one before
SYSTEMS = (OURS, SECOND, "pfl")
PAPER = "paper"  # as many rounds as the paper's training of the task has
STORES = {  # task -> substitute data of studies/data, and its folder of the shared data
    "so_lr": ("articles", "stackoverflow_lr"),
    "emnist_cr": ("emnist62", "emnist"),
    "emnist_ae": ("emnist62", "emnist"),
    "so_nwp": ("blogs", "stackoverflow_nwp"),
    "cifar100": ("cifar100", "cifar100"),
    "shakespeare": ("shakespeare", "shakespeare"),
}  # quick ones first: what they leave of a budget is shared among the rest
USERS_ON_CORES = {"so_lr": 100, "emnist_cr": 10, "emnist_ae": 20, "so_nwp": 20, "cifar100": 12, "shakespeare": 10}
# Seconds that a measurement may want, (clipline, pfl), by which a budget is shared out. Nothing else depends on them.
DEMAND = {
    "cuda": {"so_lr": (25, 10), "emnist_cr": (25, 20), "emnist_ae": (25, 20), "so_nwp": (35, 25), "cifar100": (45, 30),
             "shakespeare": (80, 50)},
    "cpu": {"so_lr": (15, 30), "emnist_cr": (30, 25), "emnist_ae": (25, 25), "so_nwp": (50, 35), "cifar100": (80, 50),
            "shakespeare": (45, 30)},
}  # fmt: skip
# Of compiled programs: new and empty for each measurement, but for a second start.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
MIN_SHARE_S = 5.0  # less than this starts no process


@dataclass(frozen=True)
class Measurement:
    """One process to start."""

    task: str
    data: str  # "real" or "even"
    system: str
    users: int
    rounds: int
    turn: int

    def demand(self, device: str) -> float:
        """Its part of the budget, in parts."""
        ours, pfl = DEMAND[device][self.task]
        return float({OURS: ours, SECOND: 0.7 * ours, "pfl": pfl}[self.system])

    @property
    def program(self) -> str:
        """The system that runs."""
        return OURS if self.system == SECOND else self.system


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked; wrong ones end the program with a line that says what is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="real", help="real, even, or real,even")
    parser.add_argument("--tasks", default=",".join(STORES), help="some of %(default)s")
    parser.add_argument("--systems", default=f"{OURS},pfl", help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", help="of clipline: float32, tf32 or bf16")
    add_peer_precision(parser)
    parser.add_argument("--users", type=int, help="in every round; 100, on cores 4 to 100 by task")
    parser.add_argument("--rounds", type=_rounds, help="of a whole training, or paper; 100, on cores 10")
    parser.add_argument(
        "--pfl-rounds", type=int, default=20, help="that pfl and a second start do at most; the rest is estimated"
    )
    parser.add_argument("--threads", type=int, help="1: one thread and one process each, for a machine with other work")
    parser.add_argument("--turns", type=int, default=1, help="of all measurements, one after the other")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one process")
    parser.add_argument("--budget", type=float, help="seconds for all, shared out; what does not fit is left out")
    parser.add_argument("--results", type=Path, help="default: benchmarks/results/real_DEVICE.jsonl")
    parser.add_argument("--again", action="store_true", help="measure what stands in the results too")
    parser.add_argument("--here", action="store_true", help="use this Python for all systems, install nothing")
    parser.add_argument("--stores", type=Path, default=ROOT / "benchmarks" / ".stores")
    parser.add_argument("--shared", type=Path, default=Path(os.environ.get("CLIPLINE_SHARED", ROOT / "../shared/data")))
    parser.add_argument("--commit", help="where there is no git to ask")
    parser.add_argument("--note", help="a remark that is kept with the results")
    wanted = parser.parse_args(given)
    for name, known in (("data", ("real", "even")), ("tasks", tuple(STORES)), ("systems", SYSTEMS)):
        chosen = getattr(wanted, name).split(",")
        for one in chosen:
            if one not in known:
                parser.error(f"--{name} has {one!r} but must name some of {', '.join(known)}")
        setattr(wanted, name, chosen)
    check_peer_precision(parser, wanted)
    wanted.rounds = wanted.rounds or (10 if wanted.device == "cpu" else 100)
    for name in ("users", "rounds", "pfl_rounds", "threads", "turns", "limit", "budget"):
        value, least = getattr(wanted, name), 2 if "rounds" in name else 1
        if value not in (None, PAPER) and value < least:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least {least}")
    wanted.results = wanted.results or RESULTS / f"real_{wanted.device}.jsonl"
    return wanted


def plan(wanted: argparse.Namespace, machine: str) -> list[Measurement]:
    """What is to be measured, in order: real users first; systems by turns; without what has a result."""
    done = set()
    if wanted.results.exists() and not wanted.again:
        done = {name for name, record in newest(read([wanted.results])).items() if "failed" not in record}
    every = [
        Measurement(task, data, system, wanted.users or users_of(task, wanted.device), rounds_of(task, wanted), turn)
        for turn in range(wanted.turns)
        for data in sorted(wanted.data, reverse=True)  # real before even
        for task in STORES
        if task in wanted.tasks
        for system in wanted.systems
    ]
    about = {"kind": "training", "machine": machine, "threads": wanted.threads}
    return [one for one in every if key({**about, **vars(one), "precision": precision(one, wanted)}) not in done]


def precision(one: Measurement, wanted: argparse.Namespace) -> str | None:
    """The arithmetic that its system was asked for; None for the system's default, float32."""
    chosen = wanted.precision if one.program == OURS else wanted.peer_precision
    return None if chosen is None else str(chosen)


def users_of(task: str, device: str) -> int:
    """In a round, unless told otherwise: as many as cores can train in a second or so, or the paper's 100."""
    return USERS_ON_CORES[task] if device == "cpu" else 100


def rounds_of(task: str, wanted: argparse.Namespace) -> int:
    """Of a whole training: those that were asked for, or those of the paper."""
    return _facts(task).rounds if wanted.rounds == PAPER else wanted.rounds


def _rounds(text: str) -> int | str:
    return text if text == PAPER else int(text)


def share(waiting: Sequence[Measurement], device: str, left: float) -> float:
    """Seconds of what is `left` for the first of those that wait, in proportion to their demands."""
    return left * waiting[0].demand(device) / sum(one.demand(device) for one in waiting)


def store_of(task: str, wanted: argparse.Namespace) -> Path:
    """The folder of the task's store, made first if it is not there."""
    name, folder = STORES[task]
    store, source = wanted.stores / name, wanted.shared / folder
    if (store / "train" / "population.json").is_file():
        return Path(store)
    if not source.is_dir():
        raise UnavailableError(f"has no data: neither {store} nor {source} is there")
    print(f"making {store} from {source}", file=sys.stderr)
    script = ROOT / "studies" / "data" / "convert.py"
    command = [sys.executable, str(script), name, "--from", str(source), "--to", str(store)]
    made = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment_of(OURS, "cpu", here=False)
    )
    if made.returncode:
        raise UnavailableError(f"has no data: {made.stderr.strip().splitlines()[-1]}")
    return Path(store)


def settings_of(task: str) -> dict[str, Any]:
    """The paper's, which both systems train with."""
    facts = _facts(task)
    return {
        "client_lr": facts.client_lr,
        "server_lr": facts.server_lr,
        "server_momentum": 0.9,
        "batch_size": facts.batch_size,
        "max_examples": facts.max_examples,
        "noise_multiplier": facts.noise_at_100,
        "clip_start": 0.1,
    }


def _facts(task: str) -> Any:
    sys.path.insert(0, str(ROOT / "src"))
    from clipline_paper.facts import FACTS

    return FACTS[task]


def measure(one: Measurement, wanted: argparse.Namespace, limit: float, scratch: Path) -> Record:
    """Start one training, and say what came of it. Compiled programs stay in `scratch`, for a second start."""
    caches = scratch / f"{one.task}-{one.data}-{one.turn}-{one.program}"
    if one.system == SECOND and not caches.exists():
        return {"failed": f"needs {OURS} before it in the same command", "rounds_done": 0}
    try:
        store = store_of(one.task, wanted)
        python = python_of(one.program, wanted.here)
    except UnavailableError as error:
        return {"failed": str(error), "rounds_done": 0}
    settings, ours = settings_of(one.task), one.program == OURS
    stored = StoredUsers(store, even=one.data == "even", max_examples=settings["max_examples"])
    cohorts = cohorts_of(stored, one.users, one.rounds, settings["batch_size"], seed=one.turn)
    # A second start asks for all rounds, as what is compiled depends on how many they are, and ends after a few.
    few = min(one.rounds, wanted.pfl_rounds)
    rounds = one.rounds if ours else few
    command = [python, str(ROOT / "benchmarks" / "trainings" / f"{one.program}_training.py")]
    command += ["--task", one.task, "--store", str(store), "--users", str(one.users), "--rounds", str(rounds)]
    command += ["--device", wanted.device, "--settings", json.dumps(settings)]
    command += ["--even"] if one.data == "even" else []
    command += ["--stop-after", str(few)] if one.system == SECOND else []
    if ours:
        options = {"seed": one.turn, "precision": wanted.precision, "workers": wanted.threads}
        command += ["--options", json.dumps({name: value for name, value in options.items() if value is not None})]
    else:
        (scratch / "cohorts.json").write_text(json.dumps(cohorts.users[:rounds]))
        command += ["--cohorts", str(scratch / "cohorts.json")]
        command += ["--precision", wanted.peer_precision] if wanted.peer_precision else []
    environment = environment_of(one.program, wanted.device, wanted.here)
    environment |= {variable: str(caches / variable.lower()) for variable in CACHES}
    if wanted.threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(wanted.threads))
    caches.mkdir(exist_ok=True)
    found = timed(command, environment, limit)
    return found if "failed" in found else summed(found, one.program, cohorts.batches, wanted.threads)


def commit_of(given: str | None) -> str:
    """As given, or as git says; with a plus where the source has changes that are not committed."""
    if given:
        return given
    ask = {"cwd": ROOT, "capture_output": True, "text": True, "check": False}
    try:
        found = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], **ask)
        changed = subprocess.run(["git", "status", "--porcelain", "--", "src"], **ask).stdout.strip()
    except OSError:
        return "unknown"
    return found.stdout.strip() + ("+" if changed else "") if found.returncode == 0 else "unknown"


def main(given: Sequence[str] | None = None) -> None:
    """Measure what is missing, a line of the results for each, and print what they are."""
    wanted = arguments(given)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing it has started outlives it
    machine = gpu_name() if wanted.device == "cuda" else f"{os.cpu_count()} cores"
    about = {
        "date": str(datetime.date.today()),
        "commit": commit_of(wanted.commit),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **({"note": wanted.note} if wanted.note else {}),
    }
    with tempfile.TemporaryDirectory(prefix="whole-trainings-", ignore_cleanup_errors=True) as scratch:
        _measure_all(wanted, machine, about, Path(scratch))


def _measure_all(wanted: argparse.Namespace, machine: str, about: Record, scratch: Path) -> None:
    waiting, begun = plan(wanted, machine), time.monotonic()
    while waiting:
        one, limit = waiting[0], wanted.limit
        if wanted.budget is not None:
            limit = min(limit, share(waiting, wanted.device, begun + wanted.budget - time.monotonic()))
        waiting = waiting[1:]
        record: Record = {"kind": "training", "machine": machine, "device": wanted.device, **vars(one)}
        load = os.getloadavg()[0]
        if limit < MIN_SHARE_S:
            record["failed"] = "the budget was spent"
        else:
            record |= measure(one, wanted, limit, scratch)
        record |= {"threads": wanted.threads} if wanted.threads else {}
        record |= {"precision": chosen} if (chosen := precision(one, wanted)) else {}
        record |= {"limit_s": round(limit, 1), "load": [round(load, 2), round(os.getloadavg()[0], 2)], **about}
        append(wanted.results, record)
        print(line_of(record), file=sys.stderr, flush=True)


def line_of(record: Mapping[str, Any]) -> str:
    """One measurement in words."""
    what = f"{record['task']}, {record['data']} users, {record['system']}: "
    if "failed" in record:
        return what + record["failed"]
    how = f"estimated from {record['rounds_done']} rounds" if record["estimated"] else "measured"
    rounds = f"{record['rounds']} rounds of {record['users']} users"
    parts = f"start {record['start_s']:.1f} s, a later round {record['later_round_s']:.3f} s"
    return f"{what}{record['seconds']:.1f} s for {rounds} ({how}; {parts})"
