"""The one table: (sampling, relation) -> what one round can reveal about one user, at worst.

A pair of outputs (P, Q) dominates if it is harder to hide than any two neighbouring populations in any dimension.
Dominating pairs compose, also when later rounds look at earlier releases (Zhu, Dong and Wang 2022), so that everything
else in this package needs nothing but them. In units of the noise one user adds a vector of norm at most s = 1 / z:

    sampling            add-or-remove                    replace-one                 zero-out
    none                N(s) and N(0)                    N(2s) and N(0)              N(s) and N(0)
    Poisson q           LEAVE(q, s) and JOIN(q, s)       SWAP(q, s)                  as add-or-remove
    truncated Poisson   mixture of the row above with probability 1 - tau and of the row below, at rate q, with tau
    fixed m of n        LEAVE(q, 2s) and JOIN(q, 2s)     LEAVE(q, 2s), both ways     SILENCE(q, s) and LEAVE(q, s)

The letters are explained in `halves`, the proofs are in docs/guarantees.md, q = m / n for a fixed size. Where two are
named, the user may be in either population, and the worse direction over all rounds counts. "Both ways": exchange is
symmetric, and a profile that is LEAVE's for positive losses and its mirror image for negative ones covers every
exchange of one round.

Add-or-remove with a fixed size covers everyone who may leave the n users at hand, which is the larger q (those who may
join are sampled with m / (n + 1)). In a cohort of fixed size whoever joins displaces another, hence the 2.

Truncated Poisson sampling. Let K be how many of the others are drawn. While K < cap the user takes nobody's place, and
the round is one of Poisson sampling. If K >= cap the user, once drawn (probability q), is kept with probability
cap / (K + 1) and then takes the place of one of the others in an otherwise equal cohort: a round of fixed-size sampling
at a rate of at most q. K does not depend on the user, so that by joint convexity the profile of the round is at most
the mixture of the two profiles with tau = P(K >= cap). K is binomial; n others are counted, which overstates tau for a
user who leaves, and that is safe because at equal rate the profile of the row below is nowhere under that of the row
above.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..errors import SettingError
from .events import (
    FixedSizeSampling,
    GaussianEvent,
    NoSampling,
    PoissonSampling,
    Sampling,
    TruncatedPoissonSampling,
)
from .halves import Array, Half, Halves, Kind
from .loss import Direction
from .relations import Relation
from .renyi import fixed_size_curve, gaussian_curve, poisson_curve
from .theorem27 import theorem27_curve

Curve = Callable[[Array], Array]


@dataclass(frozen=True)
class Pair:
    """What dominates one round.

    `directions` holds one pair, if it is its own mirror image, or two: the user in P, the user in Q. None for the
    paper's convention, which is not a pair. `curve` is the Renyi divergence in closed form, where there is one; it
    bounds both directions. `mu` is the distance of two plain Gaussians, where the pair is that.
    """

    directions: tuple[Direction, ...]
    curve: Curve | None
    mu: float | None = None


@lru_cache(maxsize=1024)
def dominating_pair(event: GaussianEvent, relation: Relation) -> Pair:
    """The entry of the table, for a round with noise; what is not in it is refused with the nearest sound choice."""
    check_supported(event, relation)
    return _pair(event.sampling, relation, 1 / event.noise_multiplier)


def check_supported(event: GaussianEvent, relation: Relation) -> None:
    """Refuse what is not in the table."""
    if relation is Relation.PAPER and not isinstance(event.sampling, FixedSizeSampling):
        raise SettingError(
            f"relation='paper' cannot be accounted with {event.sampling}: the paper's convention is for fixed-size "
            "sampling and is kept to reproduce its tables only: use add-or-remove, which is sound for Poisson sampling"
        )


def _pair(sampling: Sampling, relation: Relation, shift: float) -> Pair:
    match sampling:
        case NoSampling():
            return _gaussian(2 * shift if relation is Relation.REPLACE_ONE else shift)
        case PoissonSampling(rate):
            return _poisson(rate, relation, shift)
        case FixedSizeSampling():
            return _fixed(sampling.rate, relation, shift)
        case TruncatedPoissonSampling(rate, population, cap):
            return _truncated(rate, population, cap, relation, shift)


def _gaussian(shift: float) -> Pair:
    direction = Direction((Half(Kind.LEAVE, 1.0, shift),), (Half(Kind.LEAVE, 1.0, shift),))
    return Pair((direction,), lambda orders: gaussian_curve(1 / shift, orders), shift)


def _poisson(rate: float, relation: Relation, shift: float) -> Pair:
    if relation is Relation.REPLACE_ONE:
        if rate == 1:
            return _gaussian(2 * shift)
        both = (Half(Kind.SWAP, rate, shift),)
        return Pair((Direction(both, both),), None)
    if rate == 1:
        return _gaussian(shift)
    return Pair(_two_ways(Kind.LEAVE, Kind.JOIN, rate, shift), lambda orders: poisson_curve(rate, 1 / shift, orders))


def _fixed(rate: float, relation: Relation, shift: float) -> Pair:
    match relation:
        case Relation.PAPER:
            return Pair((), lambda orders: theorem27_curve(rate, 1 / shift, orders))
        case Relation.ZERO_OUT if rate < 1:
            return Pair(_two_ways(Kind.SILENCE, Kind.LEAVE, rate, shift), None)
        case Relation.ZERO_OUT:
            return _gaussian(shift)
        case _ if rate == 1:
            return _gaussian(2 * shift)
        case Relation.ADD_OR_REMOVE:
            directions = _two_ways(Kind.LEAVE, Kind.JOIN, rate, 2 * shift)
            return Pair(directions, lambda orders: poisson_curve(rate, 0.5 / shift, orders))
        case Relation.REPLACE_ONE:
            both = (Half(Kind.LEAVE, rate, 2 * shift),)
            return Pair((Direction(both, both),), lambda orders: fixed_size_curve(rate, 0.5 / shift, orders))


def _truncated(rate: float, population: int, cap: int, relation: Relation, shift: float) -> Pair:
    roomy = _poisson(rate, relation, shift)
    if cap > population:
        return roomy
    full = _fixed(rate, relation, shift)
    tau = _chance_of_at_least(cap, population, rate)
    directions = tuple(
        Direction(_mixed(a.positive, b.positive, tau), _mixed(a.negative, b.negative, tau))
        for a, b in zip(_at_least_two(roomy), _at_least_two(full), strict=True)
    )
    curve = None
    if roomy.curve is not None and full.curve is not None:
        curve = _mixed_curve(roomy.curve, full.curve, tau)
    return Pair(directions if len(set(directions)) > 1 else directions[:1], curve)


def _two_ways(first: Kind, second: Kind, rate: float, shift: float) -> tuple[Direction, Direction]:
    one, other = (Half(first, rate, shift),), (Half(second, rate, shift),)
    return Direction(one, other), Direction(other, one)


def _at_least_two(pair: Pair) -> tuple[Direction, ...]:
    return pair.directions * 2 if len(pair.directions) == 1 else pair.directions


def _mixed(roomy: Halves, full: Halves, tau: float) -> Halves:
    return (
        *(replace(half, weight=half.weight * (1 - tau)) for half in roomy),
        *(replace(half, weight=half.weight * tau) for half in full),
    )


def _mixed_curve(roomy: Curve, full: Curve, tau: float) -> Curve:
    def curve(orders: Array) -> Array:
        slopes = orders - 1
        logs: Array = np.logaddexp(np.log1p(-tau) + slopes * roomy(orders), np.log(tau) + slopes * full(orders))
        return np.maximum(logs, 0.0) / slopes

    return curve


def _chance_of_at_least(least: int, trials: int, rate: float) -> float:
    """Upper bound on P(Binomial(trials, rate) >= least), for least <= trials; above 0 and below 1."""
    from scipy.special import betainc

    chance = float(betainc(least, trials - least + 1, rate))
    return min(max(chance * (1 + 1e-9), 1e-300), 1 - 1e-15)
