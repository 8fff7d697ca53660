"""What one user trains on in a round, step by step, and what makes such a training fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..federated.local_sgd import Batch


@dataclass(frozen=True, eq=False)
class UserSteps:
    """What one user trains on."""

    params: Tensor
    examples: Batch
    batches: Sequence[Tensor]  # of each step: which of the user's examples
    random_keys: Tensor
    lr: float
    personal: Tensor  # (personal,): what the user starts from, and what came of it


def check_finite_loss(marker: Tensor) -> None:
    """A user whose loss is not finite fails: some of torch's gradients at NaN depend on memory alignment."""
    if bool(marker.isnan()):
        raise FloatingPointError("the loss is not a finite number")
