"""Banded noise: noise of several rounds that cancels in the sum of their releases, at the same privacy.

A model is the sum of all releases so far. Independent noise adds up in it, and banded noise hardly does. With `bands`
b = 1 it is independent. In units of the noise of a round, with xi_t independent standard normal vectors,

    x_t = (xi_t - c_1 x_(t-1) - ... - c_(b-1) x_(t-b+1)) / c_0,      c_0^2 + ... + c_(b-1)^2 = 1

is the noise of round t: x = C^-1 xi, where C is lower triangular, banded and Toeplitz. A user may take part in rounds b
apart only, and so users are drawn from groups (docs: proofs.md has the theorem). That asks for a larger noise
multiplier, as groups are smaller than the population; more bands cancel more. `choose_bands` finds the balance.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import numpy as np

from ..errors import check_whole, refuse
from .calibration import quick_noise_multiplier_for, rough_noise_multiplier_for
from .events import sampling_named
from .numerics import Array
from .relations import Relation

MOST_ROUNDS = 1 << 16  # that coefficients are computed for
_BANDS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # to choose from; more would take more memory than they gain
_EMPTY = 1e-6  # a number of groups that leaves one empty with a chance above this is refused
_DIVERGED = 1e100  # noise of coefficients that the search only passes by
_GAIN = 0.995  # more bands take more memory: the noise on the models has to fall to this share
_FIRST = 4  # the place in _BANDS where the search begins


@lru_cache(maxsize=256)
def band_coefficients(rounds: int, bands: int) -> tuple[float, ...]:
    """c_0 to c_(b-1): of all with sum of squares 1, those of the least mean squared noise on the models of the rounds.

    Models of all rounds count alike, and each is the sum of the releases so far.
    """
    check_whole("rounds", rounds, at_least=1, at_most=MOST_ROUNDS, way_out="more rounds need independent noise")
    check_whole("bands", bands, at_least=1, at_most=rounds, way_out="take fewer bands, there is no use for more")
    if bands == 1:
        return (1.0,)
    from scipy.optimize import minimize

    weights = np.arange(rounds, 0, -1) / rounds  # the share of models that hold the noise of this round

    def loss(others: Array) -> tuple[float, Array]:
        coefficients = np.concatenate([[1.0], others])
        noise = _solved(coefficients, np.ones(rounds))  # C^-1 1: noise xi_s counts noise_(t-s) times in model t
        if np.abs(noise).max() > _DIVERGED:
            return _DIVERGED, np.zeros(bands - 1)
        size, error = coefficients @ coefficients, (weights * noise) @ noise
        back = _solved(coefficients, weights * noise, transposed=True)
        slope = [back[lag:] @ noise[: rounds - lag] for lag in range(1, bands)]
        return float(size * error), 2 * others * error - 2 * size * np.array(slope)

    lags = np.arange(1, bands)
    start = np.cumprod((2 * lags - 1) / (2 * lags))  # of the square root of the prefix sums: the best without bands
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": 0, "gtol": 1e-12, "maxiter": 1000})
    coefficients = np.concatenate([[1.0], found.x])
    return tuple((coefficients / math.sqrt(coefficients @ coefficients)).tolist())


@lru_cache(maxsize=256)
def inverse_coefficients(rounds: int, bands: int) -> Array:
    """(rounds,) d_k: round t's noise is the sum of d_k xi_(t-k). Read-only."""
    inverse = _solved(np.array(band_coefficients(rounds, bands)), np.eye(1, rounds)[0])
    inverse.flags.writeable = False
    return inverse


def model_noise(rounds: int, bands: int) -> float:
    """Root mean square of a coordinate's noise over the models of all rounds, in units of the noise of a round."""
    noise = np.cumsum(inverse_coefficients(rounds, bands))
    return math.sqrt(np.mean(np.cumsum(noise**2)))


def lasting_share(rounds: int, bands: int) -> float:
    """What banded noise leaves in the models: independent noise smaller by this factor would leave as much."""
    return 1.0 if bands == 1 else model_noise(rounds, bands) / model_noise(rounds, 1)


def check_bands(bands: int, cohort_size: int, population_size: int) -> None:
    """Refuse groups that are too small for the cohort, or so small that one may be empty: by public numbers alone."""
    check_whole("bands", bands, at_least=1, way_out="give a number of groups such as 8, or bands='auto'")
    if not _fits(bands, cohort_size, population_size):
        most = max(number for number in range(1, bands) if _fits(number, cohort_size, population_size))
        limit = f"at most {most}: a group of {population_size} / bands users must hold cohort_size={cohort_size}"
        raise refuse("bands", bands, limit + " and may not be empty", "take fewer bands or a smaller cohort")


def _fits(bands: int, cohort_size: int, population_size: int) -> bool:
    whole = bands * cohort_size <= population_size
    return bands == 1 or (whole and bands * math.exp(-population_size / bands) <= _EMPTY)


def choose_bands(
    *, cohort_size: int, population_size: int, rounds: int, epsilon: float, delta: float, relation: Relation
) -> int:
    """The number of bands with the least noise on the models; 1, independent noise, where more gain nothing."""
    return bands_and_noise(cohort_size, population_size, rounds, epsilon, delta, relation)[0]


def bands_and_noise(
    cohort_size: int, population_size: int, rounds: int, epsilon: float, delta: float, relation: Relation
) -> tuple[int, float, float]:
    """`choose_bands`, the noise multiplier that these bands need, and that of independent noise; by the rough bound.

    The quick bound, by which bands are compared, is too far off to tell few bands from none.
    """

    def multiplier(bands: int, bound: Callable[..., float]) -> float:
        sampling = sampling_named("poisson", cohort_size, population_size, bands)
        return bound(sampling=sampling, rounds=rounds, epsilon=epsilon, delta=delta, relation=relation)

    choice = (
        [1]
        if rounds > MOST_ROUNDS
        else [bands for bands in _BANDS if bands <= rounds and _fits(bands, cohort_size, population_size)]
    )

    @cache
    def noise(place: int) -> float:
        if not 0 <= place < len(choice):
            return math.inf
        return multiplier(choice[place], quick_noise_multiplier_for) * lasting_share(rounds, choice[place])

    # Down or up from here: the noise falls up to the best and rises after it, but for a step where rounds / bands is
    # rounded up.
    place = min(_FIRST, len(choice) - 1)
    while _GAIN * noise(fewer := min(place - 1, place - 2, key=noise)) <= noise(place):
        place = fewer
    while noise(more := min(place + 1, place + 2, key=noise)) < _GAIN * noise(place):
        place = more
    best = choice[place]
    alone = multiplier(1, rough_noise_multiplier_for)
    z = alone if best == 1 else multiplier(best, rough_noise_multiplier_for)
    if z * lasting_share(rounds, best) > _GAIN * alone:
        return 1, alone, alone
    return best, z, alone


def _solved(coefficients: Array, values: Array, transposed: bool = False) -> Array:
    """C^-1 values, or C^-T values."""
    from scipy.linalg.lapack import dtbtrs

    band = np.repeat(coefficients[:, None], len(values), axis=1)
    solved: Array = dtbtrs(band, values, uplo="L", trans="T" if transposed else "N")[0]
    return solved
