"""Attack the clipline that is importable and write down how far its promise holds.

`python studies/soundness/run.py --json FILE` measures, in a few minutes; `--only 1,6` takes some rows alone.
`python studies/soundness/run.py --table BEFORE.json AFTER.json` writes docs/results/soundness.md from two such files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded, as in all its children

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
import arithmetic
import inputs
import modules
import numpy as np
import relation
import runs
import stacks
import streams
import torch
from attack import Attack, Value
from wrap import wrapped

import clipline

WIDEST = 90  # characters of a message in a cell
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "soundness.md"
PARTS = (streams, stacks, modules, relation, runs, arithmetic, inputs)
ATTACKS: Sequence[Attack] = sorted(
    (attack for part in PARTS for attack in part.ATTACKS),
    key=lambda attack: (int(attack.number.rstrip("ab")), attack.number),
)
HEAD = """# Soundness

The accounting assumes two things of what a user adds to a round. It depends on nothing but the round's parameters, that
user's own examples, and randomness that nobody else shares. And it is no longer than the clip. Then two things follow:

- If a user who was sampled is removed, the clipped sum moves by at most one clip, and the sum of the bits by at most
  1/2.
- If a user who was not sampled is removed, renamed or altered, neither moves at all.

Each row below is an attack on that, or on what else leaves a run, through the public `Training` or the command line.
*Clips* are distances of two sums of clipped updates, over the clip. The private sum is read where the mechanism would
read it. Where clipline refuses a module or a setting, its message stands in the place of the figure.
"""


def main() -> int:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="measure, and write the figures here")
    parser.add_argument("--only", metavar="ROWS", help="measure these rows alone, as in 1,2a,6")
    parser.add_argument("--table", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="write the table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the table goes")
    given = parser.parse_args()
    if given.table:
        before, after = (json.loads(path.read_text()) for path in given.table)
        given.out.write_text(wrapped(document(before, after)))
        print(given.out)
        return 0
    chosen = ATTACKS
    if given.only:
        numbers = given.only.split(",")
        chosen = [attack for attack in ATTACKS if attack.number in numbers]
        if len(chosen) < len(set(numbers)):
            parser.error(f"--only {given.only}: the rows are {', '.join(attack.number for attack in ATTACKS)}")
    if given.json is None:
        parser.error("give --json FILE or --table BEFORE AFTER")
    record, failed = measured(chosen)
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failed else 0


def measured(attacks: Sequence[Attack]) -> tuple[dict[str, Any], bool]:
    """All figures with what they were measured on, and whether an attack itself went wrong."""
    begun, figures, failed = time.perf_counter(), {}, False
    for attack in attacks:
        try:
            figures[attack.number] = attack.figures()
        except Exception as error:  # the other rows are worth having
            figures[attack.number] = {one.key: f"the attack failed: {type(error).__name__}" for one in attack.measures}
            print(f"{attack.number}: the attack failed: {error!r}", file=sys.stderr)
            failed = True
        for key, value in figures[attack.number].items():
            print(f"{attack.number:3} {key:16} {shown(value)}", flush=True)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    seconds = round(time.perf_counter() - begun)
    about = {"commit": commit(), "date": str(datetime.date.today()), "versions": versions, "seconds": seconds}
    return {**about, "figures": figures}, failed


def commit() -> str:
    """Of the clipline that was attacked."""
    folder = Path(clipline.__file__).resolve().parent
    try:
        text = [
            _git(folder, "rev-parse", "--short=10", "HEAD"),
            "with changes" if _git(folder, "status", "--short", ".") else "",
        ]
    except (OSError, subprocess.CalledProcessError):
        return f"clipline {clipline.__version__}"
    return " ".join(text).strip()


def _git(folder: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
    ).stdout.strip()


def shown(value: Value) -> str:
    """A figure in a cell: three digits, or words that Markdown leaves alone. What is just above 1 does not become 1."""
    if isinstance(value, str):
        return (
            textwrap.shorten(value, WIDEST, placeholder=" ...")
            .replace("|", "\\|")
            .replace("<", "&lt;")
            .replace("`", "'")
        )
    return f"1 + {value - 1:.1g}" if 1 < value < 1.005 else f"{value:.3g}"


def document(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The page, from the figures of two commits."""
    lines = [HEAD, f"Before: {origin(before)}.\nAfter: {origin(after)}.\n"]
    for attack in ATTACKS:
        lines.append(f"## {attack.number}. {attack.title}\n")
        lines.append("| what | before | after | the promise |\n| --- | --- | --- | --- |")
        for one in attack.measures:
            cells = [
                figure.get("figures", {}).get(attack.number, {}).get(one.key, "not measured")
                for figure in (before, after)
            ]
            lines.append(f"| {one.what} | {shown(cells[0])} | {shown(cells[1])} | {one.promise} |")
        lines.append(f"\n{attack.how}\n")
    return "\n".join(lines)


def origin(record: Mapping[str, Any]) -> str:
    """What the figures were measured on, in words."""
    versions = ", ".join(f"{name} {version}" for name, version in record.get("versions", {}).items())
    commit_and_date = ", ".join(record[name] for name in ("commit", "date") if name in record)
    return (
        f"`python studies/soundness/run.py --json FILE` on commit {commit_and_date}, {versions}, {record['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
