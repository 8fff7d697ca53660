"""Banded noise against the best adversary: exact likelihood ratios of all releases, of the mechanism that trains.

`python studies/soundness/banded.py [--runs 400000]` writes docs/results/banded_noise.md in half a minute; the suite
runs the same with fewer runs (tests/studies/test_banded_noise.py).

One user is there or not, and adds a whole clip whenever drawn. The others add what depends on all earlier releases, and
the clip follows the releases too. An adversary who knows all but the user's coins and the noise can compute each
round's noise with the user's part in it, so that the likelihood ratio is a mixture over the rounds in which the user
may have been drawn. Every coordinate of the mechanism's vector is a run of its own.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
from wrap import wrapped

from clipline.federated.clipping import ClippedSum
from clipline.federated.draws import NoiseNow
from clipline.federated.mechanism import BandedMechanism
from clipline.privacy import GaussianEvent, Ledger, PoissonSampling, Relation, delta_at
from clipline.privacy.banded_noise import band_coefficients
from clipline.privacy.events import GroupedPoissonSampling
from clipline.random.streams import Streams

Array = NDArray[np.float64]

ROUNDS, BANDS, RATE, Z = 12, 4, 0.3, 1.3
TRAP_ROUNDS, TRAP_RATE, TRAP_Z = 8, 0.075, 0.8
EPSILONS = (0.25, 0.5, 1.0, 1.5, 2.0)
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "banded_noise.md"
_M = 10


def matrix(rounds: int) -> Array:
    """C, (rounds, rounds)."""
    lag = np.arange(rounds)[:, None] - np.arange(rounds)
    banded = np.array(band_coefficients(rounds, BANDS))[np.clip(lag, 0, BANDS - 1)]
    return np.where((lag >= 0) & (lag < BANDS), banded, 0.0)


def white_noise(group: int, *, present: bool, done: int, runs: int, seed: int) -> Array:
    """(runs, done): what the adversary can compute of each run's releases: C times the noise and the user's part."""
    rng, streams = np.random.default_rng(seed), Streams(seed)
    mechanism = BandedMechanism(_M, Z, bands=BANDS, rounds=ROUNDS)
    state, clip, seen, known = mechanism.begin(0), 1.0, np.zeros(runs), np.zeros((runs, done))
    for t in range(done):
        others = 0.7 * np.sin(seen)
        drawn = present * (t % BANDS == group) * (rng.random(runs) < RATE)
        total = torch.tensor(np.append(clip * (others + drawn), 0.0))
        summed = ClippedSum(total, clip, GroupedPoissonSampling(RATE, BANDS))
        release, state = mechanism.step(summed, NoiseNow(streams.noise(t), runs + 1), state, t)
        released = release.mean.numpy() * _M
        known[:, t] = (released / clip - others) / Z
        seen = 0.5 * seen + 0.3 * released
        clip = float(np.clip(clip * np.exp(-0.2 * np.tanh(released[:100].mean())), 0.05, 20))
    return np.asarray(known @ matrix(ROUNDS)[:done, :done].T)


def trapped(runs: int, seed: int) -> Array:
    """The same where the user may be drawn in every round, by plain Poisson sampling, which the mechanism refuses."""
    rng = np.random.default_rng(seed)
    drawn = rng.random((runs, TRAP_ROUNDS)) < TRAP_RATE
    return drawn @ matrix(TRAP_ROUNDS).T / TRAP_Z + rng.standard_normal((runs, TRAP_ROUNDS))


def losses(white: Array, columns: Array, rate: float, z: float) -> Array:
    """(runs,): log of the likelihood of all releases with the user over that without.

    `columns` of C are those of the rounds in which the user may be drawn.
    """
    patterns = np.array(list(itertools.product((0, 1), repeat=columns.shape[1])))
    drawn = patterns.sum(1)
    means = patterns @ columns.T / z
    logs = white @ means.T - (means**2).sum(1) / 2
    logs += drawn * math.log(rate) + (columns.shape[1] - drawn) * math.log(1 - rate)
    most = logs.max(1)
    return np.asarray(most + np.log(np.exp(logs - most[:, None]).sum(1)))


def deltas(with_user: Array, without: Array, epsilon: float) -> Iterator[tuple[float, float]]:
    """Delta at epsilon where the user is removed, and where one is added, each with its standard error."""
    for loss in (with_user, -without):
        values = np.maximum(0, 1 - np.exp(epsilon - loss))
        yield float(values.mean()), float(values.std() / math.sqrt(len(values)))


def seen(group: int, done: int, runs: int) -> tuple[Array, Array]:
    """The losses of runs with the user and of runs without."""
    columns = matrix(ROUNDS)[:done, group:done:BANDS]
    found = [
        losses(white_noise(group, present=present, done=done, runs=runs, seed=seed), columns, RATE, Z)
        for present, seed in ((True, 1), (False, 2))
    ]
    return found[0], found[1]


def accounted(rate: float, z: float, rounds: int, bands: int, epsilon: float) -> float:
    """Delta at epsilon by the ledger; with one band that of plain Poisson sampling."""
    sampling = PoissonSampling(rate) if bands == 1 else GroupedPoissonSampling(rate, bands)
    ledger = Ledger().add(GaussianEvent(sampling, z), rounds)
    return delta_at(ledger, epsilon=epsilon, relation=Relation.ADD_OR_REMOVE)


def page(runs: int) -> str:
    """The tables."""
    head = f"`python studies/soundness/banded.py`, {datetime.date.today()}, {platform.machine()}, {runs:,} runs each."
    lines = [
        "# Banded noise against the best adversary", "",
        "The table has delta of the mechanism that trains, by the exact likelihood ratio of all releases, and the "
        "accounted delta. A user of the group adds a whole clip whenever drawn.",
        f"{ROUNDS} rounds were planned, with {BANDS} bands, rate {RATE} and noise multiplier {Z}. An estimate "
        f"may be off by two standard errors, which are given. {head}", "",
        "| group | rounds run | epsilon | user removed | user added | accounted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for group, done in ((0, 12), (0, 9), (3, 12)):
        found = seen(group, done, runs)
        for epsilon in EPSILONS:
            both = " | ".join(f"{value:.5f} +- {2 * error:.5f}" for value, error in deltas(*found, epsilon))
            said = accounted(RATE, Z, done, BANDS, epsilon)
            lines.append(f"| {group} | {done} | {epsilon:g} | {both} | {said:.5f} |")
    lines += [
        "", "The trap, which the mechanism refuses: the same noise where a user may be drawn in every round, by plain",
        f"Poisson sampling ({TRAP_ROUNDS} rounds, {BANDS} bands, rate {TRAP_RATE}, noise multiplier {TRAP_Z}).", "",
        "| epsilon | user removed | accounted as so many Poisson rounds |", "| --- | --- | --- |",
    ]  # fmt: skip
    loss = losses(trapped(runs // 4, 3), matrix(TRAP_ROUNDS), TRAP_RATE, TRAP_Z)
    for epsilon in EPSILONS:
        value, error = next(deltas(loss, loss, epsilon))
        said = accounted(TRAP_RATE, TRAP_Z, TRAP_ROUNDS, 1, epsilon)
        lines.append(f"| {epsilon:g} | {value:.5f} +- {2 * error:.5f} | {said:.5f} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    arguments.out.write_text(wrapped(page(arguments.runs)), encoding="utf-8")
