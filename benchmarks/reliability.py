"""Question: what is lost, or silently wrong, after power cuts, kills, damage, edits and absurd input?

    python benchmarks/reliability.py kills --count 300
    python benchmarks/reliability.py cuts --count 40            # needs root, for loop-mounted ext4
    python benchmarks/reliability.py corruptions --count 300
    python benchmarks/reliability.py rounds --count 10000
    python benchmarks/reliability.py edits | audits
    python -m tests.fuzz --minutes 60 --json FILE && python benchmarks/reliability.py fuzz --file FILE
    python benchmarks/reliability.py page

Each part keeps its counts in results/reliability.json; `page` writes docs/results/reliability.md from them. Every
training is a forked process, and so is whoever looks at its files.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import pickle
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from torch import nn

import clipline as cl
from clipline.errors import CliplineError
from clipline.privacy.ledger import Ledger
from clipline.training.callbacks import Callback
from clipline.training.run_files import LEDGER, METRICS, MODEL, SETTINGS

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "benchmarks" / "results" / "reliability.json"
PAGE = ROOT / "docs" / "results" / "reliability.md"
ROUNDS = 40
NOT_ONCE = "ended, some rounds released or charged again"
ADDED_UP = ("kills", "cuts", "corruptions")


def training(noise: str, rounds: int = ROUNDS) -> cl.Training:
    """A linear classifier of 60 users, whose rounds take some milliseconds."""
    rng = np.random.default_rng(0)
    people = cl.Population.from_arrays(
        np.arange(240) % 60, x=rng.normal(size=(240, 6)).astype(np.float32), y=rng.integers(0, 3, 240)
    )
    model = nn.Linear(6, 3, bias=False)
    nn.init.zeros_(model.weight)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    privacy = cl.Privacy(epsilon=8.0, population_size=60, delta=1e-3, noise_source=noise)
    return cl.Training(
        model, loss, people, rounds=rounds, cohort_size=12, local=cl.LocalSGD(lr=0.1), privacy=privacy,
        seed=1 << 60 if noise == "seed" else None,
    )  # fmt: skip


class Seen(Callback):
    """Tells the parent of each release: its round and a checksum of what it led to."""

    reads_guarantee = False

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_release(self, state: Any) -> None:
        """A line; whatever comes after this may be lost, and this has been seen."""
        os.write(self.pipe, f"{state.round_index} {zlib.crc32(state.params.numpy().tobytes())}\n".encode())


def forked(work: Callable[[int], object]) -> tuple[int, int]:
    """Process and pipe of a child that does this work, is handed the pipe's end, and leaves without cleaning up."""
    out, into = os.pipe()
    child = os.fork()
    if child:
        os.close(into)
        return child, out
    code = 1
    try:
        os.close(out)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        warnings.simplefilter("ignore")
        torch.set_num_threads(1)
        work(into)
        code = 0
    finally:
        os._exit(code)


def answer(work: Callable[[], Any]) -> Any:
    """What this gives in a process of its own."""

    def told(pipe: int) -> None:
        try:
            found = work()
        except CliplineError as error:
            found = error
        with os.fdopen(pipe, "wb") as file:
            pickle.dump(found if not isinstance(found, CliplineError) else ("refused", str(found)), file)

    child, out = forked(told)
    with os.fdopen(out, "rb") as file:
        data = file.read()
    os.waitpid(child, 0)
    return pickle.loads(data) if data else ("crashed", "")


def train(path: Path, noise: str, resume: bool, rounds: int | None = None) -> Callable[[int], None]:
    """A run, or the rest of one; its last line tells what came of it."""

    def work(pipe: int) -> None:
        job, seen = training(noise, rounds or ROUNDS), Seen(pipe)
        try:
            result = job.resume(path, [seen]) if resume else job.run([seen, cl.RunDirectory(path)])
        except CliplineError as error:
            os.write(pipe, f"refused {json.dumps(str(error))}\n".encode())
            return
        os.write(pipe, f"done {outcome(result)}\n".encode())

    return work


def outcome(result: cl.TrainResult) -> str:
    """Model and guarantee in one word."""
    bits = zlib.crc32(b"".join(value.numpy().tobytes() for value in result.model.state_dict().values()))
    return f"{bits}/{result.guarantee.epsilon!r}/{result.guarantee.rounds}"


def until(pipe: int, lines: int, patience: float = 120.0) -> list[str]:
    """Lines from a pipe: so many, or as many as come."""
    data = b""
    while data.count(b"\n") < lines and select.select([pipe], [], [], patience)[0]:
        part = os.read(pipe, 1 << 16)
        if not part:
            break
        data += part
    return data.decode().splitlines()


def charged(path: Path) -> int:
    """Rounds in the ledger, as they stand on disk."""
    return answer(lambda: Ledger.read(path / LEDGER, unfinished=True).rounds if (path / LEDGER).is_file() else 0)


def releases(lines: list[str]) -> set[str]:
    """Different releases among what was seen."""
    return {line for line in lines if line[:1].isdigit()}


def warm(folder: Path) -> None:
    """Import here whatever a run imports, so that children need not; no thread is begun here."""

    def modules() -> list[str]:
        training("seed").run([cl.RunDirectory(folder / "warm")])
        return sorted(sys.modules)

    for name in answer(modules):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    for noise in ("seed", "system"):
        training(noise)


def reference(noise: str, folder: Path) -> str | None:
    """What an uncut run gives; None where no two runs are alike."""
    if noise != "seed":
        return None
    child, pipe = forked(train(folder / "reference", noise, False))
    lines = until(pipe, 10**9)
    os.close(pipe)
    os.waitpid(child, 0)
    return lines[-1]


def kills(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Runs that are killed between one and eight times, each somewhere, and then go on to the end."""
    found: Counter[str] = Counter()
    rng = random.Random(seed)
    wanted = {noise: reference(noise, folder) for noise in ("seed", "system")}
    number = 0
    while found["kills"] < count:
        number += 1
        noise = rng.choice(("seed", "system"))
        path, seen, resume = folder / f"run{number}", set[str](), False
        found[f"runs, noise from {noise}"] += 1
        attempts = rng.randint(1, 8)
        for attempt in range(attempts + 1):
            last = attempt == attempts or found["kills"] >= count
            child, pipe = forked(train(path, noise, resume))
            lines = until(pipe, 10**9 if last else rng.randint(0, 12))
            if not last:
                time.sleep(rng.random() * 0.02)
                os.kill(child, signal.SIGKILL)
                lines += until(pipe, 10**9)
                found["kills"] += 1
            os.close(pipe)
            os.waitpid(child, 0)
            seen |= releases(lines)
            if charged(path) < len(seen):
                found["undercharged"] += 1
            ends = [line for line in lines if line.startswith(("done", "refused"))]
            if ends and ends[-1].startswith("refused"):
                found["refused with nothing released" if not seen else "refused"] += 1
                shutil.rmtree(path, ignore_errors=True)
                seen, resume = set(), False
                continue
            if ends:
                found["ended"] += 1
                once = charged(path) == len(seen) == ROUNDS
                found["ended, every round released and charged once" if once else NOT_ONCE] += 1
                if wanted[noise] is not None:
                    found["ended equal to the bit" if ends[-1] == wanted[noise] else "ended otherwise"] += 1
                break
            if not path.is_dir() or not any(path.iterdir()):
                found["killed before the folder was made"] += 1
                shutil.rmtree(path, ignore_errors=True)
            resume = path.is_dir()
        shutil.rmtree(path, ignore_errors=True)
    return dict(found)


@contextmanager
def mounted(image: Path, at: Path):
    """An ext4 image that writes nothing by itself for ten minutes."""
    at.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", "loop,commit=600", image, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def cuts(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """The disk as it was at one moment, mounted anew. In the control nothing is synced."""
    found: Counter[str] = Counter()
    rng = random.Random(seed)
    wanted = {noise: reference(noise, folder) for noise in ("seed", "system")}
    for number in range(count + count // 4):
        control, noise = number >= count, ("seed", "system")[number % 2]
        kind = "control: " if control else ""
        image, cut = folder / "disk.img", folder / "cut.img"
        with image.open("wb") as file:
            file.truncate(24 << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        with mounted(image, folder / "disk") as disk:
            os.sync()

            def work(pipe: int, where: Path = disk / "run", noise: str = noise, control: bool = control) -> None:
                if control:
                    os.fsync = os.fdatasync = lambda descriptor: None
                train(where, noise, False)(pipe)

            child, pipe = forked(work)
            lines = until(pipe, rng.randint(0, ROUNDS - 1))
            time.sleep(rng.random() * 0.02)
            os.kill(child, signal.SIGSTOP)
            time.sleep(0.05)
            shutil.copyfile(image, cut)
            os.kill(child, signal.SIGKILL)
            lines += until(pipe, 10**9)  # what had been seen by then
            os.close(pipe)
            os.waitpid(child, 0)
        seen = releases(lines)
        found[f"{kind}power cuts"] += 1
        with mounted(cut, folder / "after") as after:
            if charged(after / "run") < len(seen):
                found[f"{kind}undercharged"] += 1
            if not seen:
                found[f"{kind}cut before the first release"] += 1
            if control or not seen:
                continue
            child, pipe = forked(train(after / "run", noise, True))
            lines = until(pipe, 10**9)
            os.close(pipe)
            os.waitpid(child, 0)
            seen |= releases(lines)
            if charged(after / "run") < len(seen):
                found["undercharged after the resume"] += 1
            ends = [line for line in lines if line.startswith(("done", "refused"))]
            found["resumed to the end" if ends and ends[-1].startswith("done") else "not resumed"] += 1
            if wanted[noise] is not None and ends:
                found["ended equal to the bit" if ends[-1] == wanted[noise] else "ended otherwise"] += 1
    return dict(found)


def damage(rng: random.Random, data: bytes) -> bytes:
    """A flipped bit, a lost end, a block of zeros, or a block from elsewhere: what disks do."""
    out, at = bytearray(data), rng.randrange(max(1, len(data)))
    kind = rng.randrange(4)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        out[at : at + 512] = bytes(len(out[at : at + 512]))
    else:
        other = rng.randrange(len(data))
        part = out[other : other + 64]
        out[at : at + len(part)] = part
    return bytes(out)


def corruptions(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Files of finished and of interrupted runs, one damaged each time."""
    from clipline.trust.verify import seal, verify

    rng, found = random.Random(seed), Counter[str]()
    wanted = reference("seed", folder)
    whole, stopped = folder / "reference", folder / "stopped"
    child, pipe = forked(train(stopped, "seed", False))
    until(pipe, ROUNDS * 2 // 3)
    os.kill(child, signal.SIGKILL)
    os.close(pipe)
    os.waitpid(child, 0)
    noted = answer(lambda: seal(whole))
    copy = folder / "copy"

    def looked_at() -> tuple[str, str]:
        checked = verify(copy)
        return ("verify", checked.problems[0]) if checked.problems else ("agrees", seal(copy))

    def load() -> tuple[str, str]:
        cl.load(copy, lambda: nn.Linear(6, 3, bias=False))
        return "loaded", ""

    while found["damaged files"] < count:
        run = rng.choice((whole, stopped))
        names = [SETTINGS, LEDGER, METRICS, MODEL] if run is whole else sorted(
            path.name for path in run.iterdir() if path.is_file() and "partial" not in path.name
        )  # fmt: skip
        name = rng.choice(names)
        data = (run / name).read_bytes()
        bad = damage(rng, data)
        if bad == data:
            continue
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(run, copy)
        (copy / name).write_bytes(bad)
        found["damaged files"] += 1
        if run is stopped:
            child, pipe = forked(train(copy, "seed", True))
            lines = until(pipe, 10**9)
            os.close(pipe)
            os.waitpid(child, 0)
            ends = [line for line in lines if line.startswith(("done", "refused"))]
            if not ends:
                found["resume: crashed"] += 1
            elif ends[-1].startswith("refused"):
                found["resume: refused"] += 1
            elif ends[-1] == wanted:
                found["resume: ended equal to the bit"] += 1
            else:
                found[f"resume: silent, {name}"] += 1
            continue
        said, what = answer(looked_at)
        loaded = answer(load)[0] if name == MODEL else "refused"
        if said == "crashed" or loaded == "crashed":
            found["finished: crashed"] += 1
        elif loaded == "loaded":
            found["finished: model loaded silently"] += 1
        elif said in ("verify", "refused"):
            found["finished: named by verify"] += 1
        elif what != noted:
            found["finished: only the seal differs"] += 1
        else:
            found[f"finished: silent, {name}"] += 1
    return dict(found)


def many_rounds(count: int, seed: int, folder: Path) -> dict[str, Any]:
    """One long run, killed every few hundred rounds; memory of the process at each end."""
    rng, path, seen = random.Random(seed), folder / "long", set[int]()
    killed, memory, resume, last = 0, [], False, ""
    while not last:
        child, pipe = forked(train(path, "seed", resume, count))
        lines = until(pipe, rng.randint(200, 1500))
        while not any(line.startswith(("done", "refused")) for line in lines[-1:]) and rng.random() < 0.2:
            lines += until(pipe, 200)
        status = Path(f"/proc/{child}/status")
        if found := re.search(r"VmRSS:\s+(\d+)", status.read_text() if status.is_file() else ""):
            memory.append((len(lines), int(found[1]) / 1024))
        last = next((line for line in lines if line.startswith(("done", "refused"))), "")
        if not last:
            os.kill(child, signal.SIGKILL)
            killed += 1
            lines += until(pipe, 10**9)
            last = next((line for line in lines if line.startswith(("done", "refused"))), "")
        os.close(pipe)
        os.waitpid(child, 0)
        seen |= {int(line.split()[0]) for line in lines if line[:1].isdigit()}
        resume = True
    sizes = [size for rounds, size in memory if rounds > 20] or [0.0]
    return {
        "rounds": count,
        "kills": killed,
        "rounds seen": len(seen),
        "rounds charged": charged(path),
        "ended": last.split()[0],
        "MiB, least": round(min(sizes)),
        "MiB, most": round(max(sizes)),
        "most rounds in one life": max(rounds for rounds, _ in memory) if memory else 0,
    }


def edits() -> dict[str, Any]:
    """The edits of run directories in tests/trust/test_verify.py."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "tests/trust/test_verify.py"]
    said = subprocess.run([*command, "-rA"], cwd=ROOT, capture_output=True, text=True).stdout
    names = re.findall(r"^(PASSED|FAILED) tests/trust/test_verify\.py::(\w+)", said, re.MULTILINE)
    return {f"{kind} {name}": count for (kind, name), count in Counter(names).items()}


def audits() -> list[dict[str, Any]]:
    """Audits of made-up trainings: as they are, and with noise that is a quarter of what is charged."""
    from unittest import mock

    from clipline.federated.mechanism import GaussianMechanism
    from clipline.trust.audit import audit, made_up_training

    rows, real = [], GaussianMechanism.delta_stddev
    for broken in (1, 4):
        for epsilon in (1.0, 2.0, 4.0, 8.0):
            patch = mock.patch.object(GaussianMechanism, "delta_stddev", lambda s, b, n=broken: real(s, b) / n)
            with patch, warnings.catch_warnings(action="ignore"):
                found = audit(made_up_training(epsilon), seed=1)
            bounds = {view.name: [view.one_run, view.one_shot] for view in found.views}
            rows.append({"noise": f"1/{broken}", "claimed": epsilon, "refuted": found.refuted, **bounds})
    return rows


# The page


def keep(part: str, value: Any) -> None:
    """Add a part to the file. Counts of kills, cuts and corruptions add up over calls with other seeds."""
    whole = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    commit = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout
    commits = {commit.strip()}
    if part in ADDED_UP and part in whole:
        value = dict(Counter(whole[part]["found"]) + Counter(value))
        commits |= set(whole[part]["commit"].split(", "))
    date = datetime.now(UTC).date().isoformat()
    whole[part] = {**whole.get(part, {}), "found": value, "date": date, "commit": ", ".join(sorted(commits))}
    KEPT.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(whole[part], indent=1))


def shown(value: int | str) -> str:
    """A number with its thousands apart, or a word."""
    return value if isinstance(value, str) else f"{value:,}"


def rows_of(counts: dict[str, Any]) -> str:
    """A table."""
    return "\n".join(
        ["| what | count |", "| --- | --- |", *(f"| {name} | {shown(value)} |" for name, value in counts.items())]
    )


def page() -> str:
    """docs/results/reliability.md."""
    whole = json.loads(KEPT.read_text(encoding="utf-8"))

    def found(part: str, **always: int) -> dict[str, Any]:
        return {**always, **whole[part]["found"]}

    def made(part: str) -> str:
        return f"{whole[part]['date']}, commit {whole[part]['commit']}"

    parts = [
        """# Reliability

What happens to a run when the power fails, the process is killed, a file is damaged or edited, or the input is absurd.
Two things must never happen: an epsilon below what somebody saw released, and a silent change. Made by
`benchmarks/reliability.py`, on loop-mounted ext4 under Linux. A *release* is seen by a callback of the run, and told to
another process at once.
"""
    ]
    if "cuts" in whole:
        counts = found(
            "cuts", undercharged=0, **{"undercharged after the resume": 0, "not resumed": 0, "ended otherwise": 0}
        )
        parts.append(f"""## Power cuts

The disk's image is copied while the run writes, mounted anew and read. What was written and not synced is gone. Noise
comes from the seed and from the system by turns. In the control nothing is synced, to show that cuts do lose what is
not. Caches inside a disk are not simulated.
{made("cuts")}.

{rows_of(counts)}
""")
    if "kills" in whole:
        parts.append(f"""## Kills

Runs of {ROUNDS} rounds get SIGKILL at random moments, go on, are killed again, and come to an end. With noise from the
seed the end must equal the uncut run to the bit. With noise from the system it must have released and charged each
round once. {whole["kills"].get("note", "")}
{made("kills")}.

{rows_of(found("kills", undercharged=0, **{"ended otherwise": 0, "refused": 0, NOT_ONCE: 0}))}
""")
    if "rounds" in whole:
        parts.append(f"""## Many rounds

One run that is killed at random and resumed. {made("rounds")}.

{rows_of(found("rounds"))}
""")
    if "corruptions" in whole:
        parts.append(f"""## Damaged files

A flipped bit, a lost end, 512 zeros or 64 bytes from elsewhere, in one file of a run. An interrupted run is resumed. A
finished one is verified, its model loaded, and its seal compared with the one noted before. Where only the seal
differs, no other file says what was there. A file that nothing notices would have a row "silent".
{made("corruptions")}.

{rows_of(found("corruptions", silent=0))}
""")
    if "edits" in whole:
        counts = found("edits")
        good = sum(value for name, value in counts.items() if name.startswith("PASSED"))
        bad = sum(value for name, value in counts.items() if name.startswith("FAILED"))
        single = max((value for name, value in counts.items() if "edit_of_one" in name), default=0)
        parts.append(f"""## Edits

`tests/trust/test_verify.py` edits run directories, one file at a time and all alike. {good} of its {good + bad} tests
pass, {single} of them edits of one file. All edits alike are found by the seal only. {made("edits")}.
""")
    if "fuzz" in whole:
        counts = found("fuzz")
        total, kinds = Counter[str](), ("read", "refused", "found")
        for one in counts["counts"].values():
            total.update(one)
        lines = [
            f"| {name} | {sum(one.values()):,} | " + " | ".join(f"{one.get(k, 0):,}" for k in kinds) + " |"
            for name, one in counts["counts"].items()
        ]
        table = "\n".join(
            ["| reader | inputs | read | refused | findings |", "| --- | --- | --- | --- | --- |", *lines]
        )
        parts.append(f"""## Absurd input

`python -m tests.fuzz` changes good files by chance, seed {counts["seed"]}: {sum(total.values()):,} inputs,
{total["found"]:,} findings, kinds: {counts["kinds"]}. A finding is anything but reading the file or refusing it in a
sentence: another error, a crash, 20 s, 3 GiB, a control character.
{made("fuzz")}.

{table}

All of it is mended, and so is what was found before: numbers beyond 64 bits in a list of JSONL, rounds in
`metrics.jsonl` that are no numbers, rounds without a clip, metadata of a model that are no mapping, members of NPZ that
are no arrays, and size statistics in a Parquet footer that do not fit the schema (pyarrow 26.0.1 ends the process over
them). `tests/fuzz/cases` keeps what is found, and every test run tries it again.
""")
    mutations = (ROOT / "docs" / "results" / "mutations.md").read_text(encoding="utf-8")
    caught = re.search(r"(\d+) of (\d+) are caught", mutations)
    parts.append(f"""## What durability costs

`benchmarks/sync_cost.py` measures it: the same training with and without syncs.

## Seeded breakages

{caught[1]} of {caught[2]} seeded breakages of the code fail a check of `clipline selftest`: [mutations](mutations.md).
""")
    if "audits" in whole:
        lines = [
            "| noise, of what is charged | claimed epsilon | updates: one run, one shot | model: one run, one shot | |"
        ]
        lines.append("| --- | --- | --- | --- | --- |")
        for row in found_rows(whole):
            lines.append(row)
        parts.append(f"""## Audits

`clipline audit` with 1000 canaries and 10 rounds: lower bounds on epsilon, with 95% confidence for all four. The
audit has to refute a quarter of the noise, and does so where 1000 canaries are enough. {made("audits")}.

{chr(10).join(lines)}
""")
    return "\n".join(parts)


def found_rows(whole: dict[str, Any]) -> list[str]:
    """Lines of the table of audits."""
    lines = []
    for row in whole["audits"]["found"]:
        bounds = [", ".join(f"{one:.2f}" for one in row[name]) for name in ("released updates", "final model")]
        verdict = "refuted" if row["refuted"] else "not refuted"
        lines.append(f"| {row['noise']} | {row['claimed']:g} | {bounds[0]} | {bounds[1]} | {verdict} |")
    return lines


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ["kills", "cuts", "corruptions", "rounds", "edits", "audits", "fuzz", "page"]
    parser.add_argument("part", choices=parts)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, help="the counts of a fuzzing, for the part fuzz")
    given = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = Path(mkdtemp(prefix="reliability-"))
    try:
        if given.part == "page":
            PAGE.write_text(page(), encoding="utf-8")
        elif given.part == "fuzz":
            keep("fuzz", json.loads(given.file.read_text(encoding="utf-8")))
        elif given.part in ("edits", "audits"):
            keep(given.part, {"edits": edits, "audits": audits}[given.part]())
        else:
            warm(folder)
            work = {"kills": kills, "cuts": cuts, "corruptions": corruptions, "rounds": many_rounds}[given.part]
            keep(given.part, work(given.count, given.seed, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
