"""The training that every system is asked for: sizes, settings and made-up users, in NumPy alone.

Each system imports this in its own environment, so nothing here may know clipline or any peer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Fields = dict[str, NDArray[Any]]  # name -> (examples, ...), as clipline's tasks want them

SERVER_MOMENTUM = 0.9
NOISE_MULTIPLIER = 0.1
WORDS, TAGS, BAG, TAGS_KEPT = 10_000, 500, 128, 5


@dataclass(frozen=True)
class Workload:
    """What one user holds and how he trains. Rates and clips are those of the paper's Table 1."""

    examples: int
    batch_size: int
    client_lr: float
    server_lr: float
    clip: float
    parameters: int
    unit: str  # what an example is


WORKLOADS = {
    "emnist_cr": Workload(200, 20, 10**-1.5, 1.0, 0.37, 1_206_590, "images of 28 x 28"),
    "emnist_ae": Workload(200, 20, 10**0.5, 10**0.25, 0.32, 2_837_314, "images of 28 x 28"),
    "cifar100": Workload(100, 20, 0.1, 10**-0.5, 0.98, 11_227_812, "images of 32 x 32 x 3"),
    "shakespeare": Workload(25, 4, 1.0, 10**-0.5, 0.95, 820_522, "rows of 80 characters"),
    "so_nwp": Workload(128, 16, 10**-0.75, 10**0.25, 0.3, 4_050_748, "sentences of 20 words"),
    "so_lr": Workload(200, 100, 10**2.5, 10**0.25, 16.0, 5_000_500, "posts of 5 to 40 different words"),
}


def user_fields(task: str, user: int) -> Fields:
    """The examples of one user, the same in every system and every run."""
    rng = np.random.default_rng([2021, user])
    count = WORKLOADS[task].examples
    if task in ("emnist_cr", "emnist_ae"):
        return _pictures(rng, count, (28, 28), classes=62)
    if task == "cifar100":
        return _pictures(rng, count, (32, 32, 3), classes=100)
    if task == "shakespeare":
        return {"tokens": _sentences(rng, count, 81, words=86, first=88, last=89, shortest=60).astype(np.uint8)}
    if task == "so_nwp":
        ends = {"words": WORDS, "first": WORDS + 2, "last": WORDS + 3}
        return {"tokens": _sentences(rng, count, 21, **ends, shortest=6).astype(np.int16)}
    return _bags(rng, count)


def dense_arrays(task: str, fields: Fields) -> tuple[NDArray[Any], NDArray[Any]]:
    """The same examples as a peer's user would hold them, input and target: numbers ready for the network.

    Images are (examples, height, width, channels), of CIFAR-100 still bytes, as each visit crops them anew.
    Posts are rows of 10,000 shares, which is what a linear layer reads.
    """
    if task == "cifar100":
        return fields["pixels"], fields["labels"].astype(np.int64)
    if task in ("emnist_cr", "emnist_ae"):
        images = fields["pixels"].astype(np.float32) / 255
        if task == "emnist_cr":
            return images[..., None], fields["labels"].astype(np.int64)
        ink = (1 - images).reshape(len(images), -1)
        return ink, ink
    if task in ("shakespeare", "so_nwp"):
        tokens = fields["tokens"].astype(np.int64)
        return tokens[:, :-1].copy(), tokens[:, 1:].copy()
    return _scattered(fields["words"], fields["weights"], WORDS), _scattered(fields["tags"], 1.0, TAGS)


def _pictures(rng: np.random.Generator, count: int, shape: tuple[int, ...], classes: int) -> Fields:
    """A coarse pattern for each class, with noise: something that a network can learn without running away."""
    patterns = np.random.default_rng(62).integers(0, 256, (classes, *(side // 4 for side in shape[:2]), *shape[2:]))
    labels = rng.integers(0, classes, count)
    coarse = patterns[labels].repeat(4, axis=1).repeat(4, axis=2)
    pixels = np.clip(coarse + rng.integers(-20, 21, coarse.shape), 0, 255)
    return {"pixels": pixels.astype(np.uint8), "labels": labels.astype(np.uint8)}


def _sentences(
    rng: np.random.Generator, count: int, width: int, *, words: int, first: int, last: int, shortest: int
) -> NDArray[np.int64]:
    """Rows of beginning, words (low numbers often), end, and zeros after it; half of the rows are full."""
    tokens = 1 + (words * rng.random((count, width)) ** 3).astype(np.int64)
    tokens[:, 0] = first
    ends = np.where(rng.random(count) < 0.5, width, rng.integers(shortest, width, count))
    places = np.arange(width)
    tokens[places == ends[:, None]] = last
    tokens[places > ends[:, None]] = 0
    return tokens


def _bags(rng: np.random.Generator, count: int) -> Fields:
    """Posts as different words with their shares, and one to five different tags."""
    words, weights = np.full((count, BAG), WORDS, np.int16), np.zeros((count, BAG), np.float32)
    tags = np.full((count, TAGS_KEPT), -1, np.int16)
    for post in range(count):
        chosen = np.unique((WORDS * rng.random(rng.integers(5, 41)) ** 3).astype(np.int16))
        words[post, : len(chosen)] = chosen
        weights[post, : len(chosen)] = 1 / len(chosen)
        tagged = rng.choice(TAGS, rng.integers(1, TAGS_KEPT + 1), replace=False)
        tags[post, : len(tagged)] = tagged
    return {"words": words, "weights": weights, "tags": tags}


def _scattered(places: NDArray[Any], values: Any, width: int) -> NDArray[np.float32]:
    """Rows (examples, width) with `values` at `places`; places outside are padding."""
    rows = np.zeros((len(places), width), np.float32)
    inside = (places >= 0) & (places < width)
    row, _ = np.nonzero(inside)
    rows[row, places[inside]] = np.broadcast_to(values, places.shape)[inside]
    return rows
