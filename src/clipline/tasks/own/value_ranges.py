"""Labels and indices beyond what the model can take, found before anything is trained.

While users train, one with such a label fails in silence and adds nothing, as an error would tell of that user. So the
largest and the smallest value of each field of whole numbers are tried first, as gaps are looked for when a table is
read: whoever runs the command has the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from ...engine.batches import Examples
from ...errors import CliplineError, PopulationError
from ...federated.local_sgd import Batch
from ...federated.population import Population

_MOST_BYTES = 1 << 28  # of a field: reading more only to find its largest value would take seconds


def check_ranges(
    examples: Examples, run: Callable[[Batch], object], where: str, categories: Mapping[str, Sequence[object]]
) -> None:
    """Refuse a field of whole numbers whose largest or smallest value `run` fails on, with the values that it takes.

    `run` is the loss on a batch; `where` says in words what fails. Of several such fields the first is refused. An
    error that is due to none of them is left for the training's own trial.
    """
    rows = _extreme_rows(examples.population)
    if not len(rows):
        return
    batch = examples.gather(rows)
    error = _error(run, batch)
    if error is None:
        return
    if isinstance(error, CliplineError):
        raise error
    zeros = {name: torch.zeros_like(values) for name, values in batch.items() if _is_whole(values)}
    for name, zero in zeros.items():
        # The others as they are; else as zeros, as several fields may be at fault.
        for tried in (batch, {**batch, **zeros, name: batch[name]}):
            error = _error(run, tried)
            if error is not None and _error(run, {**tried, name: zero}) is None:
                raise _refusal(run, tried, name, where, categories.get(name, ()), error) from error


def _extreme_rows(population: Population) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """An example with the largest and one with the smallest value of each field that may be labels or indices."""
    rows = [0][: population.examples]
    for field in population.fields.values():
        if field.dtype.kind in ("iuf" if field.ndim == 1 else "iu") and field.size and field.nbytes <= _MOST_BYTES:
            width = field.size // len(field)
            rows += [int(field.argmax()) // width, int(field.argmin()) // width]
    return np.unique(np.array(rows, np.int64))


def _is_whole(values: torch.Tensor) -> bool:
    """Whether these are whole numbers, of whatever type: labels with gaps are read as fractions."""
    return values.dtype != torch.bool and (not values.is_floating_point() or bool((values == values.round()).all()))


def _error(run: Callable[[Batch], object], batch: Batch) -> Exception | None:
    try:
        run(batch)
    except Exception as error:
        return error
    return None


def _refusal(
    run: Callable[[Batch], object], batch: Batch, name: str, where: str, listed: Sequence[object], error: Exception
) -> PopulationError:
    """The error, with the largest value that works, or the smallest where only those below 0 do not."""
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    values = batch[name].to(torch.float64 if batch[name].is_floating_point() else torch.int64)  # uint16 has no clamp
    smallest, largest = int(values.min()), int(values.max())

    def works_with(chosen: torch.Tensor) -> bool:
        return _error(run, {**batch, name: chosen.to(batch[name].dtype)}) is None

    if works_with(values.clamp(min=0)):
        return PopulationError(
            f"field {name!r} holds {smallest}, and {where} takes none below 0 ({said}): number the values from 0, or "
            "leave those rows out"
        )
    works, fails = 0, largest
    while fails - works > 1:
        middle = (works + fails) // 2
        works, fails = (middle, fails) if works_with(values.clamp(0, middle)) else (works, middle)
    unlisted = (
        f" ({largest} stands for whatever its categories do not list)" if listed and largest == len(listed) else ""
    )
    return PopulationError(
        f"field {name!r} holds values up to {largest}{unlisted}, and {where} takes 0 to {works} ({said}): number them "
        f"from 0, or give the model room for {largest + 1}"
    )
