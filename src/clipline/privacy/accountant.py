"""What a ledger of rounds guarantees: the tighter of the Renyi and the privacy-loss accountant, and which it was.

Both accountants read the same table (`dominating_pairs`). The privacy-loss distribution is nearly always tighter. The
Renyi curve wins where a lattice would need more points than are allowed. Rounds without sampling are exact.

The curves and transforms of one round are kept: after every round of training `account` takes one or two milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ..errors import SettingError, check_number
from .dominating_pairs import check_supported, dominating_pair, renyi_curve
from .events import FixedSizeSampling, GaussianEvent, NoSampling, Sampling
from .guarantee import AccountantName, Guarantee
from .ledger import Ledger
from .numerics import Array, gaussian_delta, gaussian_epsilon
from .pld.compose import delta_of, epsilon_of, quick_epsilon_of, rough_epsilon_of
from .pld.one_round import Direction, MixturePair, PositiveLossPart, Rounds
from .relations import Relation
from .renyi import PAPER_ORDERS, deltas, epsilon_at, epsilons

Events = tuple[tuple[GaussianEvent, int], ...]
Bounds = tuple[Callable[[Rounds, float], float], ...]

_QUICK: Bounds = (quick_epsilon_of,)
_ROUGH: Bounds = (*_QUICK, rough_epsilon_of)
_FULL: Bounds = (*_ROUGH, epsilon_of)


def account(ledger: Ledger, *, delta: float, relation: Relation) -> Guarantee:
    """The guarantee of all rounds in `ledger` together.

    An empty ledger costs nothing. One round without noise makes the whole run not private. A pair of sampling and
    relation that is not in the table is refused, also for such a run. The order of the rounds does not change a digit.
    """
    delta, relation, events = check_delta(delta), *_read(ledger, relation)
    return _guarantee(ledger, events, delta, relation, _spent(events, _delta_left(events, delta, relation), relation))


def account_renyi(ledger: Ledger, *, delta: float, relation: Relation) -> Guarantee:
    """The guarantee by the Renyi curve alone: at or above that of `account`, for comparison with other accountants."""
    delta, relation, events = check_delta(delta), *_read(ledger, relation)
    if relation is Relation.PAPER or not events or any(event.noise_multiplier == 0 for event, _ in events):
        return account(ledger, delta=delta, relation=relation)
    left = _delta_left(events, delta, relation)
    by_renyi, order = epsilon_at(lambda orders: _total_curve(events, relation, orders), left)
    return _guarantee(ledger, events, delta, relation, (by_renyi, "renyi", order))


def delta_at(ledger: Ledger, *, epsilon: float, relation: Relation) -> float:
    """The least delta that can be shown for `epsilon`: 1 if nothing can, 0 for an empty ledger."""
    epsilon = check_number("epsilon", epsilon, at_least=0, way_out="give an epsilon such as 1")
    relation, events = _read(ledger, relation)
    if not events:
        return 0.0
    if any(event.noise_multiplier == 0 for event, _ in events):
        return 1.0
    if relation is Relation.PAPER:
        return min(float(deltas(_total_curve(events, relation, tuple(PAPER_ORDERS)), PAPER_ORDERS, epsilon).min()), 1.0)
    mu, directions = _composed_directions(events, relation)
    ratio = log_ratio(events)
    left = max(epsilon - 2 * ratio, 0.0)
    noise = max(delta_of(rounds, left) for rounds in directions) if directions else gaussian_delta(mu, left)
    beyond = max(2 * ratio - epsilon, 0.0)  # a profile falls no faster than this left of epsilon 0
    return min((noise + beyond + threshold_delta(events, relation)) * math.exp(ratio), 1.0)


def default_relation(sampling: Sampling) -> Relation:
    """The usual relation for a sampling: add-or-remove, but replace-one for a fixed size.

    Add-or-remove takes the rate as a public constant. If the rate is computed from the number of users at hand,
    zero-out must be named instead; its pair and its epsilon are the same.
    """
    return Relation.REPLACE_ONE if isinstance(sampling, FixedSizeSampling) else Relation.ADD_OR_REMOVE


def _guarantee(
    ledger: Ledger, events: Events, delta: float, relation: Relation, spent: tuple[float, AccountantName, float | None]
) -> Guarantee:
    rounds = [event for event in ledger.events if event.statistic is None]
    kinds = {event.sampling.name for event in rounds} or {NoSampling.name}
    sampler = kinds.pop() if len(kinds) == 1 else "mixed"
    noisy = all(event.noise_multiplier > 0 for event, _ in events)
    epsilon, accountant, order = spent[0] + 2 * log_ratio(events), *spent[1:]
    known = [(event, event.statistic) for event in ledger.events if event.statistic is not None]
    names = tuple(f"{statistic.name} (noise multiplier {event.noise_multiplier:g})" for event, statistic in known)
    from_seed = any(statistic.from_seed for _, statistic in known)
    return Guarantee(
        epsilon, delta, relation, sampler, accountant, order, ledger.rounds, noisy, from_seed, statistics=names
    )


def log_ratio(events: Events) -> float:
    """How far, in logarithms, probabilities may be from those of normal noise, all rounds together.

    Of both neighbours: so epsilon grows by twice as much, and delta by its exponential.
    """
    return math.fsum(event.log_ratio * count for event, count in events)


def threshold_delta(events: Events, relation: Relation) -> float:
    """How much of delta the thresholds of statistics take: an upper bound on the chance that one user's key shows.

    With chance 1 - d no key shows that the user alone has, and a release is then one of the Gaussian mechanism on the
    other keys. Where the user is there, this adds d to the probability of any outcome. Where that population is the one
    compared with, it takes a factor 1 - d off, which shifts every loss by -log(1 - d) and so adds at most that to
    delta. Both happen if one user is replaced by another.
    """
    shifts = [-math.log1p(-event.statistic.threshold_delta) * n for event, n in events if event.statistic is not None]
    return math.fsum(shifts) * (2 if relation is Relation.REPLACE_ONE else 1)


def _delta_left(events: Events, delta: float, relation: Relation) -> float:
    """What discrete noise and the thresholds of statistics leave of delta for normal noise."""
    delta *= math.exp(-log_ratio(events))
    if not (taken := threshold_delta(events, relation)):
        return delta
    if taken >= delta:
        raise SettingError(
            f"{delta=} must be above the {taken:g} that thresholds of private statistics take: raise delta, or release "
            "them with a smaller threshold_delta"
        )
    return delta - taken


def check_delta(delta: float) -> float:
    """`delta` as a float, if it is above 0 and below 1."""
    return check_number("delta", delta, above=0, below=1, way_out="give less than one over the number of users")


def _read(ledger: Ledger, relation: Relation) -> tuple[Relation, Events]:
    """The relation, and what the ledger costs, in an order that depends on nothing but the events."""
    relation = Relation.named(relation)
    for event in sorted(ledger.events, key=repr):
        check_supported(event, relation)
    return relation, tuple(sorted(ledger.costs.items(), key=lambda item: repr(item[0])))


@lru_cache(maxsize=4096)
def _spent(events: Events, delta: float, relation: Relation) -> tuple[float, AccountantName, float | None]:
    """(epsilon, which accountant, Renyi order)."""
    if not events:
        return 0.0, "privacy loss", None
    if any(event.noise_multiplier == 0 for event, _ in events):
        return math.inf, "privacy loss", None
    if relation is Relation.PAPER:
        bounds = epsilons(_total_curve(events, relation, tuple(PAPER_ORDERS)), PAPER_ORDERS, delta)
        best = int(np.argmin(bounds))
        return max(float(bounds[best]), 0.0), "renyi", float(PAPER_ORDERS[best])
    mu, directions = _composed_directions(events, relation)
    if not directions:
        return gaussian_epsilon(mu, delta), "privacy loss", None
    by_loss, quick = _worst(directions, delta, _FULL), _worst(directions, delta, _QUICK)
    # The quick bound lies at most a few hundredths above the Renyi one: well below it the Renyi one cannot be tighter.
    if by_loss > 0.95 * quick and all(dominating_pair(event, relation).closed_curve for event, _ in events):
        by_renyi, order = epsilon_at(lambda orders: _total_curve(events, relation, orders), delta)
        if by_renyi < by_loss:
            return by_renyi, "renyi", order
    return by_loss, "privacy loss", None


def quick_epsilon(ledger: Ledger, *, delta: float, relation: Relation) -> float:
    """An epsilon at or above that of `account`, in a small fraction of its time: where searches start."""
    return _bound(ledger, delta, relation, _QUICK)


def rough_epsilon(ledger: Ledger, *, delta: float, relation: Relation) -> float:
    """An epsilon at or above that of `account` by a few 10^-4, in a fraction of its time: for searches and curves."""
    return _bound(ledger, delta, relation, _ROUGH)


def _bound(ledger: Ledger, delta: float, relation: Relation, bounds: Bounds) -> float:
    relation, events = _read(ledger, relation)
    delta = _delta_left(events, delta, relation)
    if not events or relation is Relation.PAPER or any(event.noise_multiplier == 0 for event, _ in events):
        return _spent(events, delta, relation)[0]
    mu, directions = _composed_directions(events, relation)
    epsilon = _worst(directions, delta, bounds) if directions else gaussian_epsilon(mu, delta)
    return epsilon + 2 * log_ratio(events)


def _worst(directions: tuple[Rounds, ...], delta: float, bounds: Bounds) -> float:
    """The greater epsilon of the two directions by the last of `bounds`, each of which lies at or below the one before.

    A direction whose value lies below the other's refined value need not be refined itself.
    """
    values = [math.inf] * len(directions)
    for bound in bounds:
        worst = 0.0
        for index in sorted(range(len(directions)), key=lambda i: -values[i]):
            if values[index] > worst:
                values[index] = bound(directions[index], delta)
                worst = max(worst, values[index])
    return max(values)


def _composed_directions(events: Events, relation: Relation) -> tuple[float, tuple[Rounds, ...]]:
    """(mu, all rounds in each direction). mu is the distance of all rounds without sampling.

    There are no directions if no round is sampled: mu then says everything.
    """
    pairs = [(dominating_pair(event, relation), count) for event, count in events]
    mu = math.sqrt(math.fsum(count * pair.mu**2 for pair, count in pairs if pair.mu is not None))
    sampled = [(pair, count) for pair, count in pairs if pair.mu is None]
    if not sampled:
        return mu, ()
    # All rounds without sampling are one Gaussian round.
    gaussian = (PositiveLossPart(MixturePair.REMOVE, 1.0, mu),)
    first: Rounds = ((Direction(gaussian, gaussian), 1),) if mu > 0 else ()
    number = max(len(pair.directions) for pair, _ in sampled)
    each = (tuple((pair.directions[i % len(pair.directions)], n) for pair, n in sampled) for i in range(number))
    return mu, tuple((*first, *rounds) for rounds in each)


def _total_curve(events: Events, relation: Relation, orders: tuple[float, ...]) -> Array:
    total = np.zeros(len(orders))
    for event, count in events:
        total += count * renyi_curve(event, relation, orders)
    return total
