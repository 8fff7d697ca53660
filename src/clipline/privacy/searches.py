"""The edge of what is private along one number: the least noise, or the most rounds or users.

A search is given bounds on epsilon from the cheapest to the dearest, each at or below the one before. What is private
by one of them is private by all that follow, so that each takes over where the one before left off, on the private
side, and the dearest, which has the last word, is asked a few times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Bound = Callable[[float], float]
WholeBound = Callable[[int], float]

_FURTHEST = 4.0  # one step changes a number by no more than this factor
_CLOSEST = 1e-6  # two noise multipliers, relative, between which no search goes on
_SLACKS = (0.1, 1e-3)  # how far below the target, relative, the first bound and later ones but the last may be left
_SPREADS = (0.5, 2e-4)  # the same for whole numbers, as the room left between the numbers themselves


def least_private(bounds: Sequence[Bound], epsilon: float, high: float, least: float, slack: float) -> float:
    """The least number, from `least` to `high`, whose epsilon by the last bound is at most `epsilon`.

    Epsilon falls as the number grows, and at `high` it is private. Ends within `slack`, relative, of `epsilon`, or at
    `least`.
    """
    power = 3.0  # of the noise that epsilon falls with, about, until two points say it better
    for index, bound in enumerate(bounds):
        last = index == len(bounds) - 1
        high, power = _descend(bound, epsilon, high, least, slack if last else _SLACKS[min(index, 1)], power)
    return high


def _descend(
    bound: Bound, epsilon: float, high: float, least: float, slack: float, power: float
) -> tuple[float, float]:
    """A lower number that is private by this bound, if `high` is, and the power law around it."""
    aim, value = epsilon * (1 - slack / 2), bound(high)
    while value < epsilon * (1 - slack) and high > least:
        step = min((aim / max(value, 1e-300)) ** (1 / power), _FURTHEST)
        low = max(high / step, least)
        if low == high:  # closer than numbers are to each other
            break
        below = bound(low)
        if below > epsilon:
            return _edge(bound, epsilon, (low, below), (high, value), slack)
        if below > value > 0 and low < high:
            power = min(max(math.log(below / value) / math.log(high / low), 0.2), 50.0)
        high, value = low, below
    return high, power


def _edge(
    bound: Bound, epsilon: float, outside: tuple[float, float], inside: tuple[float, float], slack: float
) -> tuple[float, float]:
    """Between a number that is not private and one that is, each with its epsilon: one that is, within `slack`.

    By secants through the two points nearest to the target, on logarithms, since epsilon is not far from a power law.
    After the fourth every second step halves, and it ends when the two are as close as `_CLOSEST`: a curve that jumps
    over the target is left on the private side of the jump, within some forty steps. Also returns the power.
    """
    aim = epsilon * (1 - slack / 2)
    (low, _), (high, above) = outside, inside
    points = [(math.log(x), math.log(min(max(y, 1e-300), 1e300) / aim)) for x, y in (outside, inside)]
    for turn in range(1, 61):
        (x, error), (other, other_error) = sorted(points, key=lambda point: abs(point[1]))[:2]
        if above >= epsilon * (1 - slack) or high <= low * (1 + _CLOSEST):
            break
        middle = 0.5 * (math.log(low) + math.log(high))
        if (turn < 4 or turn % 2) and error != other_error:
            guess = x - error * (other - x) / (other_error - error)
            middle = guess if math.log(low) < guess < math.log(high) else middle
        value = bound(math.exp(middle))
        points.append((middle, math.log(min(max(value, 1e-300), 1e300) / aim)))
        if value <= epsilon:
            high, above = math.exp(middle), value
        else:
            low = math.exp(middle)
    power = (error - other_error) / (other - x) if other != x else 3.0
    return high, min(max(power, 0.2), 50.0)


def most_within(bounds: Sequence[WholeBound], epsilon: float, first: int, last: int) -> int:
    """The last whole number from `first` to `last` whose epsilon by the last bound is at most `epsilon`.

    Epsilon grows with the number, which may be negative. `first - 1` if there is none.
    """
    if all(bound(first) > epsilon for bound in bounds):
        return first - 1
    enough, slope = first, 0.0  # how much epsilon grows with one more
    for index, bound in enumerate(bounds):
        if (value := bound(enough)) > epsilon:
            continue
        stride = 3 * abs(enough)
        if slope > 0:
            stride = min(stride, math.floor(1.1 * (epsilon - value) / slope))
        too_many = min(enough + max(stride, 1), last)
        while (above := bound(too_many)) <= epsilon:
            if too_many == last:
                return last
            stride = 3 * max(stride, 1)
            enough, value, too_many = too_many, above, min(too_many + stride, last)
        spread = 0.0 if index == len(bounds) - 1 else _SPREADS[min(index, 1)]
        enough, slope = _most(bound, epsilon, (enough, value), (too_many, above), spread)
    return enough


def _most(
    bound: WholeBound, epsilon: float, inside: tuple[int, float], outside: tuple[int, float], spread: float
) -> tuple[int, float]:
    """The last number within epsilon, but for `spread` of it, between one that is and one that is not; and the slope.

    By regula falsi; every third step halves.
    """
    (enough, below), (too_many, above) = inside, outside
    for turn in range(200):
        if too_many - enough <= max(1, spread * abs(enough)):
            break
        middle = (enough + too_many) // 2
        if turn % 3 < 2 and math.isfinite(above) and above > below:
            guess = enough + (epsilon - below) / (above - below) * (too_many - enough)
            # One step to the side that would end the search if the guess is right.
            middle = min(max(math.floor(guess) + turn % 3, enough + 1), too_many - 1)
        value = bound(middle)
        if value <= epsilon:
            enough, below = middle, value
        else:
            too_many, above = middle, value
    return enough, (above - below) / (too_many - enough) if math.isfinite(above) else 0.0
