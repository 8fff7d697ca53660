"""Local training of one user, as settings: SGD, batches, and the form of the loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import ModuleError, check_choice
from ..settings import check_declared, declared
from .population import Population

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
OnError = Literal["zero", "raise"]  # what becomes of a user whose training fails


@dataclass(frozen=True)
class LocalSGD:
    """How a user trains: plain SGD, `epochs` passes in batches; the last batch may be smaller.

    The examples are shuffled anew in every round and every epoch. `max_examples` keeps only the first examples of a
    user. `reduction` ("mean" or "sum") applies to a loss that returns one number for each example; a loss that returns
    a single number has reduced already.
    """

    lr: float = declared("client_lr")
    batch_size: int = declared("batch_size")
    epochs: int = declared("client_epochs")
    max_examples: int | None = declared("max_examples")
    reduction: str = "mean"

    def __post_init__(self) -> None:
        check_declared(self)
        check_choice("reduction", self.reduction, ("mean", "sum"))

    def examples_of(self, population: Population, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many examples each of these users trains on."""
        sizes = np.asarray(population.offsets[users + 1] - population.offsets[users], np.int64)
        return sizes if self.max_examples is None else np.minimum(sizes, self.max_examples)

    def steps_of(self, population: Population, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many SGD steps each of these users takes in a round."""
        return -(-self.examples_of(population, users) // self.batch_size) * self.epochs

    def reduced(self, losses: Tensor, kept: Tensor | None = None) -> Tensor:
        """Reduce (batch,) losses to one number; only those where `kept` (batch,) is true count, or all."""
        if kept is None:
            return losses.sum() if self.reduction == "sum" else losses.sum() / len(losses)
        total = losses.where(kept, 0.0).sum()
        return total if self.reduction == "sum" else total / kept.sum().clamp(min=1)


def users_own(error: Exception) -> bool:
    """Whether an error may come from one user's data, as for a label out of range.

    Not if memory ran out, or after a CUDA error, which no user of the process can survive.
    """
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return False
    return not (isinstance(error, RuntimeError) and "CUDA" in str(error))


def per_example(losses: object, examples: int) -> bool:
    """True for a loss of one number for each example, (examples,); False for a single number, (); else refused."""
    if isinstance(losses, Tensor) and losses.shape in ((), (examples,)):
        return losses.ndim == 1
    got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise ModuleError(
        f"loss returned {got} but must return one number, or {examples}, one for each example: average over the rest"
    )


class LossOf(nn.Module):
    """A loss as a module, so that `torch.func.functional_call` can replace the parameters of its model."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Batch) -> Tensor:
        """The loss of the model on this batch."""
        return self.loss(self.model, batch)
