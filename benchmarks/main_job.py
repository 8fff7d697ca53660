"""Question: what does the main job (`clipline train`) cost, and what does its privacy cost in accuracy?

Peer: the same training without clipping and noise. Run `python benchmarks/main_job.py [--seeds N]` in the installed
environment; each training is a process of its own, so that time and memory are those a user would see.
The last result is in benchmarks/results/README.md.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def run(*flags: str) -> dict[str, float]:
    """One training: its JSON summary, with wall seconds and peak memory in MiB of that process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "clipline", "train", *flags, "--json", "--out", str(Path(folder) / "run")]
        begun = time.perf_counter()
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
        seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024  # of the largest child so far
    return {**json.loads(out.splitlines()[-1]), "seconds": seconds, "peak_mib": peak}


def main() -> None:
    """Print a table: a row for each seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    print("seed  private  unclipped  gap/points  epsilon     delta  seconds  peak MiB")
    for seed in range(seeds):
        private = run("--seed", str(seed))
        plain = run("--seed", str(seed), "--clip", "none", "--noise-multiplier", "0")
        gap = 100 * (plain["metric"] - private["metric"])
        print(
            f"{seed:4d}  {private['metric']:7.4f}  {plain['metric']:9.4f}  {gap:10.2f}  {private['epsilon']:7.3f}"
            f"  {private['delta']:8.2e}  {private['seconds']:7.1f}  {private['peak_mib']:8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
