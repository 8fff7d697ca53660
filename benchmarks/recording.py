"""What the benchmarks share: a description of the machine, and a place for their results."""

from __future__ import annotations

import datetime
import fcntl
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

DETAILS = Path(__file__).resolve().parent / "results" / "details"  # sections of results/README.md


def gpu_name() -> str:
    """As the driver calls it."""
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "a GPU"


def machine(device: str) -> str:
    """Date and machine, for the first line of a record."""
    import torch

    text = f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    text += f", torch {torch.__version__}"
    return f"{text}, {gpu_name()}" if device.startswith("cuda") else text


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def own_bytes() -> int:
    """What this process holds of its own: without files that are mapped, whose pages the system may take back."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def record(title: str, body: str) -> None:
    """Keep the section, in the place of the last one of that title, and write the pages anew."""
    import performance_page

    write_section(DETAILS, title, body)
    performance_page.write()


def write_section(folder: Path, title: str, body: str) -> Path:
    """The section as a file of its own, named after its title."""
    path = folder / (re.sub(r"[^a-z0-9_]+", "-", title.lower()).strip("-") + ".md")
    path.write_text(f"# {title}\n\n{body.strip()}\n", encoding="utf-8")
    return path


def command_line() -> str:
    """The command that is running, as a reader would repeat it."""
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *(a for a in sys.argv[1:] if a != "--record")])


def in_processes(count: int, seconds: float, out: Path) -> None:
    """The running script again, `work` in the place of `run`, in so many processes that share one list of jobs."""
    taken(out).unlink(missing_ok=True)
    environment = {**os.environ, "UNTIL": str(time.time() + seconds), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, sys.argv[0], "work", *sys.argv[2:]]
    running = [subprocess.Popen(command, env=environment) for _ in range(count)]
    for process in running:
        process.wait()
    taken(out).unlink(missing_ok=True)


def time_is_up() -> bool:
    """Whether a process of `in_processes` should begin no other job."""
    return time.time() > float(os.environ["UNTIL"])


def taken(out: Path) -> Path:
    """The jobs that some process has begun."""
    return Path(f"{out}.taken")


def take(out: Path, job: str) -> bool:
    """Whether no other process has taken this job before."""
    with taken(out).open("a+", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        held.seek(0)
        if job in held.read().splitlines():
            return False
        held.write(job + "\n")
    return True


def append(out: Path, lines: Sequence[str]) -> None:
    """Add lines to a file that other processes add to as well."""
    with out.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("".join(line + "\n" for line in lines))


def lines_of(out: Path) -> list[str]:
    """The lines of a file that may not be there yet."""
    return out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
