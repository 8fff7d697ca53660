"""Privacy for single examples, as Opacus gives it: ten digits, each image a user of its own.

Runs as a script or cell by cell. Digits are drawn in place, by seven segments. Replace the first cell by your images.
"""

# %% Made-up digits: which of the seven segments of a display each one lights, drawn on 12 x 8 pixels and shifted
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import clipline

SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg"]
PLACES = {"a": np.s_[1, 2:6], "d": np.s_[9, 2:6], "g": np.s_[5, 2:6], "f": np.s_[1:6, 2], "b": np.s_[1:6, 5],
          "e": np.s_[5:10, 2], "c": np.s_[5:10, 5]}  # fmt: skip


def digits(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 1, 12, 8) float32, and which digit each shows."""
    rng = np.random.default_rng(seed)
    shapes = np.zeros((10, 12, 8), np.float32)
    for shape, lit in zip(shapes, SEGMENTS, strict=True):
        for segment in lit:
            shape[PLACES[segment]] = 1.0
    labels = rng.integers(0, 10, count)
    moved = [np.roll(shapes[label], tuple(rng.integers(-1, 2, 2)), (0, 1)) for label in labels]
    return (np.stack(moved) + 0.4 * rng.normal(size=(count, 12, 8))).astype(np.float32)[:, None], labels


images, labels = digits(12_000, seed=1)
test_images, test_labels = (torch.from_numpy(field) for field in digits(2_000, seed=2))

# %% The model, and its loss
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(384, 10)
)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One number for each image; the keys are the names given to `one_each`."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


# %% DP-SGD: a round is a batch by Poisson sampling, a user's update is minus the gradient, the clip is max_grad_norm
training = clipline.Training(
    model, loss, clipline.Population.one_each(x=images, y=labels), rounds=150, cohort_size=256,
    local=clipline.LocalSGD(lr=1.0), clip=clipline.FixedClip(1.0), server=clipline.ServerSGD(1.0, momentum=0.9),
    privacy=clipline.Privacy(epsilon=2.0, delta=1e-5, population_size=12_000), seed=0,
)  # fmt: skip
print(training.engine)
result = training.run()

# %% How good it is, and what is promised
accuracy = float((result.model(test_images).argmax(dim=1) == test_labels).double().mean())
print(f"accuracy {accuracy:.3f} on new images; {result.guarantee}")
