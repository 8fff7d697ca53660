"""What the attacks share: a training to attack, its private sum, distances in clips, figures that may be refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipline import Compute, FixedClip, Population, Privacy, Training
from clipline.errors import CliplineError
from clipline.federated.backend import CohortRequest
from clipline.federated.local_sgd import LocalTraining
from clipline.federated.mechanism import GaussianMechanism
from clipline.federated.sampling import Cohort

Value = float | int | str
Fields = Mapping[str, NDArray[Any]]
Users = Mapping[str, Fields]  # user's id -> fields, each (examples, ...)
CLIP = 1.0


@dataclass(frozen=True)
class Measure:
    """One figure: what it is, what it should be, and how to get it from the clipline that is importable."""

    key: str  # in the JSON
    what: str
    promise: str
    measure: Callable[[], Value]


@dataclass(frozen=True)
class Attack:
    """A few figures on one weakness; `how` is the line below them in the table."""

    number: str
    title: str
    how: str
    measures: Sequence[Measure]

    def figures(self) -> dict[str, Value]:
        """All figures; where clipline refuses what an attack needs, its sentence is the figure."""
        return {one.key: measured(one.measure) for one in self.measures}


def measured(measure: Callable[[], Value]) -> Value:
    """The figure, or "refused: " and the sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measure()
        except CliplineError as error:
            return f"refused: {str(error).splitlines()[0]}"


def population_of(users: Users) -> Population:
    """The users under their own ids."""
    names = next(iter(users.values())).keys()
    ids = np.concatenate([[user] * len(next(iter(fields.values()))) for user, fields in users.items()])
    fields = {name: np.concatenate([f[name] for f in users.values()]) for name in names}
    return Population.from_arrays(ids, missing="zero-update", **fields)  # some attacks are made of NaN


def training_of(
    model: nn.Module, loss: Callable[..., Tensor], users: Users | Population, local: LocalTraining, **changes: Any
) -> Training:
    """A training of one round at clip 1, from plain keywords: those of `Privacy` and `Compute` go there."""
    population = users if isinstance(users, Population) else population_of(users)
    usual = {"rounds": 1, "cohort_size": max(1, len(population) // 2), "seed": 2026, "clip": FixedClip(CLIP)}
    settings = {**usual, **({} if "epsilon" in changes else {"noise_multiplier": 1.0}), **changes}
    privacy, compute = (
        {field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings}
        for kind in (Privacy, Compute)
    )
    return Training(
        model, loss, population, local=local, privacy=Privacy(**privacy), compute=Compute(**compute), **settings
    )


def private_sum(
    training: Training, users: Sequence[str], params: Tensor | None = None, clip: float = CLIP, round_index: int = 0
) -> Tensor:
    """(dim + 1,): what a round adds up when exactly these users were sampled; the last is the sum of centred bits.

    Read by the only way there is: a release without noise, of a cohort size of 1.
    """
    cohort = Cohort(positions(training.population, users), training.algorithm.sampler.sampling)
    begin = training.problem.model.initial.clone() if params is None else params
    with training.backend.running():
        (total,) = training.backend.sums([CohortRequest(begin, cohort, round_index, lambda: clip)])
        release = GaussianMechanism(1, 0.0, 0.0).release(total, np.random.default_rng(0))
    assert release.fraction_within is not None
    return torch.cat([release.mean, release.mean.new_tensor([release.fraction_within - 0.5])])


def norms_of(training: Training, users: Sequence[str]) -> list[float]:
    """The norms of these users' updates when exactly they were sampled: where clips are worth trying."""
    cohort = Cohort(positions(training.population, users), training.algorithm.sampler.sampling)
    request = CohortRequest(training.problem.model.initial.clone(), cohort, 0, lambda: 1.0)
    return [norm for updates, _ in training.trainer.train([request]) for norm in updates.norms().tolist()]


def positions(population: Population, users: Sequence[str]) -> NDArray[np.int64]:
    """Where these users stand in the population, ascending."""
    known = {user: place for place, user in enumerate(np.asarray(population.user_ids).tolist())}
    return np.sort(np.array([known[user] for user in users], dtype=np.int64))


def clips(one: Tensor, other: Tensor, clip: float = CLIP) -> float:
    """How far two sums of updates lie from each other, in clips."""
    return float((one[:-1] - other[:-1]).norm()) / clip


def bits(one: Tensor, other: Tensor) -> float:
    """How far their sums of bits lie from each other."""
    return float((one[-1] - other[-1]).abs())


def without(users: Users, target: str) -> dict[str, Fields]:
    """The neighbour: everybody else."""
    return {user: fields for user, fields in users.items() if user != target}


def renamed(users: Users, target: str, name: str) -> dict[str, Fields]:
    """The same people, one of them under another id."""
    return {name if user == target else user: fields for user, fields in users.items()}


def vector(model: nn.Module) -> Tensor:
    """The model's parameters end to end, as a round takes them."""
    return torch.cat([param.detach().reshape(-1) for param in model.parameters() if param.requires_grad])


def area(present: Sequence[float], absent: Sequence[float]) -> float:
    """The area under the ROC curve: how often a score with the user is above one without; 1/2 is guessing."""
    a, b = np.asarray(present)[:, None], np.asarray(absent)[None, :]
    return float(((a > b) + 0.5 * (a == b)).mean())


def cross_entropies(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,): of the model's answers to x."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def classified(sizes: Mapping[str, int], features: int = 8, classes: int = 3, seed: int = 0) -> dict[str, Fields]:
    """Ordinary users: noisy answers of one linear rule."""
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=(features, classes))
    users = {}
    for user, size in sizes.items():
        x = rng.normal(size=(size, features)).astype(np.float32)
        users[user] = {"x": x, "y": (x @ rule + rng.normal(size=(size, classes))).argmax(axis=1)}
    return users
