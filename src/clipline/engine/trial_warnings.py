"""Two mistakes that are found before anything is trained: labels beyond what the model takes, and rates that diverge.

While users train, one with such a label fails in silence and adds nothing, as an error would tell of that user. So the
largest and the smallest value of each field of whole numbers are tried first, as gaps are looked for when a table is
read: whoever runs the training has the data.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from ..data.packed_field import Field
from ..data.population import Population
from ..errors import CliplineError, PopulationError, RunError
from ..federated.local_sgd import Batch, LocalSGD
from .core.batches import Examples
from .core.row_fields import starting_params
from .isolation.guard import enough_resources

if TYPE_CHECKING:  # it imports this room
    from .core.problem import Problem

_MOST_BYTES = 1 << 28  # of a field: reading more only to find its largest value would take seconds
_FIRST_BYTES = 1 << 22  # the same where nobody asked: about a millisecond
_MOST_COPIED = 1 << 25  # parameters to copy to a processor for it
_EXAMPLES = 8  # of a step at the users' rate, at most
_FAR = 1000.0  # times the loss before the step, or 1 if that is more: made-up examples are not scaled as yours are


class ValueRangeWarning(UserWarning):
    """A field holds values that the loss cannot take; a user with one adds nothing. Not for publication."""


def warn_of_ranges(problem: Problem) -> None:
    """Warn if the loss fails on the largest or smallest value in the first 4 MB of a field of whole numbers.

    What it says is private, and is told to the caller, who has the data: no result, record or release holds it, and
    training is as it would be without it. Nothing is looked at where the population was made with
    missing="zero-update", or where errors are shown anyway. A wrong number on a GPU ends the process, so models are
    tried on a processor, and those too large to copy not at all.
    """
    population, model = problem.population, problem.model
    options = population.column_options
    if options.get("missing") == "zero-update" or problem.on_error == "raise" or not _candidates(population):
        return
    module, examples = model.module, problem.examples
    if problem.device.type != "cpu":
        if sum(param.numel() for param in module.parameters()) > _MOST_COPIED:
            return
        module = model.export(model.initial).train()
        examples = Examples(population, torch.device("cpu"), examples.dtype)
    else:
        model.load(model.initial)
    with problem.users_apart(), torch.no_grad():
        run = partial(loss_of_one, problem, module)
        try:
            check_ranges(examples, run, "the loss", options.get("categories", {}), most_bytes=_FIRST_BYTES)
        except PopulationError as error:
            told = f"{error}; whoever has one adds nothing, and nothing is said of it while users train"
            warnings.warn(told, ValueRangeWarning, stacklevel=4)  # who makes the training


def loss_of_one(problem: Problem, module: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss as if one user had this batch. Rows of a matrix that do not exist count as its last, as in training."""
    model, reference = problem.model, None
    for name, field in problem.row_fields.items():
        batch = {**batch, field: batch[field].long().clamp(0, model.named_shapes[name][0] - 1)}
    if problem.takes_reference:
        whole = model.initial.clone().unsqueeze(0).to(next(iter(batch.values())).device)
        reference = {name: piece[0] for name, piece in starting_params(whole, model.named_shapes, {}).items()}
    problem.isolation.seed(0)
    try:
        return problem.losses(module, batch, reference)
    finally:
        problem.isolation.after_user()


def check_ranges(
    examples: Examples,
    run: Callable[[Batch], object],
    where: str,
    categories: Mapping[str, Sequence[object]],
    most_bytes: int = _MOST_BYTES,
) -> None:
    """Refuse a field of whole numbers whose largest or smallest value `run` fails on, with the values that it takes.

    `run` is the loss on a batch; `where` says in words what fails. Of several such fields the first is refused. An
    error that is due to none of them is left for the training's own trial. Of each field the first `most_bytes` are
    looked at.
    """
    rows = _extreme_rows(examples.population, most_bytes)
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


def _candidates(population: Population) -> list[Field]:
    """The fields that may be labels or indices: whole numbers, and single numbers of any type."""
    kinds = ((field, "iuf" if field.ndim == 1 else "iu") for field in population.fields.values())
    return [field for field, kind in kinds if field.dtype.kind in kind and field.size]


def _extreme_rows(population: Population, most_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """An example with the largest and one with the smallest value of each field that may be labels or indices."""
    rows = [0][: population.examples]
    for field in _candidates(population):
        width = field.size // len(field)
        first = field[: max(1, most_bytes // (width * field.itemsize))]
        rows += [int(first.argmax()) // width, int(first.argmin()) // width]
    return np.unique(np.array(rows, np.int64))


def _is_whole(values: torch.Tensor) -> bool:
    """Whether these are whole numbers, of whatever type: labels with gaps are read as fractions."""
    return values.dtype != torch.bool and (not values.is_floating_point() or bool((values == values.round()).all()))


def _error(run: Callable[[Batch], object], batch: Batch) -> Exception | None:
    try:
        with enough_resources():
            run(batch)
    except RunError:
        raise
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


class DivergingRateWarning(UserWarning):
    """One step of local SGD sends the loss on made-up examples up a thousandfold: the learning rate is far too high."""


def warn_of_rate(problem: Problem, made_up: Callable[[int], Batch]) -> None:
    """Warn if one step at the users' rate raises the loss on made-up examples a thousandfold, or makes it infinite.

    No data are read. Clipping hides such a rate: every update is cut to the clip, and most of them point nowhere. A
    rate that is too high by less is not found. Not for Adam or clipped gradients, whose steps the rate bounds.
    """
    local, model = problem.local, problem.model
    if not isinstance(local, LocalSGD) or local.clip_norm is not None:
        return
    count = min(local.batch_size, _EXAMPLES)
    both = made_up(2 * count)  # a step on some makes even the highest rate fit these, and not the others
    batch, others = ({name: field[half::2] for name, field in both.items()} for half in (0, 1))
    with problem.users_apart():
        try:
            model.load(model.initial)
            before = float(problem.reduced(loss_of_one(problem, model.module, others), count).detach())
            leaves = list(model.trainable.values())
            loss = problem.reduced(loss_of_one(problem, model.module, batch), count)
            with torch.no_grad():
                for leaf, gradient in zip(leaves, torch.autograd.grad(loss, leaves, allow_unused=True), strict=True):
                    if gradient is not None:
                        leaf.sub_(gradient, alpha=local.lr)
            after = float(problem.reduced(loss_of_one(problem, model.module, others), count).detach())
        except Exception:  # what fails on made-up examples has been told by now, or is due to this step
            return
        finally:
            problem.isolation.after_user()
            model.load(model.initial)
    if math.isfinite(before) and not after <= _FAR * max(before, 1.0):  # NaN too
        warnings.warn(
            f"lr={local.lr:g} of LocalSGD lets users diverge: on made-up examples one step takes the loss from "
            f"{before:.3g} to {after:.3g}. Divide it by ten until this goes (--client-lr on the command line)",
            DivergingRateWarning,
            stacklevel=4,  # who makes the training
        )
