"""Pachinko allocation: examples with coarse and fine labels become users with tastes (Reddi et al. 2021, appendix F).

CIFAR-100 has no users. Each user draws a taste for the 20 coarse labels, Dirichlet 0.1, and for the 5 fine labels in
each, Dirichlet 10; then example after example falls through the coarse to the fine label and takes one image of it,
without replacement. A label that has run out is removed, and the tastes of those who come later are scaled up.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import PopulationError

COARSE_CONCENTRATION = 0.1
FINE_CONCENTRATION = 10.0

Whole = NDArray[np.int64]


def pachinko_labels(
    counts: Whole, coarse_of_fine: Whole, users: int, examples_per_user: int, rng: np.random.Generator
) -> Whole:
    """Fine labels (users, examples_per_user), with no label taken more than `counts[label]` times.

    A user whose tastes are all used up, or so small that they vanish in float64, takes evenly of what is left.
    """
    left = np.array(counts, np.int64)
    if users * examples_per_user > left.sum():
        raise PopulationError(
            f"{users} users of {examples_per_user} examples need {users * examples_per_user} but there are "
            f"{left.sum()}: give fewer users, or fewer examples to each"
        )
    groups = [np.flatnonzero(coarse_of_fine == coarse) for coarse in range(int(coarse_of_fine.max()) + 1)]
    stock = np.array([left[group].sum() for group in groups])
    out = np.empty((users, examples_per_user), np.int64)
    for user in range(users):
        taste = rng.dirichlet(np.full(len(groups), COARSE_CONCENTRATION))
        fine_tastes = [rng.dirichlet(np.full(len(group), FINE_CONCENTRATION)) for group in groups]
        coarse_ends = _ends(taste, stock)
        fine_ends = [_ends(fine, left[group]) for fine, group in zip(fine_tastes, groups, strict=True)]
        aims = rng.random((examples_per_user, 2))
        for example in range(examples_per_user):
            coarse = int(np.searchsorted(coarse_ends, aims[example, 0], side="right"))
            place = int(np.searchsorted(fine_ends[coarse], aims[example, 1], side="right"))
            label = groups[coarse][place]
            out[user, example] = label
            left[label] -= 1
            stock[coarse] -= 1
            if left[label] == 0:
                fine_ends[coarse] = _ends(fine_tastes[coarse], left[groups[coarse]])
            if stock[coarse] == 0:
                coarse_ends = _ends(taste, stock)
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


def _ends(taste: NDArray[np.float64], left: Whole) -> NDArray[np.float64]:
    """Running totals of the taste for what is left, scaled so that every aim in [0, 1) falls on something left."""
    weights = np.where(left > 0, taste, 0.0)
    if not weights.sum() > 0:
        weights = (left > 0).astype(np.float64)
    ends: NDArray[np.float64] = np.cumsum(weights)
    if ends[-1] > 0:
        ends /= ends[-1]
        ends[np.flatnonzero(weights)[-1] :] = 1.0  # rounding must not leave a gap before 1
    return ends
