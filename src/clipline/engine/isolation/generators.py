"""Random generators that are not the engine's own: torch's, NumPy's and Python's global ones, and those of a model."""

from __future__ import annotations

import _random
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

_preserved = threading.local()  # `inside`: whether this thread is within `preserve_generators`
_own_bits = np.random.MT19937(0)  # of NumPy's global generator within `preserve_generators`


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Within, NumPy's and Python's global generators are to be seeded; on leaving, their states are restored.

    Within another one it does nothing: the outer one restores. Each costs 0.1 ms, most of it to read NumPy's state.
    """
    if getattr(_preserved, "inside", False):
        yield
        return
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002
    # The caller's bits are put aside, which is faster than writing them back. They do not hold the second number of a
    # pair of normal ones: if there is one, everything is written.
    callers_bits = mtrand.get_bit_generator()
    _preserved.inside = True
    try:
        mtrand.set_bit_generator(_own_bits)
        np.random.seed(0)  # noqa: NPY002 (as earlier users may have drawn from it)
        yield
    finally:
        _preserved.inside = False
        mtrand.set_bit_generator(callers_bits)
        if numpy_state["has_gauss"]:
            np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


@contextmanager
def preserve_torch_generators(device: torch.device) -> Iterator[torch.Generator]:
    """Within, torch's global generators of the CPU and of this device may be seeded; then their states are restored.

    Gives the generator of the device.
    """
    # Not torch.random.fork_rng, which takes 50 microseconds to find out about devices.
    of_device = torch_generator(device)
    states = [(generator, generator.get_state()) for generator in {torch.default_generator, of_device}]
    try:
        yield of_device
    finally:
        for generator, state in states:
            generator.set_state(state)


def torch_generator(device: torch.device) -> torch.Generator:
    """Torch's global generator of this device."""
    # Not torch.manual_seed: before CUDA is initialised it queues a call with a formatted stack trace every time.
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def seed_global_generators(key: int) -> None:
    """Seed NumPy's and Python's global generators, as `np.random.seed` and `random.seed` do."""
    # `random.seed` itself first looks for other types than int, which takes as long as the seeding.
    _random.Random.seed(random._inst, key)
    random._inst.gauss_next = None  # type: ignore[attr-defined]
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 (the model's choice, not ours)


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
    if isinstance(value, np.random.SeedSequence):
        return lambda key: value.__init__(key)  # type: ignore[misc]
    if isinstance(value, np.random.Generator | np.random.BitGenerator):
        bits = value.bit_generator if isinstance(value, np.random.Generator) else value

        def reseed(key: int) -> None:
            bits.state = type(bits)(key).state
            if isinstance(bits.seed_seq, np.random.SeedSequence):  # it counts what `spawn` gave
                bits.seed_seq.__init__(key)  # type: ignore[misc]

        return reseed
    return None
