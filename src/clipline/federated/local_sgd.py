"""Local training of one user, as settings: the optimiser, batches, and the form of the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import ModuleError, check_choice, check_number, refuse
from ..lr_schedules import LrSchedule, lr_factor
from ..settings import check_declared, declared
from ..synonyms import refuses_unknown_keywords

Batch = dict[str, Tensor]
Loss = Callable[..., Tensor]  # (model, batch), or (model, batch, reference): see `takes_reference`
Reference = Mapping[str, Tensor]  # the round's parameters, by name; copies, without gradients
OnError = Literal["zero", "raise"]  # what becomes of a user whose training fails


class Users(Protocol):
    """What is asked of a population: user i has `offsets[i + 1] - offsets[i]` examples."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Running totals, one more than there are users."""


@dataclass(frozen=True)
class LocalTraining:
    """How a user trains, whatever the optimiser: `epochs` passes in batches; the last batch may be smaller.

    The examples are shuffled anew in every round and every epoch. `max_examples` keeps only the first examples of a
    user. `reduction` ("mean" or "sum") applies to a loss that returns one number for each example; a loss that returns
    a single number has reduced already.

    An optimiser's state (momentum, moments) is the user's own and begins anew in every round. In a step the gradient
    of the loss, with that of `proximal` / 2 |w - w_round|^2 (FedProx; w_round are the parameters of the round), is
    scaled down to a norm of at most `clip_norm`, over all parameters, and then handed to the optimiser. This clip has
    nothing to do with privacy. `lr_schedule` changes the rate from round to round, see `lr_factor`.
    """

    lr: float = declared("client_lr")
    batch_size: int = declared("batch_size")
    epochs: int = declared("client_epochs")
    max_examples: int | None = declared("max_examples")
    reduction: str = "mean"
    _: KW_ONLY
    weight_decay: float = declared("client_weight_decay")
    clip_norm: float | None = declared("client_clip_norm")
    proximal: float = declared("client_proximal")
    lr_schedule: LrSchedule | None = declared("client_lr_schedule")

    def __post_init__(self) -> None:
        check_declared(self)
        check_choice("reduction", self.reduction, ("mean", "sum"))

    def rate(self, round_index: int, rounds: int) -> float:
        """The learning rate of this round, of `rounds`."""
        return self.lr * lr_factor(self.lr_schedule, round_index, rounds)

    @property
    def plain_sgd(self) -> bool:
        """Whether a step is w - lr * gradient and no more: fast parts of the engine can do that alone."""
        return False

    def examples_of(self, population: Users, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many examples each of these users trains on."""
        sizes = np.asarray(population.offsets[users + 1] - population.offsets[users], np.int64)
        return sizes if self.max_examples is None else np.minimum(sizes, self.max_examples)

    def steps_of(self, population: Users, users: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many SGD steps each of these users takes in a round."""
        return -(-self.examples_of(population, users) // self.batch_size) * self.epochs

    def reduced(self, losses: Tensor, kept: Tensor | None = None) -> Tensor:
        """Reduce (batch,) losses to one number; only those where `kept` (batch,) is true count, or all."""
        if kept is None:
            return losses.sum() if self.reduction == "sum" else losses.sum() / len(losses)
        total = losses.where(kept, 0.0).sum()
        return total if self.reduction == "sum" else total / kept.sum().clamp(min=1)


@refuses_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalTraining):
    """A user trains by SGD, as `torch.optim.SGD` does.

    The examples are shuffled in every round and epoch. Momentum is the user's own and starts anew in every round.

    Args:
      lr: Learning rate of the users.
      batch_size: Examples of a step. The last batch of an epoch may be smaller.
      epochs: Passes over the user's examples in a round.
      max_examples: Maximum examples per user (the first N are used). None uses all.
      reduction: "mean" or "sum" over the examples of a batch, where the loss returns one number for each.
      weight_decay: L2 penalty, as in torch.
      clip_norm: Largest norm of a gradient before each step. This is for training and not for privacy.
      proximal: Pull towards the parameters of the round, `proximal / 2 * |w - w_round|^2` in the loss (FedProx).
      lr_schedule: Changes the rate from round to round: a function of the round, or a text such as "warmup:10,cosine".
      momentum: Momentum of the user's steps.

    Raises:
      SettingError: If a number is outside its range.

    Example:
      >>> cl.Training(model, loss, people, local=cl.LocalSGD(lr=0.1, epochs=2), ...)
    """

    momentum: float = declared("client_momentum")

    @property
    def plain_sgd(self) -> bool:
        """Whether a step is w - lr * gradient and no more."""
        return not (self.momentum or self.weight_decay or self.proximal or self.clip_norm is not None)


@refuses_unknown_keywords
@dataclass(frozen=True, kw_only=True)
class LocalAdam(LocalTraining):
    """A user trains by Adam, as `torch.optim.AdamW` does: weight decay is decoupled.

    The moments are the user's own and start anew in every round.

    Args:
      lr: Learning rate of the users.
      batch_size: Examples of a step. The last batch of an epoch may be smaller.
      epochs: Passes over the user's examples in a round.
      max_examples: Maximum examples per user (the first N are used). None uses all.
      reduction: "mean" or "sum" over the examples of a batch, where the loss returns one number for each.
      weight_decay: Decoupled weight decay.
      clip_norm: Largest norm of a gradient before each step. This is for training and not for privacy.
      proximal: Pull towards the parameters of the round, as in `LocalSGD`.
      lr_schedule: Changes the rate from round to round, as in `LocalSGD`.
      betas: Decay of the two moments.
      eps: Added to the root of the second moment.

    Raises:
      SettingError: If a number is outside its range.

    Example:
      >>> cl.Training(model, loss, people, local=cl.LocalAdam(lr=0.001), ...)
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise refuse("betas", self.betas, "two numbers", "(0.9, 0.999) is usual")
        for place, beta in enumerate(self.betas):
            check_number(f"betas[{place}]", beta, at_least=0, below=1, way_out="(0.9, 0.999) is usual")
        check_number("eps", self.eps, above=0, way_out="1e-8 is usual")


def per_example(losses: object, examples: int) -> bool:
    """True for a loss of one number for each example, (examples,); False for a single number, (); else refused."""
    if isinstance(losses, Tensor) and losses.shape in ((), (examples,)):
        return losses.ndim == 1
    got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise ModuleError(
        f"loss returned {got} but must return a tensor of one number, or of {examples}, one for each example: average "
        "over the rest"
    )


def takes_reference(loss: Loss) -> bool:
    """Whether a loss wants the round's parameters: its third argument is called `reference`."""
    try:
        called = loss.forward if isinstance(loss, nn.Module) else loss
        return list(inspect.signature(called).parameters)[2:3] == ["reference"]
    except (TypeError, ValueError):  # a builtin without a signature
        return False
