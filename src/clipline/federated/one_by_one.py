"""Local training, one user after the other: the plain way, and the fastest on a processor core."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..streams import Streams
from .batches import Examples, plan_steps
from .chance import step_keys
from .flat_module import FlatModule
from .local import LocalSGD, Loss, per_example
from .population import Population
from .precision import Precision, computing_in
from .sampling import Cohort
from .updates import Dense, Updates

_BLOCK_VALUES = 1 << 24  # numbers in a block of updates: 64 MiB of float32


class OneByOne:
    """Trains the users of a cohort one after the other on a single working copy of the model.

    The loss is `loss(model, batch)`, where `batch` maps the population's field names to tensors; it returns one number,
    or one for each example.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        population: Population,
        local: LocalSGD,
        streams: Streams,
        device: torch.device | str = "cpu",
        precision: Precision = "float32",
    ) -> None:
        self.flat = FlatModule(model, device)
        self.loss = loss
        self.local = local
        self.streams = streams
        self.device = torch.device(device)
        self.precision = precision
        self.examples = Examples(population, self.device, self.flat.vector.dtype)

    def train(self, params: Tensor, cohort: Cohort, round_index: int) -> Iterator[Updates]:
        """Updates (params after local SGD - params) of the cohort's users, in blocks."""
        block_size = max(1, min(64, _BLOCK_VALUES // self.flat.dim))
        for start in range(0, len(cohort.users), block_size):
            yield self.block(params, cohort.users[start : start + block_size], round_index)

    def block(self, params: Tensor, users: NDArray[np.int64], round_index: int) -> Updates:
        """The updates of these users, not clipped: PRIVATE. A user without examples gives zeros."""
        steps = plan_steps(self.examples.population, users, self.local, self.streams, round_index)
        keys = self.streams.user_keys("dropout", round_index, users)
        chances = torch.from_numpy(step_keys(keys, steps.longest, len(self.flat.chances))).to(self.device)
        updates = params.new_zeros(len(users), self.flat.dim)
        self.flat.module.train()
        # What draws from torch's global generator draws by user too, and the caller's state is given back.
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), computing_in(self.precision, self.device):
            for i, key in enumerate(keys.tolist()):
                self._global_generator().manual_seed(key)
                self._train(params, steps.rows[i], steps.counts[i], chances[i], out=updates[i])
        return Updates([Dense(0, updates)])

    def _train(
        self, params: Tensor, rows: NDArray[np.int64], counts: NDArray[np.int64], chances: Tensor, out: Tensor
    ) -> None:
        vector, gradient = self.flat.vector, self.flat.gradient
        vector.copy_(params)
        examples = self.examples.gather(rows[counts > 0])
        for step, count in enumerate(counts[counts > 0].tolist()):
            self.flat.set_keys(chances[step])
            gradient.zero_()
            losses = self.loss(self.flat.module, {name: field[step, :count] for name, field in examples.items()})
            if per_example(losses, count):
                losses = self.local.reduced(losses, torch.ones(count, dtype=torch.bool, device=self.device))
            torch.autograd.backward(losses)
            self.flat.check_gradients()
            vector.add_(gradient, alpha=-self.local.lr)
        self.flat.check_buffers()
        torch.sub(vector, params, out=out)

    def _global_generator(self) -> torch.Generator:
        # Not torch.manual_seed, which without a GPU formats and keeps a stack trace at every call, in case one comes.
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            return torch.cuda.default_generators[self.device.index or torch.cuda.current_device()]
        return torch.default_generator
