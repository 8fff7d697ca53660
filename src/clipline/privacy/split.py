"""Theorem 1: the round's noise multiplier, divided between the summed updates and the count of bits.

In units of its noise, one user moves the sum of updates by at most 1 / delta_noise_multiplier and the count by at most
bit_bound / count_stddev. Both releases together are as private as one Gaussian with

    noise_multiplier^-2 = delta_noise_multiplier^-2 + (bit_bound / count_stddev)^2

`bit_bound` is how far one user moves the count: 1/2 when each bit is centred (within - 1/2) before the sum, 1 when it
is not. An uncentred sum also reveals the size of the cohort, which under Poisson sampling is secret.
"""

from __future__ import annotations

import math

from ..errors import check_number, refuse


def split_noise(noise_multiplier: float, count_stddev: float, *, bit_bound: float = 0.5) -> float:
    """The `delta_noise_multiplier` that leaves the whole round at `noise_multiplier`.

    Zero gives zero whatever `count_stddev` is: a round without privacy needs no noise. An infinite `count_stddev`
    stands for a round that releases no bit, and gives `noise_multiplier` back. From `count_stddev / bit_bound` on the
    bit alone reveals more than the round may, and no noise on the updates can make up for it: that is refused.
    """
    z = check_number("noise_multiplier", noise_multiplier, at_least=0, way_out="give a multiplier such as 1.0")
    limit = _bit_noise_multiplier(count_stddev, bit_bound)
    if z == 0:
        return 0.0
    if z >= limit:
        raise refuse(
            "noise_multiplier",
            noise_multiplier,
            f"below count_stddev / bit_bound = {limit:g}",
            "raise count_stddev or cohort_size, or lower noise_multiplier",
        )
    share = z / limit
    # The difference of inverse squares would cancel to nothing when the bit has far more noise than the updates.
    return z / math.sqrt((1 - share) * (1 + share))


def join_noise(delta_noise_multiplier: float, count_stddev: float, *, bit_bound: float = 0.5) -> float:
    """The `noise_multiplier` of a round whose updates and bit carry these two noises: the inverse of `split_noise`.

    Zero as soon as either noise is zero, since that part of the release then hides nothing.
    """
    z_delta = check_number(
        "delta_noise_multiplier", delta_noise_multiplier, at_least=0, way_out="give a multiplier such as 1.0"
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
