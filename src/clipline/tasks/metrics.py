"""Metrics on users outside the population: ratios of sums over their examples, batch by batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.population import Population
from ..engine.core.batches import Examples
from ..errors import check_choice
from ..federated.local_sgd import Batch
from ..training.evaluation import EvaluateModel

GPU_BATCH = 2000  # examples: 1.6 GB of logits of so_nwp
# A metric of a batch: numerator and denominator, each summed over batches. Without a denominator it is a plain sum.
Counts = Mapping[str, tuple[Tensor, Tensor | int | None]]


def evaluator(
    count: Callable[[nn.Module, Batch], Counts],
    test: Population,
    part: str,
    *,
    batch_size: int,
    gpu_batch_size: int = GPU_BATCH,
    max_examples: int | None = None,
) -> EvaluateModel:
    """The metrics over the examples of `held_out(test, part)`: summed numerators over summed denominators, or 0 over 0.

    On "validation" and "original" only the first `max_examples` examples count. Batches have `batch_size` examples on
    CPU cores. A GPU is not filled by so few, and every operation that is launched for a batch holds up the rounds that
    train meanwhile: it takes `gpu_batch_size`, as many as its memory has room for.
    """
    rows = held_out(test, part)
    if part != "test" and max_examples is not None:
        rows = rows[:max_examples]
    known: dict[tuple[torch.device, torch.dtype], Examples] = {}  # kept from one evaluation to the next

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        like = next(model.parameters())
        examples = known.setdefault((like.device, like.dtype), Examples(test, like.device, like.dtype))
        size = batch_size if like.device.type == "cpu" else gpu_batch_size
        above: dict[str, list[Tensor]] = defaultdict(list)  # added up at the end: until then the host does not wait
        below: dict[str, list[Tensor | int]] = defaultdict(list)
        for start in range(0, len(rows), size):
            for name, (numerator, denominator) in count(model, examples.gather(rows[start : start + size])).items():
                above[name].append(numerator)
                below[name] += [] if denominator is None else [denominator]
        return {name: _ratio(above[name], below[name]) for name in above}

    return evaluate


def _ratio(above: list[Tensor], below: list[Tensor | int]) -> float:
    """The sums' ratio, 0 over 0; without denominators the sum. Each list leaves the device in one transfer."""
    numerator, *denominator = (
        float(torch.stack([torch.as_tensor(part).double() for part in parts]).sum())
        for parts in (above, below)
        if parts
    )
    if not denominator:
        return numerator
    return numerator / denominator[0] if denominator[0] else 0.0


def held_out(test: Population, part: str) -> NDArray[np.int64]:
    """Rows of the test users' examples: of every other user from the first ("validation") or second ("test") on.

    "original" is everybody: the original programs chose settings and reported results on the same users.
    """
    owned = [np.arange(test.offsets[user], test.offsets[user + 1]) for user in held_out_users(len(test), part)]
    return np.concatenate([np.zeros(0, np.int64), *owned])


def held_out_users(users: int, part: str) -> range:
    """The places of the test users that belong to a part, as in `held_out`."""
    check_choice("evaluate_on", part, ("validation", "test", "original"))
    first, step = {"validation": (0, 2), "test": (1, 2), "original": (0, 1)}[part]
    return range(first, users, step)


def sequence_loss(losses: Tensor, targets: Tensor, padding_in_loss: bool) -> Tensor:
    """(batch,): means of (batch, time) losses over all positions; or the mean of those with a target other than 0.

    The original programs average over all: the framework passed the loss no mask. A batch of padding alone costs 0.
    """
    if padding_in_loss:
        return losses.mean(dim=1)
    kept = (targets != 0).to(losses.dtype)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def hits_without(logits: Tensor, targets: Tensor, ignored: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """How many targets (batch, time) are guessed right and how many there are, leaving out those in `ignored`."""
    kept = torch.ones_like(targets, dtype=torch.bool)
    for token in ignored:
        kept &= targets != token
    return ((logits.argmax(dim=-1) == targets) & kept).sum(), kept.sum()
