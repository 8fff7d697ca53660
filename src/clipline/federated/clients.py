"""Local training: what one user's device would do, for every user of a cohort, one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..errors import ModuleError, check_number, check_whole
from ..streams import Streams, user_order
from .flat_module import FlatModule
from .population import Population
from .sampling import Cohort

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]

_BLOCK_VALUES = 1 << 24  # numbers in a block of updates: 64 MiB of float32


@dataclass(frozen=True)
class LocalSGD:
    """How a user trains: plain SGD, `epochs` passes in batches, the last batch as small as it comes.

    The order of examples is drawn anew at every visit and every pass. `max_examples` keeps the first so many examples
    of a user.
    """

    lr: float
    batch_size: int = 20
    epochs: int = 1
    max_examples: int | None = None

    def __post_init__(self) -> None:
        check_number("client_lr", self.lr, above=0, at_most=1e30, way_out="0.1 is a usual start")
        check_whole("batch_size", self.batch_size, at_least=1, at_most=10**9, way_out="the paper's tasks use 4 to 100")
        check_whole("client_epochs", self.epochs, at_least=1, at_most=10**6, way_out="the paper uses 1")
        if self.max_examples is not None:
            check_whole("max_examples", self.max_examples, at_least=1, way_out="leave it out for no limit")


class OneByOne:
    """Trains the users of a cohort one after the other on a single working copy of the model.

    The loss is `loss(model, batch) -> scalar`, where `batch` maps the population's field names to tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        local: LocalSGD,
        streams: Streams,
        device: torch.device | str = "cpu",
    ) -> None:
        self.flat = FlatModule(model, device)
        self.loss = loss
        self.population = population
        self.local = local
        self.streams = streams
        self.device = torch.device(device)

    def train(self, params: Tensor, cohort: Cohort, round_index: int) -> Iterator[Tensor]:
        """Updates (params after local SGD - params) of the cohort's users in blocks, each (users, dim)."""
        block_size = max(1, min(64, _BLOCK_VALUES // self.flat.dim))
        self.flat.module.train()
        for start in range(0, len(cohort.users), block_size):
            users = [int(user) for user in cohort.users[start : start + block_size]]
            # nn.Dropout draws from torch's global generator: seed it by user, and give the caller's state back.
            devices = [self.device] if self.device.type == "cuda" else []
            with torch.random.fork_rng(devices):
                block = torch.stack([self.update_of(user, params, round_index) for user in users])
            yield block

    def update_of(self, user: int, params: Tensor, round_index: int) -> Tensor:
        """The update of one user, (dim,), not clipped: PRIVATE. A user without examples gives zeros."""
        vector, gradient = self.flat.vector, self.flat.gradient
        vector.copy_(params)
        self._global_generator().manual_seed(self.streams.user_key("dropout", round_index, user))
        for batch in self._batches(user, round_index):
            gradient.zero_()
            loss = self.loss(self.flat.module, batch)
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ModuleError(f"loss returned {got} but must return one number: take the mean over the batch")
            torch.autograd.backward(loss)
            self.flat.check_gradients()
            vector.add_(gradient, alpha=-self.local.lr)
        self.flat.check_buffers()
        return vector - params

    def _global_generator(self) -> torch.Generator:
        # Not torch.manual_seed, which without a GPU formats and keeps a stack trace at every call, in case one comes.
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            return torch.cuda.default_generators[self.device.index or torch.cuda.current_device()]
        return torch.default_generator

    def _batches(self, user: int, round_index: int) -> Iterator[Batch]:
        fields = self.population.of(user)
        size = min(self.population.size(user), self.local.max_examples or self.population.size(user))
        for epoch in range(self.local.epochs):
            order = user_order(self.streams.user_key(f"order/{epoch}", round_index, user), size)
            for start in range(0, size, self.local.batch_size):
                rows = order[start : start + self.local.batch_size]
                yield {name: self._tensor(field[rows]) for name, field in fields.items()}

    def _tensor(self, rows: NDArray[Any]) -> Tensor:
        """Rows as a tensor; fractional data take the type of the model's parameters, other data keep theirs."""
        tensor = torch.from_numpy(rows)
        return tensor.to(self.device, self.flat.vector.dtype if tensor.is_floating_point() else None)
