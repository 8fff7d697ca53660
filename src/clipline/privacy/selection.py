"""What it costs to train several times and release the best run only (Papernot and Steinke 2022).

The bound holds if
- the number of runs K is drawn at random from one of the distributions below, independently of the data;
- every run draws its settings at random from candidates fixed beforehand, and has the privacy of the costliest one;
- only the best run leaves: no score, no clip and no model of the others;
- the score by which runs are compared is public, or computed from users whose privacy the run accounts for too.

The first is checked here: a distribution is required, not a number. The caller answers for the others. Trying a fixed
list of settings and keeping the best is not covered: `account_grid` charges every run of such a list in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..errors import SettingError, check_number, check_whole
from .accountant import account
from .dominating_pairs import renyi_curve
from .guarantee import Guarantee
from .ledger import Ledger
from .numerics import Array
from .relations import Relation
from .renyi import deltas, epsilons

_ORDERS: Array = 1 + np.logspace(-2, 5, 7 * 48 + 1)


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """P(K = k) proportional to (1 - gamma)^k times the product of (l + eta) / (l + 1) over l < k, for k = 1, 2, ...

    eta = 1 is the geometric distribution, with 1 / gamma runs on average; eta = 0 is the logarithmic one. A smaller eta
    costs less for the same number of runs on average, but the number varies more.
    """

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        check_number("eta", self.eta, above=-1, way_out="1 is geometric, 0 logarithmic")
        check_number("gamma", self.gamma, above=0, below=1, way_out="1 over the number of runs, if eta is 1")

    @property
    def mean(self) -> float:
        """Runs on average."""
        if self.eta == 0:
            return (1 / self.gamma - 1) / -math.log(self.gamma)
        return self.eta * (1 - self.gamma) / (self.gamma * -math.expm1(self.eta * math.log(self.gamma)))

    @classmethod
    def with_mean(cls, mean: float, eta: float = 1.0) -> TruncatedNegativeBinomial:
        """The distribution with this number of runs on average."""
        check_number("mean", mean, above=1, way_out="give the number of runs wanted on average, such as 10")
        low, high = 1e-15, 1 - 1e-12
        for _ in range(200):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if cls(eta, middle).mean > mean else (low, middle)
        return cls(eta, high)

    def charge(self, orders: Array, divergences: Array) -> Array:
        """The Renyi curve of the released run, from the curve of one run at the same orders."""
        spread = (1 - 1 / orders) * divergences - math.log(self.gamma) / orders
        result: Array = divergences + (1 + self.eta) * spread.min() + math.log(self.mean) / (orders - 1)
        return result


@dataclass(frozen=True)
class PoissonRuns:
    """A Poisson number of runs with this mean. If the number is zero, a default fixed beforehand is released."""

    mean: float

    def __post_init__(self) -> None:
        check_number("mean", self.mean, above=0, way_out="give the number of runs wanted on average, such as 10")

    def charge(self, orders: Array, divergences: Array) -> Array:
        """The Renyi curve of the released run, from the curve of one run at the same orders."""
        own = np.log1p(1 / (orders - 1))
        chances = np.array([deltas(divergences, orders, float(epsilon)).min() for epsilon in own])
        result: Array = divergences + self.mean * chances + math.log(self.mean) / (orders - 1)
        return np.maximum(result, divergences) if self.mean < 1 else result


RunCount = TruncatedNegativeBinomial | PoissonRuns


def account_search(ledger: Ledger, runs: RunCount, *, delta: float, relation: Relation) -> Guarantee:
    """The guarantee of releasing the best of `runs` runs, each of which is `ledger` (or costs no more).

    It replaces the guarantee of the released run and is not added to it. See the module for what must hold.
    """
    if not isinstance(runs, TruncatedNegativeBinomial | PoissonRuns):
        raise SettingError(
            f"runs={runs!r} must be a distribution of the number of runs, since a fixed number is not covered: "
            "give TruncatedNegativeBinomial.with_mean(10) or PoissonRuns(10), or use account_grid"
        )
    if any(event.statistic is not None for event in ledger.events):
        raise SettingError("ledger holds private statistics, which no run releases again: account for them apart")
    one = account(ledger, delta=delta, relation=relation)
    if not ledger.rounds or not one.private:
        return one
    total = np.zeros(len(_ORDERS))
    for event, count in ledger.costs.items():
        total += count * renyi_curve(event, one.relation, tuple(_ORDERS))
    charged = runs.charge(_ORDERS, total)
    # A divergence rises with its order, so that a bound at a higher order also holds at every lower one.
    bounds = epsilons(np.minimum.accumulate(charged[::-1])[::-1], _ORDERS, delta)
    best = int(np.argmin(bounds))
    epsilon = max(float(bounds[best]), 0.0)
    return Guarantee(epsilon, delta, one.relation, one.sampler, "renyi", float(_ORDERS[best]), one.rounds)


def account_grid(ledger: Ledger, runs: int, *, delta: float, relation: Relation) -> Guarantee:
    """The guarantee of `runs` runs of `ledger` where the choice looks at them all: each is charged in full."""
    check_whole("runs", runs, at_least=1, way_out="give the number of runs on the grid")
    return account(Ledger(ledger.entries * runs), delta=delta, relation=relation)
