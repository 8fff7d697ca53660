"""Question: what do lists of unequal length take when they are packed, and what does padding them in a batch cost?

Peer: the same lists padded beforehand. `--users` users have 1 to 40 texts each, of 5 to 512 tokens (int32). Run
`python benchmarks/packed_lists.py`. The last result is in docs/howto/own_data.md.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from clipline import Population
from clipline.data.packed_field import PackedField

WIDTH = 512


def texts(users: int) -> Population:
    """A made-up population of token lists."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.repeat(np.arange(users), rng.integers(1, 41, users)))
    offsets = np.concatenate([[0], np.cumsum(rng.integers(5, WIDTH + 1, len(ids)))]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, rng.integers(0, 50_000, offsets[-1]).astype(np.int32))
    return Population.from_dataframe(pa.table({"user": ids, "tokens": tokens}), "user", lengths={"tokens": WIDTH})


def held(population: Population) -> int:
    """Bytes in memory of the field of lists."""
    field = population.fields["tokens"]
    return field.values.nbytes + field.offsets.nbytes if isinstance(field, PackedField) else field.nbytes


def median_ms(work: Callable[[], object], times: int = 21) -> float:
    """The median time of a call, in milliseconds."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return 1000 * float(np.median(taken))


def main() -> None:
    """Measure both ways and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=2000)
    packed = texts(parser.parse_args().users)
    padded = replace(packed, fields={name: np.asarray(field) for name, field in packed.fields.items()})
    assert packed.fingerprint() == padded.fingerprint()
    rows = np.random.default_rng(1).integers(0, packed.examples, (100, 4, 16))  # 100 users, 4 steps of 16
    print(f"{packed!r}")
    with tempfile.TemporaryDirectory() as folder:
        for name, population in (("padded", padded), ("packed", packed)):
            store = population.save(Path(folder) / name)
            size = sum(file.stat().st_size for file in store.iterdir())
            opened = Population.open(store)
            gather = median_ms(lambda opened=opened: opened.fields["tokens"][rows])
            whole = median_ms(opened.fingerprint, 5)
            print(
                f"{name}: {held(population) / 1e6:.1f} MB in memory, {size / 1e6:.1f} MB of store, {gather:.1f} ms for "
                f"the batches of 100 users (6400 rows), {whole:.0f} ms for the fingerprint"
            )


if __name__ == "__main__":
    main()
