"""Rows 6 and 12: what the low bits of a release show, and noise that is too small to be a number."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from attack import Attack, Fields, Measure, Value, training_of
from numpy.typing import NDArray
from torch import Tensor, nn

from clipline import FixedClip, LocalSGD, ScheduledClip, ServerSGD

EPSILON = 0.11
DIM, USERS, RUNS = 80_000, 20, 8
SMALL = 2.0**-11  # standard deviations: as small must noise be for its low bits to be few


class Flat(nn.Module):
    """Many numbers that one example moves alike."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(dim, dtype=torch.float64))


def pull(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,) losses."""
    losses: Tensor = model.places.sum() * batch["x"]
    return losses


@cache
def layers() -> NDArray[np.float64]:
    """(256,): the units of NumPy's normal draws, which are whole numbers below 2^52 times one of these (ziggurat).

    Found by looking: the words that a generator draws from are known, and give layer and whole number of each draw.
    """
    words, draws = np.random.Generator(np.random.Philox(key=1)), np.random.Generator(np.random.Philox(key=1))
    state = words.bit_generator.state
    found: dict[int, list[float]] = {}
    while len(found) < 256 or min(map(len, found.values())) < 3:
        words.bit_generator.state = draws.bit_generator.state = state
        word = int(words.bit_generator.random_raw())
        draw = float(draws.standard_normal())
        whole = (word >> 9) & (2**52 - 1)
        if whole > 2**49:
            found.setdefault(word & 0xFF, []).append(abs(draw) / whole)
        state = words.bit_generator.state
    return np.array([np.median(found[layer]) for layer in range(256)])


def on_a_grid(values: NDArray[np.float64], stddev: float) -> bool:
    """Whether all are whole multiples of one power of two, 2^-32 of the deviation or more, but for rounding."""
    for exponent in (20, 24, 28, 32):
        cells = values / 2.0 ** (np.floor(np.log2(stddev)) - exponent)
        if np.abs(cells - np.round(cells)).max() < 2.0 ** (exponent - 44):
            return True
    return False


def impossible(release: NDArray[np.float64], divisor: int, stddev: float) -> tuple[int, int]:
    """Values that no draw gives where the others add nothing, and how many were looked at: those of little noise.

    Values on a public grid far coarser than the noise's own bits come from all draws of a cell, and are all possible.
    """
    sums = release * divisor
    noise = sums / stddev
    noise = noise[np.abs(noise) < SMALL]
    if on_a_grid(release, stddev / divisor) or on_a_grid(sums, stddev):
        return 0, len(noise)
    whole = np.abs(noise)[:, None] / layers()
    off = np.abs(whole - np.round(whole))
    allowed = 6 * 2.0**-53 * whole + 1e-9  # several roundings on the way
    return int((off > allowed).all(axis=1).sum()), len(noise)


@cache
def counts(present: bool) -> Sequence[tuple[int, int]]:
    """Of some runs of one round with noise from the system, in which only the target may have an update at all."""
    users: dict[str, Fields] = {f"u{number:02}": {"x": np.zeros(1)} for number in range(USERS)}
    users["u00"] = {"x": np.full(1, 1.0 if present else 0.0)}
    found = []
    for _ in range(RUNS):
        training = training_of(
            Flat(DIM), pull, users, LocalSGD(1.0), cohort_size=USERS, epsilon=EPSILON, delta=1e-5,
            noise_source="system", server=ServerSGD(1.0, 0.0), engine="one-by-one",
        )  # fmt: skip
        release = training.run().state.params.numpy()
        found.append(impossible(release, USERS, training.noise_multiplier))
    return found


def in_words(present: bool) -> str:
    """Least and most of the runs, of how many."""
    odd, looked_at = zip(*counts(present), strict=True)
    return f"{_range(odd)} of {_range(looked_at)}"


def _range(numbers: Sequence[int]) -> str:
    return f"{min(numbers)}" if min(numbers) == max(numbers) else f"{min(numbers)} to {max(numbers)}"


def releases(clip: Any) -> Value:
    """How many of twenty runs with noise from the system differ."""
    users: dict[str, Fields] = {f"u{number:02}": {"x": np.ones(1)} for number in range(USERS)}
    seen = set()
    for _ in range(20):
        training = training_of(
            Flat(10), pull, users, LocalSGD(1.0), cohort_size=USERS, noise_source="system", clip=clip,
            server=ServerSGD(1.0, 0.0), engine="one-by-one",
        )  # fmt: skip
        seen.add(training.run().state.params.numpy().tobytes())
    return len(seen)


ATTACKS = [
    Attack(
        "6",
        "The lattice of the normal sampler",
        f"{RUNS} runs of one round, {USERS} users who are all sampled, {DIM:,} float64 parameters, noise "
        "from the system. Only the target has an update. The test looks at values of noise below 2^-11 of "
        "its deviation. It counts those that no integer times a unit of the ziggurat gives. On a public "
        "grid all draws of a cell give the value.",
        [
            Measure(
                "present", f"impossible values, target present, epsilon {EPSILON}", "as absent", lambda: in_words(True)
            ),
            Measure("absent", "the same, target absent", "as present", lambda: in_words(False)),
        ],
    ),
    Attack(
        "12",
        "Clips too small for noise",
        "20 runs of one round with noise from the system.",
        [
            Measure("fixed", "different releases of 20, FixedClip(5e-324)", "20", lambda: releases(FixedClip(5e-324))),
            Measure(
                "scheduled",
                "the same, ScheduledClip({0: 5e-324})",
                "20",
                lambda: releases(ScheduledClip({0: 5e-324})),
            ),
        ],
    ),
]
