"""Finds a learning rate of users at which training on a device diverges, before anything is trained."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..federated.local_sgd import Batch, LocalSGD
from .value_ranges import loss_of_one

if TYPE_CHECKING:
    from .core.problem import Problem

_EXAMPLES = 8  # at most
_FAR = 1000.0  # times the loss before the step, or 1 if that is more: made-up examples are not scaled as yours are


class DivergingRateWarning(UserWarning):
    """One step of local SGD sends the loss on made-up examples up a thousandfold: the learning rate is far too high."""


def warn_of_rate(problem: Problem, made_up: Callable[[int], Batch]) -> None:
    """Warn if one step at the users' rate raises the loss on made-up examples a thousandfold, or makes it infinite.

    No data are read. Clipping hides such a rate: every update is cut to the clip, and most of them point nowhere. A
    rate that is too high by less is not found. Not for Adam or clipped gradients, whose steps the rate bounds.
    """
    local, model = problem.local, problem.model
    if not isinstance(local, LocalSGD) or local.clip_norm is not None:
        return
    count = min(local.batch_size, _EXAMPLES)
    both = made_up(2 * count)  # a step on some makes even the highest rate fit these, and not the others
    batch, others = ({name: field[half::2] for name, field in both.items()} for half in (0, 1))
    with problem.users_apart():
        try:
            model.load(model.initial)
            before = float(problem.reduced(loss_of_one(problem, model.module, others), count).detach())
            leaves = list(model.trainable.values())
            loss = problem.reduced(loss_of_one(problem, model.module, batch), count)
            with torch.no_grad():
                for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
                    if gradient is not None:
                        leaf.sub_(gradient, alpha=local.lr)
            after = float(problem.reduced(loss_of_one(problem, model.module, others), count).detach())
        except Exception:  # what fails on made-up examples has been told by now, or is due to this step
            return
        finally:
            problem.isolation.after_user()
            model.load(model.initial)
    if math.isfinite(before) and not after <= _FAR * max(before, 1.0):  # NaN too
        warnings.warn(
            f"lr={local.lr:g} of LocalSGD lets users diverge: on made-up examples one step takes the loss from "
            f"{before:.3g} to {after:.3g}. Divide it by ten until this goes (--client-lr on the command line)",
            DivergingRateWarning,
            stacklevel=4,  # who makes the training
        )
