"""Metrics on users outside the population: ratios of sums over their examples, batch by batch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.population import Population
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
    kept: dict[torch.device, Batch] = {}  # examples stay on the device from one evaluation to the next
    if part != "test" and max_examples is not None:
        rows = rows[:max_examples]

    def evaluate(model: nn.Module) -> Mapping[str, float]:
        sums: dict[str, list[tuple[Tensor, Tensor | int | None]]] = defaultdict(list)
        like = next(model.parameters())
        size = batch_size if like.device.type == "cpu" else gpu_batch_size
        for batch in batches(test, rows, size, like, kept):
            for name, pair in count(model, batch).items():
                sums[name].append(pair)  # added up at the end, so that the host does not wait for the device in between
        return {name: _ratio(pairs) for name, pairs in sums.items()}

    return evaluate


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


def batches(
    test: Population,
    rows: NDArray[np.int64],
    batch_size: int,
    like: Tensor,
    kept: dict[torch.device, Batch] | None = None,
) -> Iterator[Batch]:
    """The rows in order, the last batch as small as it comes, on the device of `like`; fractions take its type.

    With `kept`, examples that a GPU has once been given stay there for the next time.
    """
    if kept is not None and like.device.type != "cpu":
        if like.device not in kept:
            fields = {name: torch.from_numpy(field[rows]) for name, field in test.fields.items()}
            kept[like.device] = {name: field.to(like.device) for name, field in fields.items()}
        for start in range(0, len(rows), batch_size):
            part = slice(start, start + batch_size)
            yield {name: _typed(field[part], like) for name, field in kept[like.device].items()}
        return
    for start in range(0, len(rows), batch_size):
        chosen = rows[start : start + batch_size]
        fields = {name: torch.from_numpy(field[chosen]) for name, field in test.fields.items()}
        yield {name: _typed(field.to(like.device), like) for name, field in fields.items()}


def _typed(field: Tensor, like: Tensor) -> Tensor:
    return field.to(like.dtype) if field.is_floating_point() else field


def _ratio(pairs: Sequence[tuple[Tensor, Tensor | int | None]]) -> float:
    """The summed numerators over the summed denominators, 0 where these are 0; without denominators, the sum."""
    numerator = float(torch.stack([torch.as_tensor(part).double() for part, _ in pairs]).sum())
    if pairs[0][1] is None:
        return numerator
    denominator = sum(_on_host([part for _, part in pairs]))
    return numerator / denominator if denominator else 0.0


def _on_host(numbers: Sequence[Tensor | int | None]) -> list[float]:
    """Numbers from the device in one transfer."""
    if all(isinstance(number, Tensor) for number in numbers):
        return torch.stack([torch.as_tensor(number).double() for number in numbers]).tolist()
    return [float(number or 0) for number in numbers]


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
