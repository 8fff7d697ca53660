"""Small models, populations and scripts that several tests use."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from clipline import LocalSGD, Population

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


def small_population(users: int = 60, features: int = 6, classes: int = 3, seed: int = 0) -> Population:
    """Users with 0 to 30 examples of a noisy linear rule."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(features, classes))
    sizes = rng.integers(0, 31, users)
    ids = np.repeat(np.arange(users), sizes)
    x = rng.normal(size=(len(ids), features))
    y = (x @ truth + rng.normal(size=(len(ids), classes))).argmax(axis=1)
    return Population.from_arrays(ids, known_users=np.arange(users), x=x, y=y)


LOCAL = LocalSGD(lr=0.2, batch_size=8)
