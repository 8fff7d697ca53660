"""Files larger than the memory that preparing them may take, of every kind."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clipline.data.population import Population

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="reads how much memory a process took from /proc, not here"
)
ROWS, USERS = 230_000, 700
LIMIT = 130_000_000  # bytes that a process may take beyond what it has after reading nine rows
LARGE = 135_000_000  # bytes of examples in each file

MEASURED = """
import sys
from clipline.data.store import write_store
from clipline.data.readers.tables import read_table
def memory(entry):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(entry))
name, held = sys.argv[1], sys.argv[2] == "held"
list(read_table("small" + name[3:], "user"))  # what a library takes once, whatever the size of the file
before = memory("VmRSS:")
chunks = read_table(name, "user")
write_store("store", list(chunks) if held else chunks, source=name, memory_bytes=16 << 20)
print(memory("VmHWM:") - before)
"""


def peak(folder, name, how="in chunks"):
    """Prepare a file in a process of its own; gives the most memory that it took for it, in bytes."""
    command = [sys.executable, "-c", MEASURED, name, how]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


@pytest.fixture(scope="module")
def user():
    return np.random.default_rng(2).integers(0, USERS, ROWS)


def check(folder, user):
    """Every user's rows are there, in their order: x counts the rows of the file."""
    population = Population.open(folder / "store")
    assert (len(population), population.examples) == (USERS, ROWS)
    for i in (0, USERS // 2, USERS - 1):
        assert np.array_equal(population.of(i)["x"], np.flatnonzero(user == int(population.user_ids[i])))


def write_npz(folder, user):
    wide = np.zeros((ROWS, 600), np.uint8)
    np.savez(folder / "big.npz", user=user, x=np.arange(ROWS), wide=wide)
    np.savez(folder / "small.npz", user=user[:9], x=np.arange(9), wide=wide[:9])
    return (folder / "big.npz").stat().st_size


def write_parquet(folder, user):
    columns = {f"p{i}": np.random.default_rng(i).random(ROWS) for i in range(75)}
    table = pa.table({"user": user, "x": np.arange(ROWS), **columns})
    pyarrow.parquet.write_table(table, folder / "big.parquet", row_group_size=10_000, use_dictionary=False)
    pyarrow.parquet.write_table(table.slice(0, 9), folder / "small.parquet")
    return (folder / "big.parquet").stat().st_size


def write_lines(folder, user, kind):
    numbers = "1234567.25", "7654321.75"
    if kind == ".csv":
        head, pads = "user,x," + ",".join(f"p{i}" for i in range(54)) + "\n", [f",{n}" * 54 + "\n" for n in numbers]
        lines = [f"{u},{x}{pads[x % 2]}" for x, u in enumerate(user.tolist())]
    else:
        head, pads = "", [f'"p": [{", ".join([n] * 50)}]}}\n' for n in numbers]
        lines = [f'{{"user": {u}, "x": {x}, {pads[x % 2]}' for x, u in enumerate(user.tolist())]
    whole = head + "".join(lines)
    (folder / f"big{kind}").write_text(whole)
    (folder / f"small{kind}").write_text(head + "".join(lines[:9]))
    return len(whole)


@pytest.mark.parametrize("kind", [".parquet", ".csv", ".jsonl"])
def test_a_file_larger_than_memory_is_prepared(tmp_path, user, kind):
    size = write_parquet(tmp_path, user) if kind == ".parquet" else write_lines(tmp_path, user, kind)
    assert size > LARGE
    assert peak(tmp_path, f"big{kind}") < LIMIT
    check(tmp_path, user)


def test_the_measure_notices_a_file_that_is_held(tmp_path, user):
    assert write_npz(tmp_path, user) > LARGE
    assert peak(tmp_path, "big.npz", "held") > LARGE
