"""Your own data and your own module: the whole of it.

`python examples/first_run.py` invents 5,000 households with a year of meter readings each and learns, with user-level
differential privacy, to predict the next hour. Replace the first function by your data.
"""

import numpy as np
import torch
from torch import nn

import clipline


def readings(households: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whose each example is, the last 24 hours (examples, 24), and the hour after them (examples, 1)."""
    rng = np.random.default_rng(seed)
    owner = np.repeat(np.arange(households), rng.integers(1, 60, households))  # some have much data, some one example
    habit = rng.uniform(0.5, 1.5, households)[owner, None]
    start = rng.uniform(0, 24, (len(owner), 1))
    hours = start + np.arange(25)
    usage = habit * (1 + np.sin(hours * np.pi / 12)) + 0.1 * rng.normal(size=hours.shape)
    return owner, usage[:, :24], usage[:, 24:]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One number from one batch; the keys are the names given to `from_arrays`."""
    return nn.functional.mse_loss(model(batch["past"]), batch["next"])


def squared_error(model: nn.Module) -> dict[str, float]:
    """On households that do not train."""
    return {"squared error": float(nn.functional.mse_loss(model(test_past), test_next))}


owner, past, following = readings(5_000, seed=1)
population = clipline.Population.from_arrays(owner, past=past, next=following)
_, test_past, test_next = (torch.as_tensor(array).float() for array in readings(500, seed=2))  # other households

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 1))
training = clipline.Training(
    model,
    loss,
    population,
    rounds=50,
    cohort_size=100,
    local=clipline.LocalSGD(lr=0.05, batch_size=20),
    # The noise follows from epsilon. The number of households is known beforehand, not counted in the data: whether
    # somebody is among them stays private.
    privacy=clipline.Privacy(epsilon=4.0, population_size=5_000),
    seed=0,  # to repeat the run; leave it out for a model that is given away: who knows it can subtract the noise
)
result = training.run([clipline.Evaluate(squared_error, every=20), clipline.Progress()])
print(result)  # result.model is the trained module
