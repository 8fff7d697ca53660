"""How closely the tracked clip follows its quantile where the noise on the count is banded.

python studies/noise_clip.py [--seeds 20]

Users have fixed update norms, so the quantile to be found stands still. Cohorts are drawn and counts released by the
samplers, mechanisms and clip controller of a training; updates are left out, as they do not move the clip. A minute on
one core; docs/howto/noise.md has what it printed.
"""

from __future__ import annotations

import argparse
import math

import numpy as np
import torch

from clipline.federated.clip_controllers import QuantileClip
from clipline.federated.clipping import ClippedSum
from clipline.federated.draws import NoiseNow
from clipline.federated.mechanism import BandedMechanism, GaussianMechanism
from clipline.federated.sampling import GroupedPoissonSampler, PoissonSampler
from clipline.privacy import Relation, noise_multiplier_for
from clipline.privacy.events import sampling_named
from clipline.privacy.noise_split import default_count_stddev
from clipline.random.streams import Streams

USERS, COHORT, ROUNDS, SPREAD = 10_000, 100, 400, 1.0  # the logarithm of norms is normal with this deviation
SETTLED = 100  # rounds that are not counted
EPSILON = 4.0


def tracked(bands: int, count_stddev: float, z: float, seed: int) -> np.ndarray:
    """Logarithm of the clip over the median of the norms, for every round that counts."""
    streams = Streams(seed)
    norms = np.exp(SPREAD * np.random.default_rng([seed, 1]).standard_normal(USERS))
    sampler: GroupedPoissonSampler | PoissonSampler = PoissonSampler(USERS, COHORT)
    mechanism = GaussianMechanism(COHORT, z, count_stddev)
    if bands > 1:
        sampler = GroupedPoissonSampler.of(np.arange(USERS, dtype=np.uint64), USERS, COHORT, bands)
        mechanism = BandedMechanism(COHORT, z, count_stddev, bands, ROUNDS)
    controller = QuantileClip(0.5, start=float(np.median(norms)))
    clip, state, logs = controller.init(), mechanism.begin(0), []
    for t in range(ROUNDS):
        cohort = sampler.draw(streams.sampling(t), t)
        count = float((norms[cohort.users] <= clip.clip).sum()) - len(cohort.users) / 2
        total = ClippedSum(torch.tensor([0.0, count], dtype=torch.float64), clip.clip, cohort.sampling)
        release, state = mechanism.step(total, NoiseNow(streams.noise(t), 2), state, t)
        clip = controller.update(clip, release)
        logs.append(math.log(clip.clip / np.median(norms)))
    return np.array(logs[SETTLED:])


def main() -> None:
    """Print a line for every number of bands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    seeds = parser.parse_args().seeds
    print(f"{USERS} users, {COHORT} a round, {ROUNDS} rounds, epsilon {EPSILON:g}, {seeds} seeds")
    for bands in (1, 2, 4, 8, 16, 32, 64):
        z = noise_multiplier_for(
            sampling=sampling_named("poisson", COHORT, USERS, bands), rounds=ROUNDS, epsilon=EPSILON,
            delta=USERS**-1.1, relation=Relation.ADD_OR_REMOVE,
        )  # fmt: skip
        line = f"bands {bands:3d}  z {z:.3f}"
        for count_stddev in (1e-3, default_count_stddev(COHORT, z), 20.0):  # the first is nothing beside sampling
            runs = [tracked(bands, count_stddev, min(z, count_stddev), seed) for seed in range(seeds)]
            spreads = np.array([np.sqrt(np.mean(run**2)) for run in runs])
            error = 2 * spreads.std() / math.sqrt(seeds)
            line += f"  | count noise {count_stddev:.3g}: {spreads.mean():.4f} +- {error:.4f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
