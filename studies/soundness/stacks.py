"""Rows 2a, 2b, 8, 15, 16, 17: what a user sees of others in a block: width, mode, rounding of updates and norms."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from attack import (
    Attack,
    Fields,
    Measure,
    bits,
    classified,
    clips,
    cross_entropies,
    norms_of,
    positions,
    private_sum,
    training_of,
    vector,
    without,
)
from numpy.typing import NDArray
from torch import Tensor, nn

from clipline import LocalAdam, LocalSGD
from clipline.federated.backend import CohortRequest
from clipline.federated.sampling import Cohort

TARGET = "z"  # comes last: nobody's place changes
NAMES = [f"u{number:02}" for number in range(40)]
ALIKE, FEATURES, SEEDS = 64, 400, 8  # row 15: users with the same example, its numbers, and how many examples are tried
ULPS = 8  # as many clips are tried on either side of the norm, a unit in the last place apart


def normalised(zero: bool) -> nn.Module:
    """Batch statistics, kept nowhere, in front of a last layer that may start at zero."""
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16, track_running_stats=False)
    model = nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU(), nn.Linear(16, 3))
    if zero:
        nn.init.zeros_(model[3].weight)
        nn.init.zeros_(model[3].bias)
    return model


@cache
def uneven() -> dict[str, Fields]:
    """Users of three examples, and a target of twenty."""
    return classified({**dict.fromkeys(NAMES, 3), TARGET: 20})


@cache
def trained() -> Tensor:
    """The parameters after some training by anybody on data of the same rule."""
    model, some = normalised(zero=True), classified(dict.fromkeys(NAMES, 20), seed=1)
    batch = {name: torch.from_numpy(np.concatenate([f[name] for f in some.values()])) for name in ("x", "y")}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(50):
        optimiser.zero_grad()
        cross_entropies(model, batch).mean().backward()
        optimiser.step()
    return vector(model)


def width(**changes: Any) -> float:
    """The target, who has most examples, is removed: benign data."""
    sums = []
    for users in (uneven(), without(uneven(), TARGET)):
        training = training_of(normalised(zero=True), cross_entropies, users, LocalSGD(0.5, 20), **changes)
        sums.append(private_sum(training, list(users), trained(), clip=0.1))
    return clips(*sums, clip=0.1)


def mode() -> float:
    """The first example of a user who is not sampled becomes NaN: batch statistics, benign data."""
    users = classified({"a": 3, **{name: 3 + place % 5 for place, name in enumerate(NAMES)}})
    return _after_nan(users, normalised(zero=False), cross_entropies, LocalSGD(0.5, 20), clip=0.1)


class Sign(nn.Module):
    """One number that the mean of a batch pulls one way or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(batch,) losses, all the same."""
        return (self.place * (1e3 * x.mean()).tanh()).expand(len(x))


def pulled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,) losses."""
    losses: Tensor = model(batch["x"]) + 0 * batch["x"]
    return losses


def mode_at_worst() -> float:
    """The same where a user's own first example pulls against the others."""
    own = np.array([-1.0, 1.0, 1.0], np.float32)
    users: dict[str, Fields] = {"a": {"x": own}, **{name: {"x": own} for name in NAMES[:39]}}
    users["u99"] = {"x": np.resize(own, 20)}  # as wide as batches become
    model = Sign()
    nn.init.constant_(model.place, 1.0)
    return _after_nan(users, model, pulled, LocalSGD(1.0, 20), sampled=[*NAMES[:39], "u99"])


def _after_nan(
    users: dict[str, Fields], model: nn.Module, loss: Any, local: LocalSGD, clip: float = 1.0, sampled: Any = None
) -> float:
    spoilt = {name: field.copy() for name, field in users["a"].items()}
    spoilt["x"][0] = np.nan
    others = sampled or list(without(users, "a"))
    sums = [
        private_sum(training_of(model, loss, some, local, engine="stacked"), others, clip=clip)
        for some in (users, {**users, "a": spoilt})
    ]
    return clips(*sums, clip=clip)


def unstable() -> nn.Module:
    """Steps far too long for it: what is rounded off grows from step to step."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 15), nn.LayerNorm(15), nn.Tanh(), nn.Linear(15, 3))


@cache
def rounding(engine: str) -> tuple[float, float]:
    """Clips and bits by which the sum moves when the target is removed, in float32; the clip is the median norm."""
    users, clip, sums = classified({**dict.fromkeys(NAMES, 40), TARGET: 44}), 108.0, []
    for some in (users, without(users, TARGET)):
        training = training_of(unstable(), cross_entropies, some, LocalSGD(10.0, 20, 20), engine=engine)
        sums.append(private_sum(training, list(some), clip=clip))
    return clips(*sums, clip=clip), bits(*sums)


def norms_moved(engine: str) -> float:
    """The most by which the sum of the bits moves, over some examples and all clips near the norm of the update."""
    return max(_most_moved(engine, seed) for seed in range(SEEDS))


def _most_moved(engine: str, seed: int) -> float:
    x = np.random.default_rng(seed).normal(size=(1, FEATURES)).astype(np.float32)
    one: Fields = {"x": x, "y": np.zeros(1, np.int64)}
    users = {**{f"u{number:02}": one for number in range(ALIKE - 1)}, TARGET: one}
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 10)
    trainings = [
        (training_of(model, cross_entropies, some, LocalSGD(0.1), engine=engine), list(some))
        for some in (users, without(users, TARGET))
    ]
    whole = private_sum(*trainings[0], clip=1e6)  # nobody is clipped: as many times the update as there are users
    near = _neighbours(math.hypot(*whole[:-1].tolist()) / ALIKE)  # torch's norm is off by up to 17 units
    sums = [[private_sum(*training, clip=clip) for clip in near] for training in trainings]
    # The norms lie between the clips that were tried, or the attack has shown nothing.
    for found, count in zip(sums, (ALIKE, ALIKE - 1), strict=True):
        assert [float(found[place][-1]) for place in (0, -1)] == [-count / 2, count / 2]
    return max(bits(*pair) for pair in zip(*sums, strict=True))


def _neighbours(norm: float) -> list[float]:
    """It and the float64 numbers next to it, ascending: as whole numbers, their bits count up."""
    found: list[float] = (np.array(norm).view(np.int64) + np.arange(-ULPS, ULPS + 1)).view(np.float64).tolist()
    return found


def end_moved(kind: str, users: int, seeds: int) -> float:
    """The most by which the sum of the bits moves, over some examples and all clips at which somebody's norm lies."""
    return max(_end_moved(kind, users, seed) for seed in range(seeds))


def _end_moved(kind: str, users: int, seed: int) -> float:
    torch.manual_seed(seed)
    x = np.random.default_rng(seed).normal(size=(1, 5))
    if kind == "adam":
        model, local, steps = nn.Linear(5, 3).double(), LocalAdam(0.01, 1), 51
    else:
        model, local, steps = nn.Sequential(nn.Linear(5, 1), nn.Mish(), nn.Linear(1, 3)), LocalSGD(1.0, 1), 1
    one: Fields = {"x": np.repeat(x, steps, axis=0), "y": np.zeros(steps, np.int64)}
    everybody = {**{f"u{number:04}": one for number in range(users - 1)}, TARGET: one}
    trainings = [
        (
            training_of(model, cross_entropies, some, local, engine="auto", population_size=users, cohort_size=users),
            list(some),
        )
        for some in (everybody, without(everybody, TARGET))
    ]
    norms = sorted({norm for training, names in trainings for norm in norms_of(training, names)})
    sums = [[private_sum(*training, clip=clip) for clip in norms] for training in trainings]
    return max(bits(*pair) for pair in zip(*sums, strict=True))


KINKED, INPUTS, HIDDEN, TRIED = 96, 41, 37, 400  # row 17: users, numbers of an example, units, examples tried


@cache
def kinked() -> tuple[float, float]:
    """Clips and bits by which the sum moves when the first user is removed and everybody else moves up by a place.

    Everybody's first unit is 0 up to rounding, by examples that switch it on at one place and off at the next.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))
    weight, bias = (one.detach().double().numpy() for one in (model[0].weight, model[0].bias))
    names = [f"u{number:02}" for number in range(KINKED)]
    blank: Fields = {"x": np.zeros((2, INPUTS), np.float32), "y": np.zeros(2, np.int64)}
    training = training_of(
        model,
        cross_entropies,
        dict.fromkeys(names, blank),
        LocalSGD(1.0, 2),
        population_size=KINKED,
        cohort_size=KINKED,
    )
    data = training.population.fields["x"]
    chosen = np.zeros((KINKED, INPUTS), np.float32)
    found: NDArray[np.bool_] = np.arange(KINKED) == 0
    rng = np.random.default_rng(0)
    for _ in range(TRIED):
        data[:] = x = _at_zero(weight, bias, rng)
        on = [_rows(training, some)[:, :INPUTS].abs().sum(dim=1).numpy() > 0 for some in (names, names[1:])]
        flips = ~on[0][1:] & on[1]
        chosen[1:][flips & ~found[1:]] = x
        found[1:] |= flips
        if found.all():
            break
    chosen[~found] = x  # nothing switches it: the last that was tried
    data[:] = np.repeat(chosen, 2, axis=0)
    norms = [_rows(training, some).double().norm(dim=1) for some in (names, names[1:])]
    middle = float(torch.cat(norms).min() + torch.cat(norms).max()) / 2
    sums = [[private_sum(training, some, clip=clip) for some in (names, names[1:])] for clip in (0.5, middle)]
    return clips(*sums[0], clip=0.5), bits(*sums[1])


def _at_zero(weight: NDArray[Any], bias: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """An example at which the first unit is 0 but for rounding, and all other units are far below."""
    target = np.full(HIDDEN, -5.0)
    target[0] = 0
    free = np.linalg.svd(weight)[2][HIDDEN:]
    x = (np.linalg.pinv(weight) @ (target - bias) + 30 * rng.normal(size=len(free)) @ free).astype(np.float32)
    for place in (int(np.argmax(np.abs(weight[0]))), *rng.integers(INPUTS, size=5)):
        x[place] -= np.float32((x.astype(np.float64) @ weight[0] + bias[0]) / weight[0, place])
    return x


def _rows(training: Any, users: list[str]) -> Tensor:
    """(users, dim): the updates of these users, of whom none has more work than others."""
    cohort = Cohort(positions(training.population, users), training.algorithm.sampler.sampling)
    request = CohortRequest(training.problem.model.initial.clone(), cohort, 0, lambda: 1.0)
    return torch.cat([updates.dense(training.dim) for updates, _ in training.trainer.train([request])])


ATTACKS = [
    Attack(
        "2a",
        "Batch width set by others",
        "40 users have 3 examples each. A target with 20 is sampled and removed. Batch statistics stand in "
        "front of a last layer that starts at zero. Parameters are those after 50 steps on data of the same"
        " rule; the clip is 0.1.",
        [
            Measure("stacked", "user removed, clips", "at most 1", lambda: width(engine="stacked")),
            Measure(
                "workers", "the same by two workers, clips", "at most 1", lambda: width(engine="stacked", workers=2)
            ),
            Measure("one by one", "the same one by one, clips", "at most 1", lambda: width(engine="one-by-one")),
        ],
    ),
    Attack(
        "2b",
        "Mode set by others",
        "The first example of a user who is not sampled becomes NaN. In the ordinary case 40 users have 3 "
        "to 7 examples each and the model has batch statistics. In the worst case 40 users' own first "
        "example pulls against the mean of their batch.",
        [
            Measure("benign", "user not sampled holds NaN: batch statistics, clips", "0", mode),
            Measure("worst", "the same, worst data, clips", "0", mode_at_worst),
        ],
    ),
    Attack(
        "8",
        "Rounding set by others",
        "40 users have 40 examples each. A target with 44 is sampled and removed. Float32, layer "
        "normalisation, 40 steps or more at a rate at which training is unstable. The clip is the median "
        "norm.",
        [
            Measure("clips", "user removed, stacked, clips", "at most 1", lambda: rounding("stacked")[0]),
            Measure("bits", "the same, sum of the bits", "at most 0.5", lambda: rounding("stacked")[1]),
            Measure("clips alone", "user removed, one by one, clips", "at most 1", lambda: rounding("one-by-one")[0]),
            Measure("bits alone", "the same, sum of the bits", "at most 0.5", lambda: rounding("one-by-one")[1]),
        ],
    ),
    Attack(
        "15",
        "Rounding of norms set by others",
        f"{ALIKE} users with the same example of {FEATURES} numbers are all sampled, and one is removed. One"
        f" step of a linear model in float32. The figure is the largest over {SEEDS} examples and "
        f"{2 * ULPS + 1} clips: the norm of the update and the {ULPS} float64 numbers on either side of it. Found "
        "later than the others, so *before* is commit 933b4b8.",
        [
            Measure(
                "one by one",
                f"one by one: a user of {ALIKE} who are alike is removed: the sum of the bits moves by",
                "at most 0.5",
                lambda: norms_moved("one-by-one"),
            ),
            Measure("stacked", "the same, stacked", "at most 0.5", lambda: norms_moved("stacked")),
        ],
    ),
    Attack(
        "16",
        "Rounding set by a user's place",
        "Users who are all alike are all sampled, and one is removed. They train on processor cores with "
        "engine='auto'. 961 users take one step in float32: a layer of one unit, the activation Mish and "
        "another layer. 64 users take 51 steps of Adam on a linear model in float64. The figure is the "
        "largest over some examples (8 and 6) and all clips at which a norm lies. Found later than the "
        "others, so *before* is commit 76c4e93.",
        [
            Measure(
                "stacked",
                "a user of 961 who are alike is removed: the sum of the bits moves by",
                "at most 0.5",
                lambda: end_moved("stacked", 961, 8),
            ),
            Measure("adam", "64 users, Adam", "at most 0.5", lambda: end_moved("adam", 64, 6)),
        ],
    ),
    Attack(
        "17",
        "A kink of the network",
        f"{KINKED} users are all sampled and take one step in float32, on processor cores with "
        f"engine='auto'. The model has {INPUTS} inputs, {HIDDEN} rectified units and a layer, and everybody "
        "has an example twice. Examples put the first unit at 0 up to rounding. They are chosen, out of "
        f"{TRIED}, so that the unit is off at the user's place and on one place before. Then the first user "
        "is removed. The clip is 0.5, and for the bits one between the norms. Found later than the others, "
        "so *before* is commit f5a19bb.",
        [
            Measure("clips", "user removed, clips", "at most 1", lambda: kinked()[0]),
            Measure("bits", "the same, sum of the bits", "at most 0.5", lambda: kinked()[1]),
        ],
    ),
]
