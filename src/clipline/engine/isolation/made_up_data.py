"""Synthetic examples on which a model and its loss are tried before any user's data are read.

Such a trial chooses between ways that are all correct, and finds mistakes that every user would run into. It never
decides whether users are kept apart: that holds by construction, or is checked while users train.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.packed_field import Field
from ...errors import PopulationError

FILLS = ("mixed", "zeros", "ones")
_SPREADS = (0.0, 0.02, 0.05)  # stddev of the noise added to the initial parameters: more makes recurrences chaotic
_DRAWN = 1_000_003  # numbers of that noise: a prime, so that rows of a matrix differ


def made_up(
    fields: Mapping[str, Field],
    count: int,
    fill: str,
    given: Mapping[str, NDArray[Any]] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> dict[str, NDArray[Any]]:
    """`count` examples with the shapes and types of these fields; their values are not used.

    "mixed": normal numbers, and 0 or 1 for integer fields, which are valid labels and word ids of most models. "zeros"
    and "ones": all the same. If examples are `given`, those, repeated.

    `lengths` names the fields that say how many entries of a list count, with the width of the list. "mixed": between
    half of the width and all of it, at least 2 if it has them; else all of it. A loss that divides by the number of
    tokens, or of those after the first, is then not divided by 0.
    """
    if given is not None:
        return {name: np.resize(given[name], (count, *field.shape[1:])).astype(field.dtype)
                for name, field in fields.items()}  # fmt: skip
    rng = np.random.default_rng(2021)
    made = {name: _values((count, *field.shape[1:]), field.dtype, fill, rng) for name, field in fields.items()}
    for name in made.keys() & (lengths or {}).keys():
        width = (lengths or {})[name]
        least = max(min(2, width), width // 2) if fill == "mixed" else width
        made[name] = np.random.default_rng(width).integers(least, width + 1, count).astype(fields[name].dtype)
    return made


def check_trial_batch(given: Mapping[str, Any], fields: Mapping[str, Field]) -> dict[str, NDArray[Any]]:
    """The caller's own trial examples as arrays; refused unless shapes and types are those of the population."""
    if not isinstance(given, Mapping):
        raise PopulationError(
            f"trial_batch is a {type(given).__name__} but must map field names to arrays: give a dict"
        )
    batch = {
        name: values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
        for name, values in given.items()
    }
    if len({len(values) for values in batch.values() if values.ndim}) > 1:
        raise PopulationError("trial_batch has fields of different lengths but each example needs all: make them equal")
    for name, field in fields.items():
        if name not in batch or batch[name].shape[1:] != field.shape[1:] or not len(batch[name]):
            got = f"shape {batch[name].shape}" if name in batch else "nothing"
            raise PopulationError(
                f"trial_batch has {got} for field {name!r} but must have (examples, *{field.shape[1:]}): make up a few "
                "examples like the population's"
            )
        if not np.can_cast(batch[name].dtype, field.dtype, "same_kind"):
            raise PopulationError(
                f"trial_batch has {batch[name].dtype} for field {name!r} but must have {field.dtype}: convert it"
            )
    return batch


def parameters_to_try(initial: Tensor) -> Iterator[Tensor]:
    """The initial parameters, and those plus noise: an initial zero may hide what the trial looks for."""
    generator = torch.Generator().manual_seed(2021)
    for spread in _SPREADS:
        # Repeated after a prime number: millions of numbers take a core longer than the trial takes a GPU.
        noise = torch.randn(min(len(initial), _DRAWN), generator=generator, dtype=torch.float32).to(initial)
        yield initial + spread * noise.repeat(-(-len(initial) // _DRAWN))[: len(initial)]


def _values(shape: tuple[int, ...], dtype: np.dtype[Any], fill: str, rng: np.random.Generator) -> NDArray[Any]:
    if fill != "mixed" or dtype.kind not in "biuf":
        return np.ones(shape, dtype) if fill == "ones" and dtype.kind in "biuf" else np.zeros(shape, dtype)
    return (rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, 2, shape)).astype(dtype)
