"""Theorem 1: the round's noise multiplier, divided between the summed updates and the count of bits.

In units of its noise, one user moves the sum of updates by at most 1 / delta_noise_multiplier and the count by at most
bit_bound / count_stddev. Both releases together are as private as one Gaussian with

    noise_multiplier^-2 = delta_noise_multiplier^-2 + (bit_bound / count_stddev)^2

`bit_bound` is how far one user moves the count, and depends on what is subtracted from each bit before the sum:

    1/2                        within - 1/2, what this library releases
    1                          within itself; the sum also reveals the size of the cohort, which under Poisson sampling
                               is secret
    max(quantile, 1-quantile)  within - quantile; the clip then settles at the right quantile even if the divisor is
                               wrong

Under replace-one both parts move by twice as much, whatever is subtracted. The split is the same; the accountant halves
the noise multiplier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import check_number, refuse

CENTRED = 0.5
PAPERS_SHARE = 20  # the paper's count_stddev is cohort_size / 20
_PAPERS_COST = 0.01  # more noise on the updates than this: the paper's choice does not fit


@dataclass(frozen=True, order=True)
class DeltaNoise:
    """The noise multiplier of the summed updates alone (z_delta): noise is drawn with it, but it is never accounted.

    It is not a number, so that it cannot be passed to the accountant by mistake. `float(...)` gives the number.
    """

    multiplier: float

    def __float__(self) -> float:
        return float(self.multiplier)


def split_noise(noise_multiplier: float, count_stddev: float, *, bit_bound: float = CENTRED) -> DeltaNoise:
    """The noise on the updates that leaves the whole round at `noise_multiplier`.

    Zero gives zero whatever `count_stddev` is: a round without privacy needs no noise. An infinite `count_stddev`
    stands for a round that releases no bit, and returns `noise_multiplier` unchanged. A `noise_multiplier` of
    `count_stddev / bit_bound` or more is refused: the bit alone would reveal more than the round may, whatever the
    noise on the updates.
    """
    z = check_number("noise_multiplier", noise_multiplier, at_least=0, way_out="give a multiplier such as 1.0")
    limit = _bit_noise_multiplier(count_stddev, bit_bound)
    if z == 0:
        return DeltaNoise(0.0)
    if z >= limit:
        way_out = "raise count_stddev or cohort_size, or lower noise_multiplier"
        raise refuse("noise_multiplier", noise_multiplier, f"below count_stddev / bit_bound = {limit:g}", way_out)
    share = z / limit
    # Written as a product: the difference of inverse squares would lose its digits when the bit has far more noise than
    # the updates.
    return DeltaNoise(z / math.sqrt((1 - share) * (1 + share)))


def default_count_stddev(cohort_size: int, noise_multiplier: float) -> float:
    """The noise on the count, in users, where nobody chose it; it suits every cohort and every noise multiplier.

    The paper's cohort_size / 20 (section 2.1) where it raises the noise on the updates by at most 1%, as in all of the
    paper's experiments. Otherwise the one of least total noise (docs/explanation/proofs.md). More noise on the count
    leaves the updates less, but makes the clip wander, and the updates' noise is in proportion to the clip.
    """
    z = check_number("noise_multiplier", noise_multiplier, at_least=0, way_out="give a multiplier such as 1.0")
    papers = cohort_size / PAPERS_SHARE if z > 0 else 0.0
    if z == 0 or counting_cost(z, papers) <= _PAPERS_COST:
        return papers
    return math.sqrt(z * (z + math.hypot(z, math.sqrt(32) * cohort_size)) / 8)


def counting_cost(noise_multiplier: float, count_stddev: float) -> float:
    """How much more noise the updates get because the count is released too: 0.005 is half a percent.

    Infinite where the count alone would reveal more than the round may, so that no noise on the updates helps.
    """
    if noise_multiplier >= _bit_noise_multiplier(count_stddev, CENTRED):
        return math.inf if noise_multiplier > 0 else 0.0
    return float(split_noise(noise_multiplier, count_stddev)) / noise_multiplier - 1 if noise_multiplier > 0 else 0.0


def join_noise(delta_noise: DeltaNoise, count_stddev: float, *, bit_bound: float = CENTRED) -> float:
    """The `noise_multiplier` of a round whose updates and bit carry these two noises: the inverse of `split_noise`.

    Zero if either noise is zero, since that part of the release then hides nothing.
    """
    if not isinstance(delta_noise, DeltaNoise):
        raise refuse("delta_noise", delta_noise, "a DeltaNoise", "wrap the multiplier of the updates: DeltaNoise(1.0)")
    z_delta = check_number(
        "delta_noise", delta_noise.multiplier, at_least=0, way_out="give a multiplier such as DeltaNoise(1.0)"
    )
    limit = _bit_noise_multiplier(count_stddev, bit_bound)
    return z_delta / math.hypot(1, z_delta / limit) if limit > 0 else 0.0


def _bit_noise_multiplier(count_stddev: float, bit_bound: float) -> float:
    """The noise multiplier of the count alone."""
    bound = check_number("bit_bound", bit_bound, above=0, at_most=1, way_out="give 0.5 for centred bits, 1 for others")
    stddev = check_number(
        "count_stddev", count_stddev, at_least=0, infinite=True, way_out="give cohort_size / 20, as the paper does"
    )
    return stddev / bound
