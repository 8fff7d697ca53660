"""The one table: (sampling, relation) -> what one round can reveal about one user, at worst.

A pair of output distributions (P, Q) dominates a round if it is at least as easy to tell apart as the outputs of any
two neighbouring populations, in any dimension. Dominating pairs compose, also when later rounds look at earlier
releases (Zhu, Dong and Wang 2022). Everything else in this package therefore reads this table and nothing else. In
units of the noise one user adds a vector of norm at most s = 1 / z:

    sampling            add-or-remove                     replace-one                   zero-out
    none                N(s) and N(0)                     N(2s) and N(0)                N(s) and N(0)
    Poisson q           REMOVE(q, s) and ADD(q, s)        REPLACE(q, s)                 as add-or-remove
    grouped Poisson     rounds of correlated noise, see `Ledger.costs`: as Poisson, fewer rounds; no replace-one
    truncated Poisson   mixture of Poisson's row with probability 1 - tau and of the row below, at rate q, with tau
    fixed m of n        REMOVE(q, 2s) and ADD(q, 2s)      REMOVE(q, 2s), both ways      ZERO_OUT(q, s) and REMOVE(q, s)

REMOVE, ADD, REPLACE and ZERO_OUT are defined in `pld/one_round`; the proofs are in proofs.md; q = m / n for a
fixed size. Where two pairs are named, the user may be in either population. Each is composed over all rounds, and the
worse one counts. "Both ways": replacing is symmetric. A profile that is REMOVE's for positive losses and its mirror
image for negative ones covers every replacement in one round.

Add-or-remove with a fixed size covers everyone who may leave the n users at hand. That is the larger q: those who may
join are sampled with m / (n + 1). In a cohort of fixed size whoever joins displaces another user, hence the 2.

Truncated Poisson sampling. Let K be how many of the others are drawn. If K < cap the user takes nobody's place, and the
round is one of Poisson sampling. If K >= cap the user, once drawn (probability q), is kept with probability
cap / (K + 1) and then takes the place of one of the others in an otherwise equal cohort: a round of fixed-size sampling
at a rate of at most q. K does not depend on the user, so that by joint convexity the profile of the round is at most
the mixture of the two profiles with tau = P(K >= cap). K is binomial. Counting n others overstates tau for a user who
leaves. That is safe, because at equal rate the profile of the row below is nowhere under that of the row above.
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
    GroupedPoissonSampling,
    NoSampling,
    PoissonSampling,
    Sampling,
    TruncatedPoissonSampling,
)
from .numerics import Array
from .pld.discretised import coarse_curve
from .pld.one_round import Direction, MixturePair, PositiveLoss, PositiveLossPart
from .relations import Relation
from .renyi import fixed_size_curve, gaussian_curve, poisson_curve, wang2019_curve

Curve = Callable[[Array], Array]  # orders -> Renyi divergences


@dataclass(frozen=True)
class DominatingPair:
    """What dominates one round.

    `directions` holds one direction, if the pair is its own mirror image, or two: the user in P, the user in Q. It is
    empty for the paper's convention, which is not a pair. `closed_curve` is the Renyi divergence in closed form, where
    there is one; it bounds both directions. `mu` is the distance of two plain Gaussians, where the pair is that.
    """

    directions: tuple[Direction, ...]
    closed_curve: Curve | None
    mu: float | None = None

    def renyi_curve(self, orders: Array) -> Array:
        """The Renyi divergence at each order above 1: in closed form, or else from a lattice of losses.

        From a lattice (Poisson sampling with replace-one, fixed-size sampling with zero-out) it is an upper bound
        within a few hundredths of the truth, which holds except for an event of probability below 10^-60 a round.
        """
        if self.closed_curve:
            return self.closed_curve(orders)
        worse: Array = np.max([coarse_curve(direction, orders) for direction in self.directions], axis=0)
        return worse


@lru_cache(maxsize=1024)
def dominating_pair(event: GaussianEvent, relation: Relation) -> DominatingPair:
    """The entry of the table for a round with noise. What is not in it is refused with the nearest sound choice."""
    check_supported(event, relation)
    return _pair(event.sampling, relation, 1 / event.noise_multiplier)


@lru_cache(maxsize=2048)
def renyi_curve(event: GaussianEvent, relation: Relation, orders: tuple[float, ...]) -> Array:
    """The Renyi divergence of one round at each order, all above 1: read-only, and kept, since rounds repeat.

    Infinite at every order for a round without noise.
    """
    check_supported(event, relation)
    if event.noise_multiplier == 0:
        curve = np.full(len(orders), np.inf)
    else:
        curve = dominating_pair(event, relation).renyi_curve(np.array(orders, dtype=np.float64))
    curve.flags.writeable = False
    return curve


def check_supported(event: GaussianEvent, relation: Relation) -> None:
    """Refuse what is not in the table."""
    if relation is Relation.PAPER and not isinstance(event.sampling, FixedSizeSampling):
        raise SettingError(
            f"relation='paper' cannot be accounted with {event.sampling}: the paper's convention is for fixed-size "
            "sampling and is kept to reproduce its tables only: use add-or-remove, which is sound for Poisson sampling"
        )
    grouped = isinstance(event.sampling, GroupedPoissonSampling)
    if grouped and relation not in (Relation.ADD_OR_REMOVE, Relation.ZERO_OUT):
        raise SettingError(
            f"relation={relation.value!r} cannot be accounted with {event.sampling}: whoever replaces a user may be in "
            "another group, and so in other rounds: use add-or-remove or zero-out, or independent noise"
        )


def _pair(sampling: Sampling, relation: Relation, shift: float) -> DominatingPair:
    match sampling:
        case NoSampling():
            return _gaussian(2 * shift if relation is Relation.REPLACE_ONE else shift)
        case PoissonSampling(rate):
            return _poisson(rate, relation, shift)
        case GroupedPoissonSampling():
            raise SettingError(f"{sampling} cannot be accounted round by round: give `account` the ledger of them all")
        case FixedSizeSampling():
            return _fixed(sampling.rate, relation, shift)
        case TruncatedPoissonSampling(rate, population, cap):
            return _truncated(rate, population, cap, relation, shift)


def _gaussian(shift: float) -> DominatingPair:
    both = _one_part(MixturePair.REMOVE, 1.0, shift)
    return DominatingPair((Direction(both, both),), lambda orders: gaussian_curve(1 / shift, orders), shift)


def _poisson(rate: float, relation: Relation, shift: float) -> DominatingPair:
    if relation is Relation.REPLACE_ONE:
        if rate == 1:
            return _gaussian(2 * shift)
        both = _one_part(MixturePair.REPLACE, rate, shift)
        return DominatingPair((Direction(both, both),), None)
    if rate == 1:
        return _gaussian(shift)
    directions = _both_directions(MixturePair.REMOVE, MixturePair.ADD, rate, shift)
    return DominatingPair(directions, lambda orders: poisson_curve(rate, 1 / shift, orders))


def _fixed(rate: float, relation: Relation, shift: float) -> DominatingPair:
    match relation:
        case Relation.PAPER:
            return DominatingPair((), lambda orders: wang2019_curve(rate, 1 / shift, orders))
        case Relation.ZERO_OUT if rate < 1:
            return DominatingPair(_both_directions(MixturePair.ZERO_OUT, MixturePair.REMOVE, rate, shift), None)
        case Relation.ZERO_OUT:
            return _gaussian(shift)
        case _ if rate == 1:
            return _gaussian(2 * shift)
        case Relation.ADD_OR_REMOVE:
            directions = _both_directions(MixturePair.REMOVE, MixturePair.ADD, rate, 2 * shift)
            return DominatingPair(directions, lambda orders: poisson_curve(rate, 0.5 / shift, orders))
        case Relation.REPLACE_ONE:
            both = _one_part(MixturePair.REMOVE, rate, 2 * shift)
            return DominatingPair((Direction(both, both),), lambda orders: fixed_size_curve(rate, 0.5 / shift, orders))


def _truncated(rate: float, population: int, cap: int, relation: Relation, shift: float) -> DominatingPair:
    uncapped = _poisson(rate, relation, shift)
    if cap > population:
        return uncapped
    full = _fixed(rate, relation, shift)
    tau = _chance_of_at_least(cap, population, rate)
    directions = tuple(
        Direction(_mixed(a.positive, b.positive, tau), _mixed(a.negative, b.negative, tau))
        for a, b in zip(_at_least_two(uncapped), _at_least_two(full), strict=True)
    )
    curve = None
    if uncapped.closed_curve is not None and full.closed_curve is not None:
        curve = _mixed_curve(uncapped.closed_curve, full.closed_curve, tau)
    return DominatingPair(directions if len(set(directions)) > 1 else directions[:1], curve)


def _both_directions(first: MixturePair, second: MixturePair, rate: float, shift: float) -> tuple[Direction, Direction]:
    one, other = _one_part(first, rate, shift), _one_part(second, rate, shift)
    return Direction(one, other), Direction(other, one)


def _one_part(pair: MixturePair, rate: float, shift: float) -> PositiveLoss:
    return (PositiveLossPart(pair, rate, shift),)


def _at_least_two(pair: DominatingPair) -> tuple[Direction, ...]:
    return pair.directions * 2 if len(pair.directions) == 1 else pair.directions


def _mixed(uncapped: PositiveLoss, full: PositiveLoss, tau: float) -> PositiveLoss:
    return (
        *(replace(part, weight=part.weight * (1 - tau)) for part in uncapped),
        *(replace(part, weight=part.weight * tau) for part in full),
    )


def _mixed_curve(uncapped: Curve, full: Curve, tau: float) -> Curve:
    def curve(orders: Array) -> Array:
        tilts = orders - 1
        logs: Array = np.logaddexp(np.log1p(-tau) + tilts * uncapped(orders), np.log(tau) + tilts * full(orders))
        return np.maximum(logs, 0.0) / tilts

    return curve


def _chance_of_at_least(least: int, trials: int, rate: float) -> float:
    """Upper bound on P(Binomial(trials, rate) >= least), for least <= trials; above 0 and below 1."""
    from scipy.special import betainc

    chance = float(betainc(least, trials - least + 1, rate))
    return min(max(chance * (1 + 1e-9), 1e-300), 1 - 1e-15)
