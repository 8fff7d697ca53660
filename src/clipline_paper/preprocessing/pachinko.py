"""Pachinko allocation: labelled examples without users are assigned to users (Reddi et al. 2021, appendix F).

CIFAR-100 has no users. Each user draws a mixture of the 20 coarse labels, Dirichlet 0.1, and of the 5 fine labels in
each, Dirichlet 10. For each example the user draws a coarse label, then a fine one, and takes an image of it without
replacement. A label that has run out is removed, and the other weights are scaled up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from clipline.errors import PopulationError

COARSE_CONCENTRATION = 0.1
FINE_CONCENTRATION = 10.0

Whole = NDArray[np.int64]


def pachinko_labels(
    counts: Whole, coarse_of_fine: Whole, users: int, examples_per_user: int, rng: np.random.Generator
) -> Whole:
    """Fine labels (users, examples_per_user), with no label taken more than `counts[label]` times.

    A user whose labels have all run out, or whose other weights vanish in float64, draws evenly from what is left.
    """
    left = np.array(counts, np.int64)
    if users * examples_per_user > left.sum():
        raise PopulationError(
            f"{users} users of {examples_per_user} examples need {users * examples_per_user} but there are "
            f"{left.sum()}: give fewer users, or fewer examples to each"
        )
    groups = [np.flatnonzero(coarse_of_fine == coarse) for coarse in range(int(coarse_of_fine.max()) + 1)]
    left_of_coarse = np.array([left[group].sum() for group in groups])
    out = np.empty((users, examples_per_user), np.int64)
    for user in range(users):
        mixture = rng.dirichlet(np.full(len(groups), COARSE_CONCENTRATION))
        fine_mixtures = [rng.dirichlet(np.full(len(group), FINE_CONCENTRATION)) for group in groups]
        coarse_totals = _cumulative(mixture, left_of_coarse)
        fine_totals = [_cumulative(fine, left[group]) for fine, group in zip(fine_mixtures, groups, strict=True)]
        draws = rng.random((examples_per_user, 2))
        for example in range(examples_per_user):
            coarse = int(np.searchsorted(coarse_totals, draws[example, 0], side="right"))
            place = int(np.searchsorted(fine_totals[coarse], draws[example, 1], side="right"))
            label = groups[coarse][place]
            out[user, example] = label
            left[label] -= 1
            left_of_coarse[coarse] -= 1
            if left[label] == 0:
                fine_totals[coarse] = _cumulative(fine_mixtures[coarse], left[groups[coarse]])
            if left_of_coarse[coarse] == 0:
                coarse_totals = _cumulative(mixture, left_of_coarse)
    return out


def pachinko_split(
    labels: Whole, coarse_of_fine: Whole, users: int, examples_per_user: int, rng: np.random.Generator
) -> Whole:
    """Rows (users, examples_per_user) of the data set with these fine labels; no row is given twice."""
    fine = len(coarse_of_fine)
    chosen = pachinko_labels(np.bincount(labels, minlength=fine), coarse_of_fine, users, examples_per_user, rng)
    rows = np.empty(chosen.shape, np.int64)
    for label in range(fine):
        takers = np.flatnonzero(chosen.ravel() == label)
        rows.ravel()[takers] = rng.permutation(np.flatnonzero(labels == label))[: len(takers)]
    return rows


def _cumulative(mixture: NDArray[np.float64], left: Whole) -> NDArray[np.float64]:
    """Cumulative weights of the labels that are left, scaled so that every draw in [0, 1) falls on one of them."""
    weights = np.where(left > 0, mixture, 0.0)
    if not weights.sum() > 0:
        weights = (left > 0).astype(np.float64)
    totals: NDArray[np.float64] = np.cumsum(weights)
    if totals[-1] > 0:
        totals /= totals[-1]
        totals[np.flatnonzero(weights)[-1] :] = 1.0  # rounding must not leave a gap before 1
    return totals
