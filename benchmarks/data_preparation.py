"""Question: how fast does each kind of file become a store, and how much memory does that take?

Peer: none. Every file holds the same 28 x 28 images of `--users` users in random order, which is the worst one (HDF5 is
always grouped). Run `python benchmarks/data_preparation.py`. The last result is in benchmarks/results/README.md.
"""

import argparse
import json
import multiprocessing
import re
import sqlite3
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet

from clipline.data import prepare_table
from clipline_paper.data.catalogue import CATALOGUE
from clipline_paper.data.prepare_tff import prepare

WIDTH = 784


def varint(number: int) -> bytes:
    """A whole number in the wire format of protocol buffers."""
    return bytes([number]) if number < 128 else bytes([number & 127 | 128]) + varint(number >> 7)


def delimited(field: int, data: bytes) -> bytes:
    """A field of a message in the wire format of protocol buffers."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def example(pixels: np.ndarray, label: int) -> bytes:
    """A serialized `tf.train.Example` as in TFF's EMNIST."""
    floats = delimited(2, delimited(1, (pixels / np.float32(255)).astype("<f4").tobytes()))
    whole = delimited(3, delimited(1, varint(label)))
    entries = (delimited(1, b"pixels") + delimited(2, floats), delimited(1, b"label") + delimited(2, whole))
    return delimited(1, b"".join(delimited(1, entry) for entry in entries))


def write_files(folder: Path, rows: int, users: int) -> None:
    """The same examples in every format."""
    rng = np.random.default_rng(0)
    user = rng.integers(0, users, rows)
    pixels = rng.integers(0, 256, (rows, WIDTH), dtype=np.uint8)
    label = rng.integers(0, 62, rows).astype(np.uint8)
    np.savez(folder / "a.npz", user=user, pixels=pixels, label=label)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(pixels.reshape(-1)), WIDTH)
    pa.parquet.write_table(pa.table({"user": user, "pixels": flat, "label": label}), folder / "a.parquet")
    with (folder / "a.jsonl").open("w") as lines, (folder / "a.csv").open("w") as csv:
        csv.write("user,label," + ",".join(f"p{i}" for i in range(WIDTH)) + "\n")
        for row in range(rows // 4):  # slower formats, smaller files
            values = pixels[row].tolist()
            lines.write(json.dumps({"user": int(user[row]), "pixels": values, "label": int(label[row])}) + "\n")
            csv.write(f"{user[row]},{label[row]}," + ",".join(map(str, values)) + "\n")
    with sqlite3.connect(folder / "emnist_all.sqlite") as base:
        base.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        base.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        whose = [f"f{number:04d}" for number in user]
        all_rows = (("all_train", whose[row], example(pixels[row], int(label[row]))) for row in range(rows))
        base.executemany("INSERT INTO examples VALUES (?, ?, ?)", all_rows)
        base.execute("INSERT INTO client_metadata SELECT client_id, split_name, COUNT(*) FROM examples GROUP BY 1, 2")
    with h5py.File(folder / "fed_emnist_train.h5", "w") as root:
        order = np.argsort(user, kind="stable")
        for number, mine in zip(*_groups(user[order], order), strict=True):
            group = root.create_group(f"examples/f{number:04d}")
            group["pixels"] = (pixels[mine] / np.float32(255)).astype(np.float32).reshape(-1, 28, 28)
            group["label"] = label[mine].astype(np.int32)


def _groups(ordered: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    users, starts = np.unique(ordered, return_index=True)
    return users, np.split(order, starts[1:])


def peak_megabytes() -> float:
    """The most memory this process has held. Not `ru_maxrss`, which a child takes over from its parent."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text(encoding="utf-8")).group(1)) / 1024


def measure(path: Path, name: str, target: Path, answers: "multiprocessing.Queue[tuple[float, float, float]]") -> None:
    """Seconds, bytes of the store and extra memory (in MB) of one preparation, in a process of its own."""
    import pyarrow.csv
    import pyarrow.json  # noqa: F401  # what imports cost is not asked here

    before = peak_megabytes()
    begun = time.perf_counter()
    manifest = (
        prepare_table(path, target, "user")
        if name == "table"
        else prepare(CATALOGUE[name], path, target, split="train")["."]
    )
    seconds = time.perf_counter() - begun
    answers.put((seconds, manifest.examples, peak_megabytes() - before))


def main() -> None:
    """Print one row a format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--users", type=int, default=3400)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), options.megabytes * 1_000_000 // WIDTH, options.users)
        print("| file | MB | seconds | MB/s of file | examples/s | extra memory, MB |\n" + "| --- " * 6 + "|")
        for path in sorted(Path(folder).iterdir()):
            name = "table" if path.name.startswith("a.") else "emnist"
            context = multiprocessing.get_context("spawn")
            answers = context.Queue()
            process = context.Process(target=measure, args=(path, name, Path(folder) / f"{path.name}.store", answers))
            process.start()
            seconds, examples, memory = answers.get()
            process.join()
            size = path.stat().st_size / 1e6
            rate = f"{size / seconds:.0f} | {examples / seconds:,.0f}"
            print(f"| {path.name} | {size:.0f} | {seconds:.2f} | {rate} | {memory:.0f} |", flush=True)


if __name__ == "__main__":
    main()
