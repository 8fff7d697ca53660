"""What discrete Gaussian noise on a sum of whole numbers costs, as an event of the Gaussian mechanism.

A discrete Gaussian of deviation sigma is not covered by the normal one of the same deviation: its delta can be larger.
It is covered by the normal one of deviation sqrt(sigma^2 - 4). Rounding that one at random, to discrete Gaussians of
deviation 2 around it, gives the discrete one of deviation sigma but for a factor of 1 +- 1e-34 (federation.md has
the proof). Whatever holds for a normal release then holds for this one: sampling, relations, many rounds.

If clients add the noise, each adds a share. The sum of the shares is nearly a discrete Gaussian itself: see
`sum_of_shares_log_ratio`. A share is made for the least number of honest clients who send one, which is declared.
"""

from __future__ import annotations

import math

from ..errors import check_number, check_whole, refuse
from .events import GaussianEvent, Sampling

SMALLEST_STDDEV = 2.5  # of the noise, and of a share of it
_WIDTH = 2.0  # deviation of the random rounding
_ROUNDING = 2 * sum(math.exp(-2 * math.pi**2 * _WIDTH**2 * k * k) for k in (1, 2))  # e of federation.md; 1.1e-34


def discrete_event(sampling: Sampling, *, stddev: float, bound: float, dim: int, shares: int = 1) -> GaussianEvent:
    """The event of a sum of `dim` whole numbers with discrete Gaussian noise of deviation `stddev` on each.

    `bound` is the largest norm of one user's vector of whole numbers. `shares` is how many clients at least have made
    the noise together, each with a share of `share_stddev`; 1 if the server made it.
    """
    check_number("bound", bound, above=0, way_out="give the largest norm of one user's encoded vector")
    check_whole("dim", dim, at_least=1, way_out="give the number of coordinates")
    if shares != 1:
        share_stddev(stddev, shares)  # refuses too small ones
    return GaussianEvent(
        sampling,
        math.sqrt(check_stddev(stddev) ** 2 - _WIDTH**2) / bound * (1 - 1e-15),
        log_ratio=dim * (2 * _ROUNDING + sum_of_shares_log_ratio(stddev, shares)),
    )


def stddev_for(noise_multiplier: float, bound: float) -> float:
    """The deviation whose event has this `noise_multiplier` at least, for vectors of norm `bound` at most."""
    return math.hypot(noise_multiplier * bound * (1 + 1e-14), _WIDTH)


def bound_for(noise_multiplier: float, stddev: float) -> float:
    """The largest norm of one user's vector for which noise of `stddev` has an event of this `noise_multiplier`."""
    return math.sqrt(check_stddev(stddev) ** 2 - _WIDTH**2) / noise_multiplier * (1 - 1e-14)


def share_stddev(stddev: float, survivors: int) -> float:
    """The deviation of each client's share if `survivors` honest shares are to have `stddev` together.

    `survivors` is the declared least number of them, never the number expected: with fewer the noise is too small.
    """
    check_whole("survivors", survivors, at_least=1, way_out="give the least number of honest clients of a round")
    share = check_stddev(stddev) / math.sqrt(survivors)
    if share < SMALLEST_STDDEV:
        raise refuse(
            "stddev of a share", f"{share:.3g}", f"at least {SMALLEST_STDDEV}: smaller shares do not add up to a "
            "discrete Gaussian", "take more bits, which allow more noise on finer numbers",
        )  # fmt: skip
    return share * (1 + 1e-15)


def sum_of_shares_log_ratio(stddev: float, shares: int) -> float:
    """How far, in logarithms, a number's probability may be from the discrete Gaussian's, for a sum of equal shares.

    Kairouz, Liu and Steinke (2021): 10 sum over k < shares of exp(-2 pi^2 s^2 k / (k + 1)), s the deviation of a share.
    """
    share = stddev / math.sqrt(shares)
    first = [math.exp(-2 * math.pi**2 * share**2 * k / (k + 1)) for k in range(1, min(shares, 100))]
    rest = max(shares - 100, 0) * math.exp(-2 * math.pi**2 * share**2 * 100 / 101)  # each further term is smaller
    return 10 * (math.fsum(first) + rest)


def check_stddev(stddev: float) -> float:
    """A deviation for which the bound above is good."""
    way_out = "take more bits, which allow more noise on finer numbers"
    return check_number("stddev of discrete noise", stddev, at_least=SMALLEST_STDDEV, way_out=way_out)
