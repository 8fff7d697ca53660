"""What a ledger of rounds guarantees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Literal

import numpy as np

from ..errors import check_choice, check_number
from .conversion import epsilon_at
from .events import NoSampling, PoissonSampling, Sampling, SamplingName
from .ledger import Ledger
from .quadrature import Array
from .relations import Relation
from .renyi import check_supported, renyi_curve

_SAMPLERS = {
    "none": "no sampling",
    "poisson": "Poisson sampling",
    "fixed": "fixed-size sampling",
    "mixed": "mixed sampling",
}


@dataclass(frozen=True)
class Guarantee:
    """(epsilon, delta) differential privacy for one user, with everything needed to quote it.

    `sampler` is "none", "poisson" or "fixed", or "mixed" when rounds differ in kind. `order` is the Renyi order that
    gave epsilon; there is none for an empty ledger nor for a run that is not private.
    """

    epsilon: float
    delta: float
    relation: Relation
    sampler: SamplingName | Literal["mixed"]
    accountant: str
    order: float | None
    rounds: int

    @property
    def private(self) -> bool:
        """Whether anything is guaranteed at all, that is, whether epsilon is finite."""
        return math.isfinite(self.epsilon)

    def __str__(self) -> str:
        """One sentence to quote; epsilon and delta are rounded up at the last digit printed."""
        rounds = f"{self.rounds} round{'' if self.rounds == 1 else 's'}"
        terms = f"{_SAMPLERS[self.sampler]}, {rounds}, {self.accountant.capitalize()} accountant"
        if not self.private:
            return f"not private: no noise was added ({terms})"
        return f"(epsilon {self.epsilon_text}, delta {self.delta_text})-DP for {self.relation.phrase}, {terms}"

    @property
    def epsilon_text(self) -> str:
        """Epsilon to print: three digits, rounded up; "infinite" where there is no guarantee."""
        if not self.private:
            return "infinite (not private)"
        epsilon = _rounded_up(Decimal(self.epsilon), 3)
        return f"{epsilon:f}" if epsilon < 1_000_000 else f"{float(epsilon):.3g}"

    @property
    def delta_text(self) -> str:
        """Delta to print: three digits, rounded up."""
        # Delta is given, not computed: rounding up its shortest decimal form keeps 1e-05 as 1e-05.
        return f"{float(_rounded_up(Decimal(repr(self.delta)), 3)):.3g}"


def account(ledger: Ledger, *, delta: float, relation: Relation) -> Guarantee:
    """The guarantee of all rounds in `ledger` together, by Renyi composition and the best real order.

    An empty ledger costs nothing. One round without noise makes the whole run not private. A pair of sampling and
    relation that has no sound curve is refused, even then. Curves are kept, so that calling it after every round of
    training costs a fraction of a millisecond.
    """
    delta = check_number("delta", delta, above=0, below=1, way_out="give less than one over the number of users")
    relation = Relation(check_choice("relation", relation, [known.value for known in Relation]))
    events = ledger.events
    for event in events:
        check_supported(event, relation)
    epsilon: float
    order: float | None
    if not events:
        epsilon, order = 0.0, None
    elif any(event.noise_multiplier == 0 for event in events):
        epsilon, order = math.inf, None
    else:

        def curve(orders: tuple[float, ...]) -> Array:
            total = np.zeros(len(orders))
            for event, count in events.items():
                total += count * renyi_curve(event, relation, orders)
            return total

        epsilon, order = epsilon_at(curve, delta)
    kinds = {event.sampling.name for event in events} or {NoSampling.name}
    sampler = kinds.pop() if len(kinds) == 1 else "mixed"
    return Guarantee(epsilon, delta, relation, sampler, "renyi", order, ledger.rounds)


def default_relation(sampling: Sampling) -> Relation:
    """The relation under which a sampling is best understood: add-or-remove, but replace-one for a fixed size."""
    return Relation.ADD_OR_REMOVE if isinstance(sampling, NoSampling | PoissonSampling) else Relation.REPLACE_ONE


def _rounded_up(value: Decimal, digits: int) -> Decimal:
    """`value` at `digits` significant digits, never below itself: 3.961 becomes 3.97."""
    return Context(prec=digits, rounding=ROUND_CEILING).plus(value)
