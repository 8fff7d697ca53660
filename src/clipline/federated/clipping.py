"""Clip updates to a ball, and add them up into the one private sum of a round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..engine.updates import Dense, Updates
from ..privacy.events import Sampling
from .sampling import Cohort

_MARGIN = 4096  # roundings that a clipped row is kept below the clip: more than a norm, added up in pairs, is off by


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """A sum over users: PRIVATE. Only a mechanism may look inside, and only to turn it into a `Release`."""

    total: Tensor = field(repr=False)  # (dim + 1,) float64: the summed updates, then the sum of (within - 1/2)
    bound: float  # the clip that clipped: no user's update in the sum is longer
    sampling: Sampling  # how the users were chosen


def aggregate(
    blocks: Iterable[Updates], clip: float, cohort: Cohort, dim: int, device: torch.device | str = "cpu"
) -> ClippedSum:
    """Clip and add blocks of updates. An empty cohort gives a sum of zeros.

    The bit travels as one more coordinate of the update, centred by 1/2, so that adding or removing a user moves it by
    1/2 and whatever hides the update hides the bit. The sum is that of `join_bit(*clip_rows(...))`, block by block,
    without ever holding the clipped rows.
    """
    total = torch.empty(dim + 1, dtype=torch.float64, device=device)
    return ClippedSum(part_of_sum(blocks, clip, total), clip, cohort.sampling)


def part_of_sum(blocks: Iterable[Updates], clip: float, total: Tensor) -> Tensor:
    """What these users add to a `ClippedSum`, in `total` (dim + 1,) float64: PRIVATE, for whoever adds up the parts."""
    total.zero_()
    dim = len(total) - 1
    for updates in blocks:
        scale, within = clip_factors(updates.norms(), clip)
        updates.add_to(total[:dim], scale)
        total[dim] += within.sum() - len(updates) / 2
    return total


def clip_factors(norms: Tensor, clip: float | Tensor) -> tuple[Tensor, Tensor]:
    """What to multiply updates of these norms (users,) float64 with, and which were within the clip, or each its own.

    Exactly 1 within the clip; otherwise the product ends a few roundings below the clip, never above; 0 for a norm that
    is not finite, which is not within.
    """
    double = torch.finfo(torch.float64)
    within = norms <= (clip.clamp(max=double.max) if isinstance(clip, Tensor) else min(clip, double.max))
    just_inside = clip * (1 - _MARGIN * double.eps)
    # Anything finite over infinity is 0. What is no number becomes 0, and so does what a tiny norm would make infinite.
    return (just_inside / norms).nan_to_num_(nan=0.0, posinf=0.0).masked_fill_(within, 1.0), within


def clip_rows(deltas: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Scale each row so that its norm is at most `clip`; say which were within: (users, dim) float64, (users,) bool.

    A row already within is unchanged; a zero row stays zero; a row that is not finite becomes zero and is not within.
    All of it is in float64, whatever the model's type: in float32 the factor for a huge row is rounded so coarsely that
    the row could end above the clip.
    """
    scale, within = clip_factors(Updates([Dense(0, deltas)]).norms(), clip)
    clipped = torch.where(scale.unsqueeze(1) > 0, deltas.double() * scale.unsqueeze(1), 0.0)
    return clipped, within


def join_bit(clipped: Tensor, within: Tensor) -> Tensor:
    """Update and centred bit as one vector a user: (users, dim + 1)."""
    return torch.cat([clipped, within.to(clipped.dtype).unsqueeze(1) - 0.5], dim=1)
