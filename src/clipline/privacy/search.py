"""Where a monotone function of one number crosses a target: the least noise, or the most rounds or users.

The function (epsilon) is expensive, so a search is given several upper bounds on it, from the cheapest to the most
expensive one, each at or below the one before; the last is the function itself. What is within the target by one bound
is within it by all that follow. Each bound therefore starts where the one before ended, on the side that meets the
target, and the expensive ones are evaluated a few times only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Bound = Callable[[float], float]
WholeBound = Callable[[int], float]

_MAX_FACTOR = 4.0  # one step changes a number by no more than this factor
_RESOLUTION = 1e-6  # the search ends when its two ends are this close, relative
_SLACKS = (0.1, 1e-3)  # how far below the target, relative, the first bound and later ones but the last may end
_SPREADS = (0.5, 2e-4)  # for whole numbers: how far apart, relative, the two ends may be left


def least_within(bounds: Sequence[Bound], target: float, high: float, least: float, slack: float) -> float:
    """The least number, from `least` to `high`, at which the last bound is at most `target`.

    The bounds fall as the number grows, and the last one meets the target at `high`. The answer meets it too. It is
    within `slack`, relative, of the target, unless it is `least` or a number a millionth lower does not meet it.
    """
    power = 3.0  # a first guess: the bounds fall about like number^-power
    for index, bound in enumerate(bounds):
        last = index == len(bounds) - 1
        high, power = _descend(bound, target, high, least, slack if last else _SLACKS[min(index, 1)], power)
    return high


def _descend(bound: Bound, target: float, high: float, least: float, slack: float, power: float) -> tuple[float, float]:
    """A lower number that meets the target by this bound, if `high` does, and the power law near it."""
    aim, value = target * (1 - slack / 2), bound(high)
    while value < target * (1 - slack) and high > least:
        step = min((aim / max(value, 1e-300)) ** (1 / power), _MAX_FACTOR)
        low = max(high / step, least)
        if low == high:  # the step is below float64 resolution
            break
        below = bound(low)
        if below > target:
            return _bracketed(bound, target, (low, below), (high, value), slack)
        if below > value > 0 and low < high:
            power = min(max(math.log(below / value) / math.log(high / low), 0.2), 50.0)
        high, value = low, below
    return high, power


def _bracketed(
    bound: Bound, target: float, outside: tuple[float, float], inside: tuple[float, float], slack: float
) -> tuple[float, float]:
    """A number that meets the target, within `slack`, between one that does not and one that does.

    By secants through the two points nearest to the target, on logarithms, since the bounds are nearly power laws. From
    the fourth step on every second step bisects, so that a curve which jumps over the target takes about forty steps.
    Also returns the power.
    """
    aim = target * (1 - slack / 2)
    (low, _), (high, above) = outside, inside
    points = [(math.log(x), math.log(min(max(y, 1e-300), 1e300) / aim)) for x, y in (outside, inside)]
    for turn in range(1, 61):
        (x, error), (other, other_error) = sorted(points, key=lambda point: abs(point[1]))[:2]
        if above >= target * (1 - slack) or high <= low * (1 + _RESOLUTION):
            break
        middle = 0.5 * (math.log(low) + math.log(high))
        if (turn < 4 or turn % 2) and error != other_error:
            guess = x - error * (other - x) / (other_error - error)
            middle = guess if math.log(low) < guess < math.log(high) else middle
        value = bound(math.exp(middle))
        points.append((middle, math.log(min(max(value, 1e-300), 1e300) / aim)))
        if value <= target:
            high, above = math.exp(middle), value
        else:
            low = math.exp(middle)
    power = (error - other_error) / (other - x) if other != x else 3.0
    return high, min(max(power, 0.2), 50.0)


def most_within(bounds: Sequence[WholeBound], target: float, first: int, last: int) -> int:
    """The last whole number from `first` to `last` at which the last bound is at most `target`.

    The bounds grow with the number, which may be negative. `first - 1` if there is none.
    """
    if all(bound(first) > target for bound in bounds):
        return first - 1
    enough, slope = first, 0.0  # slope: how much the bound grows from one number to the next
    for index, bound in enumerate(bounds):
        if (value := bound(enough)) > target:
            continue
        stride = 3 * abs(enough)
        if slope > 0:
            stride = min(stride, math.floor(1.1 * (target - value) / slope))
        too_many = min(enough + max(stride, 1), last)
        while (above := bound(too_many)) <= target:
            if too_many == last:
                return last
            stride = 3 * max(stride, 1)
            enough, value, too_many = too_many, above, min(too_many + stride, last)
        spread = 0.0 if index == len(bounds) - 1 else _SPREADS[min(index, 1)]
        enough, slope = _most(bound, target, (enough, value), (too_many, above), spread)
    return enough


def least_whole_within(bounds: Sequence[WholeBound], target: float, first: int, last: int) -> int | None:
    """The least whole number from `first` to `last` at which the last bound is at most `target`; None if there is none.

    The bounds fall as the number grows. It is doubled until a bound but the last one meets the target.
    """
    enough = first
    while all(bound(enough) > target for bound in bounds[:-1]):
        if enough == last:
            if bounds[-1](last) > target:
                return None
            break
        enough = min(2 * enough, last)
    # With signs reversed it is the greatest number.
    mirrored = [lambda down, bound=bound: bound(-down) for bound in bounds[1:]]
    return -most_within(mirrored, target, -enough, -first)


def _most(
    bound: WholeBound, target: float, inside: tuple[int, float], outside: tuple[int, float], spread: float
) -> tuple[int, float]:
    """The last number that meets the target, up to `spread` of it, between one that does and one that does not.

    By regula falsi; every third step bisects. Also returns the slope.
    """
    (enough, below), (too_many, above) = inside, outside
    for turn in range(200):
        if too_many - enough <= max(1, spread * abs(enough)):
            break
        middle = (enough + too_many) // 2
        if turn % 3 < 2 and math.isfinite(above) and above > below:
            guess = enough + (target - below) / (above - below) * (too_many - enough)
            # Try both neighbours of the guess in turn: if it is right, they end the search.
            middle = min(max(math.floor(guess) + turn % 3, enough + 1), too_many - 1)
        value = bound(middle)
        if value <= target:
            enough, below = middle, value
        else:
            too_many, above = middle, value
    return enough, (above - below) / (too_many - enough) if math.isfinite(above) else 0.0
