"""Small models, populations and scripts that several tests use."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from clipline import LocalSGD, Population
from clipline.engine.layers import MatrixLSTM, MaxPool2d, PatchConv2d
from clipline.engine.one_by_one import OneByOne
from clipline.engine.stacked.trainer import Stacked
from clipline.federated.sampling import Cohort
from clipline.privacy.events import PoissonSampling

ROOT = Path(__file__).parents[1]


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def linear_model(features: int = 6, classes: int = 3, dtype: torch.dtype = torch.float64) -> torch.nn.Linear:
    """A linear classifier without bias that starts at zero: the model of the reference."""
    model = torch.nn.Linear(features, classes, bias=False, dtype=dtype)
    torch.nn.init.zeros_(model.weight)
    return model


def cross_entropy(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


class Mixed(nn.Module):
    """16 features to 3 classes by a convolution, normalisation, a pool, a recurrence, dropout and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = PatchConv2d(1, 4, 3, padding="same"), nn.GroupNorm(2, 4), MaxPool2d()
        self.lstm, self.drop, self.out = MatrixLSTM(4, 8), nn.Dropout(0.2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        maps = self.pool(torch.relu(self.norm(self.conv(x.view(-1, 1, 4, 4)))))
        return self.out(self.drop(self.lstm(maps.flatten(2).transpose(1, 2))[:, -1]))


def small_population(users: int = 60, features: int = 6, classes: int = 3, seed: int = 0) -> Population:
    """Users with 0 to 30 examples of a noisy linear rule."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(features, classes))
    sizes = rng.integers(0, 31, users)
    ids = np.repeat(np.arange(users), sizes)
    x = rng.normal(size=(len(ids), features))
    y = (x @ truth + rng.normal(size=(len(ids), classes))).argmax(axis=1)
    return Population.from_arrays(ids, known_users=np.arange(users), x=x, y=y)


def cross_entropies(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The same, one for each example."""
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def population_of(sizes: list[int], features: int = 6, classes: int = 3, seed: int = 0) -> Population:
    """Users with these numbers of examples."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    fields = {"x": rng.normal(size=(offsets[-1], features)), "y": rng.integers(0, classes, offsets[-1])}
    return Population(offsets, fields)


def rows_of(clients: OneByOne | Stacked, users: NDArray[np.int64], round_index: int = 0, params: Tensor | None = None):
    """(users, dim): the updates of these users in this order, as `train` gives them."""
    plain = clients.plain if isinstance(clients, Stacked) else clients
    params = plain.flat.initial if params is None else params
    blocks = clients.train(params, Cohort(users, PoissonSampling(0.5)), round_index)
    rows = torch.cat([params.new_zeros(0, plain.flat.dim), *(block.dense(plain.flat.dim) for block in blocks)])
    order = np.arange(len(users))
    if isinstance(clients, Stacked):  # most work first
        order = np.argsort(-plain.local.examples_of(plain.examples.population, users), kind="stable")
    in_order = torch.empty_like(rows)
    in_order[torch.from_numpy(order)] = rows
    return in_order


LOCAL = LocalSGD(lr=0.2, batch_size=8)
