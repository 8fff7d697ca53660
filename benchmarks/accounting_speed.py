"""How fast is the accountant? Against dp_accounting 0.6.0, in one run, on the same machine.

    python benchmarks/accounting_speed.py            prints a table
    python benchmarks/accounting_speed.py --record   also writes it into benchmarks/results/README.md

dp_accounting pins old versions of other packages, so that it gets a throw-away environment of its own. Each question is
asked of both in turn, several times, and the medians are compared. Our caches are emptied before every question:
without that the second asking would be free. Both calibrations end within 10^-4 of epsilon or better
(the other one is told to find the noise multiplier to 10^-5).
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import recording

from clipline.privacy.accountant import account, account_renyi
from clipline.privacy.calibration import noise_multiplier_for
from clipline.privacy.events import FixedSizeSampling, GaussianEvent, PoissonSampling
from clipline.privacy.ledger import Ledger
from clipline.privacy.relations import Relation

PEER = "dp_accounting==0.6.0"
DELTA, ROUNDS, COHORT, USERS, NOISE = 10**-6.6, 1500, 13958, 10**6, 1.3958
POISSON, FIXED = PoissonSampling(COHORT / USERS), FixedSizeSampling(COHORT, USERS)
ADD, REPLACE = Relation.ADD_OR_REMOVE, Relation.REPLACE_ONE

# The other side: reads the name of a question, answers with seconds and result. `sensitivity` is halved noise for RDP.
PEER_SCRIPT = """
import json, sys, time
import dp_accounting as dp
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
DELTA, ROUNDS, COHORT, USERS, NOISE = 10**-6.6, 1500, 13958, 10**6, 1.3958
ADD, REPLACE = dp.NeighboringRelation.ADD_OR_REMOVE_ONE, dp.NeighboringRelation.REPLACE_ONE
def poisson(z):
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(COHORT / USERS, dp.GaussianDpEvent(z)), ROUNDS)
def fixed(z):
    sampled = dp.SampledWithoutReplacementDpEvent(USERS, COHORT, dp.GaussianDpEvent(z / 2))
    return dp.SelfComposedDpEvent(sampled, ROUNDS)
def epsilon(accountant, event):
    return accountant().compose(event).get_epsilon(DELTA)
def calibrate(accountant, make):
    return dp.calibrate_dp_mechanism(accountant, make, 5.0, DELTA, dp.LowerEndpointAndGuess(0.3, 1.0), tol=1e-5)
QUESTIONS = {
    "epsilon, Renyi, Poisson": lambda: epsilon(lambda: RdpAccountant(), poisson(NOISE)),
    "epsilon, privacy loss, Poisson": lambda: epsilon(lambda: PLDAccountant(ADD), poisson(NOISE)),
    "epsilon, privacy loss, Poisson, replace-one": lambda: epsilon(lambda: PLDAccountant(REPLACE), poisson(NOISE)),
    "calibration, Renyi, Poisson": lambda: calibrate(lambda: RdpAccountant(), poisson),
    "calibration, Renyi, fixed size": lambda: calibrate(lambda: RdpAccountant(neighboring_relation=REPLACE), fixed),
    "calibration, privacy loss, Poisson": lambda: calibrate(lambda: PLDAccountant(ADD), poisson),
}
for line in sys.stdin:
    start = time.perf_counter()
    answer = float(QUESTIONS[json.loads(line)]())
    print(json.dumps([time.perf_counter() - start, answer]), flush=True)
"""


def spent(accountant: Callable[..., object], sampling: object, relation: Relation) -> float:
    """Epsilon of the plan of Stack Overflow."""
    ledger = Ledger().add(GaussianEvent(sampling, NOISE), ROUNDS)  # type: ignore[arg-type]
    return accountant(ledger, delta=DELTA, relation=relation).epsilon  # type: ignore[attr-defined]


def noise(accountant: Callable[..., object], sampling: object, relation: Relation) -> float:
    """The least noise for epsilon 5 in that plan."""
    return noise_multiplier_for(
        sampling=sampling,  # type: ignore[arg-type]
        rounds=ROUNDS,
        epsilon=5.0,
        delta=DELTA,
        relation=relation,
        accountant=accountant,  # type: ignore[arg-type]
    )


# question -> (ours, how often it is asked, wanted ratio). Lower answers are tighter.
QUESTIONS: dict[str, tuple[Callable[[], float], int, float | None]] = {
    "epsilon, Renyi, Poisson": (lambda: spent(account_renyi, POISSON, ADD), 9, None),
    "epsilon, privacy loss, Poisson": (lambda: spent(account, POISSON, ADD), 9, None),
    "epsilon, privacy loss, Poisson, replace-one": (lambda: spent(account, POISSON, REPLACE), 9, None),
    "calibration, Renyi, Poisson": (lambda: noise(account_renyi, POISSON, ADD), 7, 20),
    "calibration, Renyi, fixed size": (lambda: noise(account_renyi, FIXED, REPLACE), 5, 20),
    "calibration, privacy loss, Poisson": (lambda: noise(account, POISSON, ADD), 5, 10),
}


def forget() -> None:
    """Empty every cache of the package."""
    for name, module in list(sys.modules.items()):
        if name.startswith("clipline"):
            for thing in vars(module).values():
                if isinstance(thing, functools._lru_cache_wrapper):
                    thing.cache_clear()


def ask_ours(question: str) -> tuple[float, float]:
    """(seconds, answer)."""
    forget()
    start = time.perf_counter()
    answer = QUESTIONS[question][0]()
    return time.perf_counter() - start, answer


def main() -> None:
    """Ask both sides, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write benchmarks/results/README.md")
    record = parser.parse_args().record
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, env=environment)
        python = Path(folder) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True, env=environment)
        peer = subprocess.Popen(
            [python, "-c", PEER_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert peer.stdin is not None
        assert peer.stdout is not None
        for question, (_, times, wanted) in QUESTIONS.items():
            ask_ours(question)  # imports
            ours, theirs = [], []
            for _ in range(times):
                ours.append(ask_ours(question))
                print(json.dumps(question), file=peer.stdin, flush=True)
                theirs.append(json.loads(peer.stdout.readline()))
            rows.append((question, ours, theirs, wanted))
            print(f"asked {times} times: {question}", file=sys.stderr)
        peer.stdin.close()
        peer.wait()
    text = table(rows)
    print(text)
    if record:
        write(text)


def table(rows: list[tuple[str, list[tuple[float, float]], list[list[float]], float | None]]) -> str:
    """Medians, the ratio with its range, and both answers."""
    lines = [
        "| question | ours, ms | dp_accounting, ms | ratio (range) | wanted | our answer | its answer |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for question, ours, theirs, wanted in rows:
        ratios = sorted(b[0] / a[0] for a, b in zip(ours, theirs, strict=True))
        one, other = (1e3 * statistics.median(x[0] for x in side) for side in (ours, theirs))
        lines.append(
            f"| {question} | {one:.1f} | {other:.0f} | {other / one:.0f} ({ratios[0]:.0f} to {ratios[-1]:.0f}) | "
            f"{'' if wanted is None else f'{wanted:.0f}'} | {ours[0][1]:.6f} | {theirs[0][1]:.6f} |"
        )
    return "\n".join(lines)


def write(text: str) -> None:
    """Record the section."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    about = f"""`python benchmarks/accounting_speed.py --record`, {datetime.date.today()}, {machine}, one thread.
Stack Overflow's plan: {COHORT} of {USERS} users, {ROUNDS} rounds, delta 10^-6.6; epsilon at noise multiplier {NOISE},
or the least noise multiplier for epsilon 5. Lower answers are tighter. Caches emptied before each question; medians.
Renyi with a fixed size: our curve is the tight one, the other library's is Theorem 27."""
    recording.record("Accounting", f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
