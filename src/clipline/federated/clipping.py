"""Clip updates to a ball, and add them up into the one private sum of a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..privacy.events import Sampling
from .sampling import Cohort

_MARGIN = 64  # roundings that a clipped row is kept below the clip: more than a norm of any length accumulates


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """A sum over users: PRIVATE. Only a mechanism may look inside, and only to turn it into a `Release`."""

    total: Tensor = field(repr=False)  # (dim + 1,) float64: the summed updates, then the sum of (within - 1/2)
    bound: float  # the clip that clipped: no user's update in the sum is longer
    sampling: Sampling  # how the users were chosen


def aggregate(blocks: Iterable[Tensor], clip: float, cohort: Cohort, dim: int) -> ClippedSum:
    """Clip and add blocks of updates, each (users, dim). An empty cohort gives a sum of zeros.

    The bit travels as one more coordinate of the update, centred by 1/2, so that adding or removing a user moves it by
    1/2 and whatever hides the update hides the bit.
    """
    total: Tensor | None = None
    for deltas in blocks:
        block = join_bit(*clip_rows(deltas, clip)).sum(dim=0, dtype=torch.float64)
        total = block if total is None else total + block
    if total is None:
        total = torch.zeros(dim + 1, dtype=torch.float64)
    return ClippedSum(total, clip, cohort.sampling)


def clip_rows(deltas: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Scale each row so that its norm is at most `clip`; say which were within: (users, dim) float64, (users,) bool.

    A row already within is unchanged; a zero row stays zero; a row that is not finite becomes zero and is not within.
    All of it is in float64, whatever the model's type: in float32 the factor for a huge row is rounded so coarsely that
    the row could end above the clip. A scaled row ends a few roundings below the clip, never above.
    """
    rows = deltas.double()
    # The norm of a row that is divided by its greatest entry neither overflows nor underflows.
    greatest = rows.abs().amax(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    norms = greatest * torch.linalg.vector_norm(rows / greatest.unsqueeze(1), dim=1)
    finite = norms.isfinite()
    within = norms <= clip  # NaN <= clip is false
    just_inside = clip * (1 - _MARGIN * torch.finfo(torch.float64).eps)
    scale = torch.where(within, 1.0, just_inside / norms)
    clipped = rows * scale.unsqueeze(1)
    if not bool(finite.all()):
        clipped = torch.where(finite.unsqueeze(1), clipped, 0.0)
        within = within & finite
    return clipped, within


def join_bit(clipped: Tensor, within: Tensor) -> Tensor:
    """Update and centred bit as one vector a user: (users, dim + 1)."""
    return torch.cat([clipped, within.to(clipped.dtype).unsqueeze(1) - 0.5], dim=1)
