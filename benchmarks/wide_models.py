"""Does the limit that the first weights set on the normalised server's rate hold for models that are large here?

Peer: SGD with momentum at rate 1, and the normalised server without the limit.

python benchmarks/noise_table.py prepare            # once: the users of EMNIST
python benchmarks/wide_models.py run 512,512 [--seeds 3]
python benchmarks/wide_models.py table

Cohorts are of 30 users, with the noise on the mean update that cohorts of 150 have at epsilon 4: a fifth of the time,
and of the users' own disagreement only a little more. A run is a line of results/untuned/wide.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from pathlib import Path

import noise_table
import numpy as np
import recording
import torch
from torch import nn

import clipline as cl

RESULTS = noise_table.RESULTS.with_name("wide.jsonl")
COHORT, FULL, ROUNDS, BANDS = 30, 150, noise_table.ROUNDS, 12
NOISE = {1: 0.6336045344399596, BANDS: 1.0690802440124187}  # of 10,000 users, 150 a round, epsilon 4
FREE = cl.ServerNormalised(0.37 / math.sqrt(ROUNDS))  # a rate that is given has no limit
WAYS = {"sgd": (cl.ServerSGD(), 1), "free": (FREE, 1), "limited": (cl.ServerNormalised(), 1),
        "free, banded": (FREE, BANDS), "limited, banded": (cl.ServerNormalised(), BANDS)}  # fmt: skip


def perceptron(hidden: list[int]) -> nn.Module:
    """14 x 14 bytes to 62 characters."""
    sizes = [196, *hidden, 62]
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(batch,): cross-entropy."""
    images = batch["x"].to(next(model.parameters()).dtype) / 255
    return nn.functional.cross_entropy(model(images), batch["y"].long(), reduction="none")


def run(hidden: str, seeds: int, stores: Path) -> None:
    """All ways, seed by seed."""
    torch.set_num_threads(1)
    people = noise_table.loaded("E", stores).population
    data = np.load(stores / "emnist.npz")
    test = np.random.default_rng(0).permutation(len(data["test_y"]))[:20_000]
    x, y = torch.from_numpy(data["test_x"][test]) / 255, torch.from_numpy(data["test_y"][test].astype(np.int64))
    done = {
        tuple(row[name] for name in ("hidden", "way", "seed")) for row in map(json.loads, recording.lines_of(RESULTS))
    }
    for seed, way in itertools.product(range(seeds), WAYS):
        if (hidden, way, seed) in done:
            continue
        server, bands = WAYS[way]
        torch.manual_seed(seed)
        model = perceptron([int(size) for size in hidden.split(",")])
        training = cl.Training(
            model, loss, people, rounds=ROUNDS, cohort_size=COHORT, local=cl.LocalSGD(lr=0.1, batch_size=16),
            privacy=cl.Privacy(noise_multiplier=NOISE[bands] * COHORT / FULL, population_size=len(people)),
            server=server, noise=cl.BandedNoise(bands), compute=cl.Compute(device="cpu", workers=1),
            seed=1000 + seed,
        )  # fmt: skip
        result = training.run()
        with torch.no_grad():
            accuracy = float((result.model(x).argmax(dim=1) == y).double().mean())
        about = {"hidden": hidden, "way": way, "seed": seed, "accuracy": accuracy}
        recording.append(RESULTS, [json.dumps({**about, "noise_norm": training.noise_norm})])


def main() -> None:
    """Run or show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("hidden", nargs="?", default="512")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--stores", type=Path, default=noise_table.STORES)
    wanted = parser.parse_args()
    if wanted.what == "run":
        return run(wanted.hidden, wanted.seeds, wanted.stores)
    rows = [json.loads(line) for line in recording.lines_of(RESULTS)]
    for hidden in dict.fromkeys(row["hidden"] for row in rows):
        own = [[row["accuracy"] for row in rows if (row["hidden"], row["way"]) == (hidden, way)] for way in WAYS]
        print("|", hidden, "|", " | ".join(f"{np.mean(one):.3f} ({len(one)})" for one in own if one), "|")


if __name__ == "__main__":
    main()
