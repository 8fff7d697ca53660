"""Question: does the cost of sampling and of opening a stored population depend on the number of users?

Peer: itself at other sizes (flat is the goal for the population, linear for the cohort). Run
`python benchmarks/population_and_sampling.py`. The last result is in benchmarks/results/README.md.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from clipline import Population
from clipline.federated.sampling import FixedSizeSampler, PoissonSampler
from clipline.random.streams import Streams


def milliseconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Median wall time."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1e3 * statistics.median(times)


def main() -> None:
    """Print one table for samplers and one for stored populations."""
    streams = Streams(0)
    print("one draw, ms        " + "".join(f"{f'n={n:.0e}':>12}" for n in (1e4, 1e5, 1e6, 1e7)))
    for kind in (PoissonSampler, FixedSizeSampler):
        for cohort in (100, 1000, 10_000):
            samplers = [kind(int(n), cohort) for n in (1e4, 1e5, 1e6, 1e7)]
            row = "".join(f"{milliseconds(lambda s=s: s.draw(streams.sampling(0))):12.3f}" for s in samplers)
            print(f"{kind.__name__:17s} {cohort:6d}{row}")
    print("\nusers      open, ms   read one user, ms")
    for users in (1_000, 100_000, 1_000_000, 10_000_000):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "p"
            Population(np.arange(users + 1) * 2, {"x": np.zeros((2 * users, 4), np.uint8)}).save(path)
            opened = Population.open(path)
            print(
                f"{users:10d} {milliseconds(lambda path=path: Population.open(path)):9.3f}"
                f" {milliseconds(lambda p=opened, u=users: np.array(p.of(u - 1)['x'])):19.4f}"
            )


if __name__ == "__main__":
    main()
