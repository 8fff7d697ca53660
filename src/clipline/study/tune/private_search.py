"""A search on the private data themselves, charged.

The recipe's own trial cannot be charged: with z = 0.01 a single run promises nothing. So the order is turned round.
Cohort and noise are scaled first, until the search as a whole meets the target; then rates of a list fixed beforehand
are trained at that cohort and noise. The best run is the final training: `final.toml` has its seed, and training it
again gives the same model at no further charge. There are two ways to charge, and the one that needs the smaller cohort
is taken:

- composition: every pair of rates is run once, and every run is charged in full. All results may be shown.
- selection: a random number of runs, each with rates drawn at random (Papernot and Steinke 2022; `privacy.selection`).
  Only the best run leaves: neither how many there were, nor what the others gave.

Where a user rarely takes part, composition is often the cheaper one.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...errors import RunError
from ...privacy.guarantee import Guarantee, rounded_up
from ...privacy.ledger import Ledger
from ...privacy.selection import TruncatedNegativeBinomial, account_grid, account_search
from ...training import durable
from ..directory import CLAIMS, Claims
from ..record import RunSpec
from ..study import Study
from .question import Alternative, Question, Target, Unreachable, least, least_cohort
from .recipe import RateGrid
from .trials import Metric, Tell, Trial, Trials, check_learnt

FOLDER = "private"  # in the directory of the tuning: it holds seeds, and nothing in it may leave
_DRAWN = "drawn.json"

Method = Literal["composition", "selection"]


@dataclass(frozen=True)
class SearchPrice:
    """Cohort and noise of every run, and what the whole search costs at these."""

    method: Method
    runs: int  # so many, or so many on average
    cohort_size: int
    noise_multiplier: float
    guarantee: Guarantee  # of the whole search, with the model that it ends in
    one_run: Guarantee


@dataclass(frozen=True)
class PrivatelyTuned:
    """The answer: the best run, and the price of having looked for it. `trials` are empty where they must not leave."""

    question: Question
    metric: Metric
    candidates: tuple[dict[str, float], ...]
    price: SearchPrice
    trials: tuple[Trial, ...]
    chosen: Trial
    spec: RunSpec  # of the chosen run, with its seed


def candidates_of(question: Question) -> tuple[dict[str, float], ...]:
    """The pairs of rates of a private search: a grid fixed beforehand."""
    grid = RateGrid(question.trial.client_lr, question.trial.server_rate, question.reach)
    return tuple(grid.rates(point) for point in grid.first())


def price_search(target: Target, noise_multiplier: float, runs: int) -> SearchPrice:
    """The least cohort m' >= m such that the whole search meets the target with (m', z m' / m) in every run.

    Refused, with what would do, if the users are too few.
    """
    found = {method: _least_cohort(target, noise_multiplier, runs, method) for method in _METHODS}
    cohorts: dict[Method, int] = {method: cohort for method, cohort in found.items() if cohort is not None}
    if not cohorts:
        raise _unreachable(target, noise_multiplier, runs)
    method = min(cohorts, key=lambda name: cohorts[name])
    cohort = cohorts[method]
    z = noise_multiplier * cohort / target.cohort_size
    ledger = target.ledger(cohort, z)
    one_run = account_grid(ledger, 1, **target.terms)
    return SearchPrice(method, runs, cohort, z, _METHODS[method](target, ledger, runs), one_run)


def tune_privately(
    question: Question, price: SearchPrice, study: Study, tell: Tell = lambda line: None
) -> PrivatelyTuned:
    """Draw the runs, make them, keep the best. A search that is resumed keeps what it drew.

    Refused in the folder of a search that was asked otherwise: its seeds draw the same noise, so that two searches with
    them would promise nothing.
    """
    candidates = candidates_of(question)
    tell(f"every run: m = {price.cohort_size:,}, z = {price.noise_multiplier:.4g}; the whole search: {price.guarantee}")
    target = question.target
    trial = replace(
        question.trial, cohort_size=price.cohort_size, population_size=target.population_size, delta=target.delta_value,
        relation=target.relation.value,
    )  # fmt: skip
    trials = Trials(replace(question, trial=trial, noise_multiplier=price.noise_multiplier), study)
    asked = study.planned(trials.spec({"seed": 0})).id  # seeds are drawn: that of the trial decides nothing
    drawn = draw_runs(study.directory.path, len(candidates), price.method, asked)
    changes = [{**candidates[number], "seed": seed} for number, seed in drawn]
    made = trials.run(changes)
    best = min(range(len(made)), key=lambda place: trials.metric.sign * made[place].value)  # of equals the first
    check_learnt(made[best])
    shown = tuple(made) if price.method == "composition" else ()
    return PrivatelyTuned(question, trials.metric, candidates, price, shown, made[best], trials.spec(changes[best]))


def draw_candidates(candidates: int, method: Method) -> list[int]:
    """Which candidates to run: each once, or a geometric number drawn at random, as many on average."""
    if method == "composition":
        return list(range(candidates))
    rng, count = secrets.SystemRandom(), 1
    while rng.random() >= 1 / candidates:  # until one try succeeds, with chance 1 / mean
        count += 1
    return [rng.randrange(candidates) for _ in range(count)]


def draw_runs(folder: Path, candidates: int, method: Method, run: str) -> list[tuple[int, int]]:
    """(candidate, seed) of every run, drawn once and kept where only the owner reads.

    `run` is the identity of the runs but for rates and seed. Where the folder has another search, it is refused. Of two
    processes that come at once, one draws and both have the same runs.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)  # the records of the runs hold their seeds
    durable.sync_folder(folder.absolute().parent)
    path, asked = folder / _DRAWN, {"candidates": candidates, "method": method, "run": run}
    with Claims(folder / CLAIMS) as claims:
        while not claims.take("drawn"):
            time.sleep(0.02)
        if not path.is_file():
            runs = [(number, secrets.randbits(256)) for number in draw_candidates(candidates, method)]
            durable.write(path, json.dumps({"asked": asked, "runs": runs}), mode=0o600)
            return runs
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        same, runs = kept["asked"] == asked, [(int(number), int(seed)) for number, seed in kept["runs"]]
        wrong = "" if same else "belongs to a private search that was asked otherwise"
    except (ValueError, TypeError, KeyError) as error:
        wrong = f"is damaged ({error})"
    if wrong:
        hint = "give another --out, and add both epsilons"
        raise RunError(f"{str(path)!r} {wrong}, and a second search costs as much again", hint)
    return runs


def _composed(target: Target, ledger: Ledger, runs: int) -> Guarantee:
    return account_grid(ledger, runs, **target.terms)


def _selected(target: Target, ledger: Ledger, runs: int) -> Guarantee:
    if runs == 1:  # no choice, no price
        return account_grid(ledger, 1, **target.terms)
    return account_search(ledger, TruncatedNegativeBinomial.with_mean(runs), **target.terms)


_METHODS: dict[Method, Callable[[Target, Ledger, int], Guarantee]] = {"composition": _composed, "selection": _selected}


def _least_cohort(target: Target, noise_multiplier: float, runs: int, method: Method) -> int | None:
    """The least cohort with which a search so charged meets the target; None if the users are too few."""
    m, n = target.cohort_size, target.population_size
    if method == "composition":  # as one training of so many more rounds
        return least_cohort(replace(target, rounds=runs * target.rounds), noise_multiplier)

    def meets(cohort: int) -> bool:
        ledger = target.ledger(cohort, noise_multiplier * cohort / m)
        return _selected(target, ledger, runs).epsilon <= target.epsilon

    return least(m - 1, n, meets) if meets(n) else None  # a larger cohort with its noise is more private


def _unreachable(target: Target, noise_multiplier: float, runs: int) -> Unreachable:
    n, m = target.population_size, target.cohort_size

    def epsilon(z: float) -> float:
        return min(charge(target, target.ledger(n, z * n / m), runs).epsilon for charge in _METHODS.values())

    best = epsilon(noise_multiplier)
    found = []
    if math.isfinite(best):
        found.append(Alternative(f"--epsilon {rounded_up(best, 3)}", "all users in every round reach it"))
    low, high = noise_multiplier, m / 20
    if epsilon(high) <= target.epsilon:
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if epsilon(middle) <= target.epsilon else (middle, high)
        found.append(Alternative(f"--noise-multiplier {rounded_up(high, 3)}", f"at m = {m}, if the model bears it"))
    found.append(Alternative("--proxy DATA without --private-search", "a search on other data is free"))
    return Unreachable(
        f"epsilon={target.epsilon:g} at delta={target.delta_value:.3g} must be met by the whole private search, "
        f"{runs} runs, with the {n:,} users there are, and is not: scaled from m={m}, z={noise_multiplier:g}, all of "
        f"them in every round reach epsilon {rounded_up(best, 3)}. Each of these alone would do:",
        found,
    )
