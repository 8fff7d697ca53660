"""`python -m tests.fuzz --minutes 60`: fuzz every reader, keep what is found as cases, and say what was done."""

import argparse
import json
import os
import secrets
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.fuzzing import batch
from fuzz.targets import targets


def main() -> int:
    """Rounds over all targets until the time is over; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", help="targets whose name has this")
    parser.add_argument("--seed", type=int, default=None, help="of the first input; random if left out")
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--json", help="a file for the counts")
    given = parser.parse_args()
    first = secrets.randbits(40) if given.seed is None else given.seed
    until, counts, seen = time.monotonic() + 60 * given.minutes, {}, {}
    chosen = [target for target in targets() if (given.only or "") in target.name]
    seed = first
    with TemporaryDirectory() as work:
        while time.monotonic() < until:
            for target in chosen:
                if time.monotonic() > until:
                    break
                came, found = batch(target, seed, -(-given.batch // target.slow), Path(work) / "work")
                counts.setdefault(target.name, Counter()).update(came)
                for one in found:
                    if (target.name, one.what) not in seen:
                        seen[target.name, one.what] = one.keep()
                        print(f"{target.name}: {one.what}\n  kept as {seen[target.name, one.what]}", flush=True)
            seed += given.batch
    total = sum(counts.values(), Counter())
    print(f"seed {first}: {total.total():,} inputs, {total['read']:,} read, {total['refused']:,} refused")
    print(f"{total['found']:,} others, {len(seen)} kinds")
    if given.json:
        Path(given.json).write_text(json.dumps({"seed": first, "counts": counts, "kinds": len(seen)}, indent=1))
    return 1 if seen else 0


sys.exit(main())
