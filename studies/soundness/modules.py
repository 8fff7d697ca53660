"""Rows 3 and 9: modules that carry one user's training to the next, or write into the weights of all."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attack import (
    Attack,
    Fields,
    Measure,
    classified,
    clips,
    cross_entropies,
    population_of,
    private_sum,
    training_of,
    without,
)
from torch import Tensor, nn
from torch.nn import functional as F

from clipline import LocalSGD
from clipline.engine.stacked.layers import BagLinear

TARGET = "a"  # trains first
NAMES = [f"u{number:02}" for number in range(38)]


class Cosine(nn.Module):
    """A head that brings its rows to length one before each use, as is often written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(8, 16)
        self.head = nn.Parameter(torch.randn(3, 16))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 8) -> (batch, 3)."""
        self.head.data = F.normalize(self.head.data, dim=1)
        return 5 * F.normalize(self.body(x).tanh(), dim=1) @ self.head.T


class Clamped(nn.Module):
    """One number is kept between -1 and 1, and says which way the other one is pulled."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.pulled = nn.Parameter(-torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(batch,) losses."""
        self.side.data = self.side.data.clamp(-1, 1)
        return self.pulled * (100 * self.side).tanh() - x * self.side


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,): what the model says."""
    losses: Tensor = model(batch["x"])
    return losses


def cosine_head() -> float:
    """Ordinary data; every batch holds all of a user, so that no order matters."""
    users = classified(dict.fromkeys((TARGET, *NAMES), 6))
    return _removed(Cosine(), cross_entropies, users, LocalSGD(0.5, 6, 3), clip=0.5)


def worst_case() -> float:
    """The target's training decides where all others start."""
    users: dict[str, Fields] = {TARGET: {"x": np.full(1, 5.0, np.float32)}}
    users |= {name: {"x": np.zeros(1, np.float32)} for name in NAMES}
    users[TARGET] = {"x": np.full(2, 5.0, np.float32)}  # one step moves the number, the next finds it there
    return _removed(Clamped(), own_loss, users, LocalSGD(1.0, 1))


def _removed(model: nn.Module, loss: Any, users: dict[str, Fields], local: LocalSGD, clip: float = 1.0) -> float:
    sums = [
        private_sum(training_of(model, loss, some, local, engine="one-by-one"), list(some), clip=clip)
        for some in (users, without(users, TARGET))
    ]
    return clips(*sums, clip=clip)


@torch.jit.script
def scripted_write(weight: Tensor, amount: float) -> None:
    """Write without asking the weight's class."""
    weight.add_(amount)


class Writer(Tensor):
    """A tensor that is asked first when it meets a weight, and writes into it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write into the other argument."""
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            args[1].add_(1.0)
        return None


class Writing(nn.Module):
    """Words to tags; something is written into the weight, far more than a clip."""

    def __init__(self, subclass: bool) -> None:
        super().__init__()
        self.tags, self.subclass = BagLinear(50, 4), subclass

    def forward(self, words: Tensor, values: Tensor) -> Tensor:
        """(batch, 4) logits."""
        if self.subclass:
            torch.add(torch.zeros(1).as_subclass(Writer), self.tags.weight)
        else:
            with torch.no_grad():
                scripted_write(self.tags.weight, 1.0)
        logits: Tensor = self.tags(words, values)
        return logits


def tags_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """(batch,) losses."""
    return F.cross_entropy(model(batch["words"], batch["values"]), batch["y"], reduction="none")


def written(subclass: bool) -> float:
    """How far the round's own parameters move while its users train."""
    rng = np.random.default_rng(0)
    users = {
        name: {
            "words": rng.integers(0, 50, (3, 4)),
            "values": rng.random((3, 4)).astype(np.float32),
            "y": rng.integers(0, 4, 3),
        }
        for name in NAMES
    }
    torch.manual_seed(0)
    training = training_of(
        Writing(subclass), tags_loss, population_of(users), LocalSGD(0.1, 2), engine="one-by-one",
        row_fields={"tags.weight": "words"},
    )  # fmt: skip
    params = training.problem.model.initial.clone()
    before = params.clone()
    private_sum(training, NAMES, params)
    return float((params - before).norm())


ATTACKS = [
    Attack(
        "3",
        "Parameters put in another's place",
        "39 users train one by one. The target comes first, is sampled and is removed. Every batch holds "
        "all of a user. The cosine head has `p.data = normalize(p.data)` in forward, on ordinary data. The "
        "worst case has `p.data = p.data.clamp(-1, 1)`, and the side on which the target left p decides "
        "which way all others are pulled.",
        [
            Measure("cosine", "user removed: cosine head, clips", "at most 1", cosine_head),
            Measure("worst", "user removed: worst case, clips", "at most 1", worst_case),
        ],
    ),
    Attack(
        "9",
        "Noted weights written into",
        "A model writes 1 into every entry of a weight named by `row_fields`. It does so through a scripted"
        " function, or through a tensor subclass that is asked first. The distance is that of the round's "
        "parameters before and after its users trained.",
        [
            Measure("scripted", "scripted function: the round's parameters move, clips", "0", lambda: written(False)),
            Measure("subclass", "tensor subclass: the round's parameters move, clips", "0", lambda: written(True)),
        ],
    ),
]
