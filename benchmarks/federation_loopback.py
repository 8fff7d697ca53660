"""How long does a round take over real SuperNodes on this machine, and what does a killed node cost?

    python benchmarks/federation_loopback.py [--record]      # five minutes; needs the extra `federation` and nginx

The federation is that of `clipline new-federation`: TLS, node keys, a proxy, three nodes, a model of three parameters.
Nearly all of a round is waiting: a node looks for messages every three seconds, and starts a process for each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import recording

from clipline.cli.new_federation import new_federation

ROUNDS, KILLED_AFTER, DEADLINE = 5, 4, 30
LONGEST = 300  # seconds for all rounds


class Federation:
    """Runs scripts in its folder."""

    def __init__(self, folder: Path, upload: str) -> None:
        new_federation(folder)
        task = folder / "app" / "rides" / "task.py"
        text = task.read_text(encoding="utf-8")
        assert "UPLOAD = cl.SecureSum(18)" in text
        task.write_text(text.replace("UPLOAD = cl.SecureSum(18)", f"UPLOAD = {upload}"), encoding="utf-8")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ports = {"PORT": "18443", "INNER": "18080", "OWN": "18090"}
        self.folder, self.env = folder, {**os.environ, **ports, "PATH": path}

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """A script, in the background."""
        return subprocess.Popen(
            ["bash", "-c", script], cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
        )

    def rounds(self) -> int:
        """That were released."""
        lines = self.folder / "run" / "metrics.jsonl"
        return lines.read_text(encoding="utf-8").count("\n") if lines.exists() else 0

    def seconds(self) -> tuple[list[float], list[float]]:
        """Of rounds with three nodes but the first, and with one of them killed."""
        assert self.start("./make_certs && ./up").wait() == 0
        running = self.start(f'. ./settings; flwr run app ours --run-config "rounds={ROUNDS} deadline={DEADLINE}.0"')
        begun, ends = time.monotonic(), list[float]()
        while len(ends) < ROUNDS:
            if time.monotonic() > begun + LONGEST:
                raise TimeoutError("too few rounds: the machine is too busy for this deadline")
            if self.rounds() > len(ends):
                ends.append(time.monotonic())
                if len(ends) == KILLED_AFTER:
                    node = int((self.folder / "state" / "node3.pid").read_text())
                    os.killpg(node, signal.SIGKILL)
            time.sleep(0.02)
        running.wait()
        took = [after - before for before, after in itertools.pairwise(ends)]
        return took[: KILLED_AFTER - 1], took[KILLED_AFTER - 1 :]


def main() -> None:
    """Measure, print, and keep the answer if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    record = parser.parse_args().record
    rows, load = [], os.getloadavg()[0]
    for name, upload, target in (("plain", "None", 12), ("secure sum", "cl.SecureSum(18)", 25)):
        with tempfile.TemporaryDirectory() as folder:
            federation = Federation(Path(folder) / "rides", upload)
            try:
                three, killed = federation.seconds()
            finally:
                federation.start("./down").wait()
        for case, seconds, limit in (
            ("three nodes", three, f"{target} s"),
            ("one of them killed", killed, "a deadline"),
        ):
            row = (
                name,
                case,
                f"{statistics.median(seconds):.1f} s",
                f"{min(seconds):.1f} to {max(seconds):.1f}",
                limit,
            )
            rows.append(row)
            print(*row, flush=True)
    load = max(load, os.getloadavg()[0])
    body = recording.table(("round", "nodes", "median", "range", "target"), rows)
    body += f"\n\nThe deadline of a stage was {DEADLINE} s. {recording.machine('cpu')}; load average up to {load:.1f}."
    print(body)
    if record:
        recording.record("A federation on loopback", body)


if __name__ == "__main__":
    main()
