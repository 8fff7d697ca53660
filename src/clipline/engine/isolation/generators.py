"""Random generators that are not the engine's own: NumPy's and Python's global ones, and those that a model holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Within, NumPy's and Python's global generators may be seeded; on leaving, their states are restored."""
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def generators_state() -> tuple[object, ...]:
    """The states of NumPy's and Python's global generators, for comparison."""
    kind, numbers, *rest = np.random.get_state()  # noqa: NPY002
    return kind, bytes(memoryview(numbers)), *rest, random.getstate()  # type: ignore[arg-type]


def beginning(value: Any) -> Callable[[int], object] | None:
    """The function that reseeds `value`, a random generator that a model holds; None for anything else."""
    if isinstance(value, torch.Generator):
        return value.manual_seed
    if isinstance(value, random.Random):
        return value.seed
    if isinstance(value, np.random.RandomState):
        return lambda key: value.seed(key & 0xFFFFFFFF)
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value

        def reseed(key: int) -> None:
            bits.state = type(bits)(key).state

        return reseed
    return None
