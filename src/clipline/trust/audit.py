"""Audits a training: lower bounds on its epsilon from users that were made to be recognised, in one run.

A canary is a user whose update is a random direction, longer than the clip. A coin decides for each whether it is among
the users of the run. Canaries go through the real sampler, clipping, noise and server. Whoever knows a canary's
direction then looks at its cosine with what was released. If the guarantee holds, these cosines tell little of the
coins, and what they tell bounds epsilon from below, with stated confidence:

- one run: how many coins are guessed (Steinke, Nasr, Jagielski 2023, theorem 5.2). Holds however canaries depend on
  each other. At most about log(canaries / 7) can be shown.
- one shot: how far the cosines lie beyond those of directions that nobody used, whose law is known (Andrew, Kairouz,
  Oh, Oprea, McMahan, Suriyakumar 2023). Takes canaries as independent, which they nearly are if the model has many
  more parameters than there are canaries.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ..data.population import Population
from ..engine.core.updates import Dense, Updates
from ..engine.workers.single import SingleProcess
from ..errors import check_whole, refuse
from ..federated.backend import CohortRequest, LocalTrainer
from ..federated.clipping import UserUpdates
from ..federated.local_sgd import LocalSGD
from ..federated.sampling import Cohort, FixedSizeSampler, GroupedPoissonSampler, PoissonSampler, Sampler
from ..privacy.guarantee import Guarantee
from ..training.loop import released_rounds
from ..training.options import Privacy
from ..training.training import Training

Numbers = NDArray[np.float64]
CONFIDENCE = 0.95  # that none of the bounds is above the true epsilon
_LONG = 4.0  # clips: how long a canary's update is before it is clipped
_ROWS = 64  # canaries in memory at a time
_SHARES = (1.0, 0.5, 0.25, 0.125)  # of the canaries about which a guess is made: decided beforehand
_APART = 10  # so many times more parameters than canaries, before these count as independent


@dataclass(frozen=True, eq=False)
class View:
    """What somebody sees who knows the canaries, and which epsilon that refutes."""

    name: str
    inside: Numbers  # cosines of canaries that were users of the run
    outside: Numbers
    one_run: float
    one_shot: float | None  # None where canaries are not independent enough

    @property
    def bound(self) -> float:
        """The greater of both."""
        return max(self.one_run, self.one_shot or 0.0)


@dataclass(frozen=True, eq=False)
class Audited:
    """What came of an audit."""

    claim: Guarantee
    views: tuple[View, ...]
    dim: int
    rounds: int
    took_part: float  # rounds of a canary among the users, on average

    @property
    def refuted(self) -> bool:
        """Whether a bound is above what is claimed."""
        return self.claim.private and any(view.bound > self.claim.epsilon for view in self.views)


def audit(training: Training, *, canaries: int = 1000, seed: int | None = None) -> Audited:
    """Train with canary users, half of them left out by coins, and bound epsilon from below.

    Half of the canaries come to the users at hand. The sampling rate stays as it is, and so does the claim under
    Poisson sampling. The run trains on the real users: what is told of it has cost its epsilon.

    Args:
      training: What to audit. It is used up: run another one for a model.
      canaries: How many. More show larger epsilons; beside the users of a cohort they should be few.
      seed: Of directions and coins. Left out, it comes from the operating system.

    Returns:
      An `Audited`: the claim, the cosines and the bounds.

    Raises:
      SettingError: If the training has personal parameters or an upload, which canaries have not.

    Example:
      >>> found = audit(training, canaries=500)
      >>> found.views[0].bound <= found.claim.epsilon
      True
    """
    check_whole("canaries", canaries, at_least=20, at_most=10**6, way_out="1000 shows epsilons up to 5")
    for name, value in (("personal", training.personal), ("upload", training.upload)):
        if value is not None:
            raise refuse(name, "given", "left out in an audit", f"audit the same training without {name}")
    flock = _Canaries(training.dim, secrets.randbits(64) if seed is None else seed)
    coins = np.random.default_rng([flock.seed, 1]).random(canaries) < 0.5
    inside, outside, real = np.flatnonzero(coins), np.flatnonzero(~coins), len(training.population)
    trainer = _WithCanaries(training.trainer, flock, real, inside)
    training.algorithm = replace(training.algorithm, sampler=_enlarged(training.algorithm.sampler, real, len(inside)))
    training.backend = SingleProcess(trainer)
    state = training.init()
    first, seen = state.returned.double().cpu(), torch.zeros(training.dim, dtype=torch.float64)
    rounds = training.affordable(state)
    for after, release in released_rounds(training, rounds):
        state = after
        seen += release.mean.double().cpu() * (training.cohort_size / trainer.clip)
    claim = training.guarantee_of(state.ledger)
    alpha = (1 - CONFIDENCE) / 4  # two views, two methods
    views = []
    for name, vector in (("released updates", seen), ("final model", state.returned.double().cpu() - first)):
        cosines = flock.cosines(canaries, vector.numpy())
        shot = None
        if training.dim >= _APART * canaries:
            shot = one_shot_bound(cosines[inside], training.dim, alpha=alpha / len(inside), delta=claim.delta)
        run = one_run_bound(cosines[inside], cosines[outside], alpha=alpha, delta=claim.delta)
        views.append(View(name, cosines[inside], cosines[outside], run, shot))
    return Audited(claim, tuple(views), training.dim, rounds, trainer.trained / max(1, len(inside)))


def one_run_bound(inside: Numbers, outside: Numbers, *, alpha: float, delta: float) -> float:
    """Epsilon that is refuted at `alpha` by guessing that high scores are inside and low scores outside.

    The numbers of guesses are fixed beforehand; `alpha` is shared among them.
    """
    from scipy.optimize import brentq

    scores = np.concatenate([inside, outside])
    truth = np.arange(len(scores)) < len(inside)
    ranked, found = truth[np.argsort(-scores, kind="stable")], 0.0
    for share in _SHARES:
        half = max(1, round(len(scores) * share / 2))
        correct = int(ranked[:half].sum() + (~ranked[-half:]).sum())
        level = alpha / len(_SHARES)

        def excess(epsilon: float, guesses: int = 2 * half, correct: int = correct, level: float = level) -> float:
            return one_run_p_value(len(scores), guesses, correct, epsilon, delta) - level

        if excess(0.0) < 0 < excess(100.0):
            found = max(found, float(brentq(excess, 0.0, 100.0, xtol=1e-6)))
    return found


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """How often so many of the guesses are right at most, if epsilon and delta hold: theorem 5.2."""
    from scipy.special import expit
    from scipy.stats import binom

    chance = expit(epsilon)
    pure = float(binom.sf(correct - 1, guesses, chance))
    steps = np.arange(1, correct + 1)
    near = binom.sf(correct - 1 - steps, guesses, chance) - pure
    return min(1.0, pure + 2 * canaries * delta * float(np.max(near / steps, initial=0.0)))


def one_shot_bound(cosines: Numbers, dim: int, *, alpha: float, delta: float) -> float:
    """Epsilon that is refuted at `alpha` by a threshold on the cosines of canaries that were users.

    How often a direction that nobody used is above a threshold is known. How often these are below has a Jeffreys
    interval. The best threshold is taken: share `alpha` among them where that matters.
    """
    from scipy.stats import beta

    thresholds = np.sort(cosines)
    below = np.arange(len(thresholds))
    misses = beta.ppf(1 - alpha, below + 0.5, len(thresholds) - below + 0.5)
    hits = 1 - delta - misses
    log_hits = np.log(hits, where=hits > 0, out=np.full(len(hits), -np.inf))
    return max(0.0, float(np.max(log_hits - log_null_tail(thresholds, dim))))


def log_null_tail(cosines: Numbers, dim: int) -> Numbers:
    """Logarithm of how often a random direction of `dim` dimensions has at least this cosine with a given one.

    Exact below 1000 dimensions. From there on by the normal law of variance 1 / dim, at most 0.001 below.
    """
    from scipy.special import betainc, log_ndtr

    if dim >= 1000:
        normal: Numbers = log_ndtr(-cosines * math.sqrt(dim))
        return normal
    tail = betainc((dim - 1) / 2, 0.5, 1 - np.square(cosines)) / 2
    exact: Numbers = np.log(np.maximum(np.where(cosines >= 0, tail, 1 - tail), np.finfo(np.float64).tiny))
    return exact


@dataclass(frozen=True)
class _Canaries:
    """Random directions by number, drawn whenever they are needed."""

    dim: int
    seed: int

    def rows(self, numbers: Sequence[int]) -> NDArray[np.float32]:
        """(numbers, dim) of norm 1."""
        drawn = [np.random.default_rng([self.seed, 0, one]).standard_normal(self.dim, np.float32) for one in numbers]
        rows = np.stack(drawn)
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        return rows

    def cosines(self, count: int, vector: Numbers) -> Numbers:
        """(count,) with a vector."""
        unit = vector / max(float(np.linalg.norm(vector)), np.finfo(np.float64).tiny)
        blocks = (range(count)[start : start + _ROWS] for start in range(0, count, _ROWS))
        return np.concatenate([self.rows(block) @ unit for block in blocks])


class _WithCanaries:
    """Users from number `real` on are canaries; all others train."""

    def __init__(self, trainer: LocalTrainer, flock: _Canaries, real: int, inside: NDArray[np.int64]) -> None:
        self.trainer, self.flock, self.real, self.inside = trainer, flock, real, inside
        self.trained, self.clip = 0, 1.0

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[UserUpdates, NDArray[np.int64]]]:
        """Blocks of updates of the users of one request, canaries last."""
        (request,) = requests
        users, self.clip = request.cohort.users, request.clip
        people = Cohort(users[users < self.real], request.cohort.sampling)
        yield from self.trainer.train([replace(request, cohort=people)])
        present = self.inside[users[users >= self.real] - self.real]
        self.trained += len(present)
        for start in range(0, len(present), _ROWS):
            block = self.flock.rows(present[start : start + _ROWS].tolist())
            updates = torch.from_numpy(block).to(request.params) * (_LONG * request.clip)
            yield Updates([Dense(0, updates)]), np.zeros(len(block), np.int64)


def _enlarged(sampler: Sampler, users: int, more: int) -> Sampler:
    """The sampler for so many more users, at the same rate. A fixed size is drawn from all of them."""
    if isinstance(sampler, PoissonSampler):
        return replace(sampler, users=users + more)
    if isinstance(sampler, GroupedPoissonSampler):
        return replace(sampler, groups=np.append(sampler.groups, np.arange(more) % sampler.bands))
    assert isinstance(sampler, FixedSizeSampler)
    return replace(sampler, population_size=users + more)


def made_up_training(epsilon: float = 4.0, rounds: int = 10) -> Training:
    """A training of made-up users, nine in ten of whom come to every round."""
    rng, users = np.random.default_rng(5), 500
    ids = np.repeat(np.arange(users), 2)
    people = Population.from_arrays(ids, x=rng.normal(size=(2 * users, 100)), y=rng.normal(size=(2 * users, 100)))
    torch.manual_seed(5)

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses: torch.Tensor = (model(batch["x"].float()) - batch["y"]).square().mean(dim=1)
        return losses

    return Training(
        nn.Linear(100, 100), loss, people, rounds=rounds, cohort_size=450, local=LocalSGD(lr=0.1, batch_size=2),
        privacy=Privacy(epsilon=epsilon, delta=1e-5, population_size=users),
    )  # fmt: skip


def draw_audit(found: Audited, path: Path) -> None:
    """A picture of the cosines: what both kinds of canaries look like to somebody who knows their directions."""
    from ..plotting import ACCENT, PALETTE, new_figure, save_figure

    figure, axes = new_figure(1, len(found.views), width=8.0, height=3.2)
    for axis, view in zip(axes, found.views, strict=True):
        shown = {
            "canaries left out": (view.outside * math.sqrt(found.dim), PALETTE[0]),
            "canaries trained on": (view.inside * math.sqrt(found.dim), ACCENT),
        }
        both = np.concatenate([cosines for cosines, _ in shown.values()])
        bins = np.linspace(min(both.min(), -3.0), max(both.max(), 3.0), 41)
        for name, (cosines, colour) in shown.items():
            kind: Any = {"histtype": "stepfilled", "color": colour, "edgecolor": colour, "alpha": 0.45, "label": name}
            axis.hist(cosines, bins.tolist(), density=True, **kind)
        places = np.linspace(bins[0], bins[-1], 300)
        axis.plot(
            places, np.exp(-(places**2) / 2) / math.sqrt(2 * math.pi), color="0.2", lw=1, label="any other direction"
        )
        axis.set_title(f"{view.name}: epsilon at least {view.bound:.2f}", loc="left", fontsize=10)
        axis.set_xlabel("cosine times root of parameters")
    axes[0].set_ylabel("density")
    axes[0].legend(frameon=False, fontsize=8)
    save_figure(figure, path)
