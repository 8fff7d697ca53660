"""The trainer of users with one example and one plain SGD step: many at once, with shared weights. On CPU cores.

A trial on made-up examples finds out which weights users can share and compares the result with plain steps. Users are
kept apart by vmap, whatever it finds; a weight that is used otherwise later is refused then.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.population import Population
from ...errors import ModuleError
from ...federated.backend import CohortRequest
from ...federated.local_sgd import Batch, LocalSGD, LocalTraining, takes_reference
from ...federated.sampling import Cohort
from ..core.one_by_one import OneByOne
from ..core.problem import Problem
from ..core.updates import Dense, FactoredUpdates, Updates
from ..core.user_random import random_layer_keys
from ..isolation.generators import generators_state, preserve_generators
from ..isolation.guard import exhausted, users_own
from ..isolation.made_up_data import parameters_to_try
from .agreement import NEIGHBOURS, compare, compare_neighbours, other_last_batch, plain_gradients
from .probe import CannotStack, vmap_reason
from .rounding import full_grain
from .shared_step import NotShared, SharedStep
from .vmap_layers import Bypass

_MAX_BLOCK = 512  # users: more do not make a core faster
_MAX_BYTES = 1 << 29  # in what a block keeps for its backward pass, and in its updates
_KNOWN = ("lr", "batch_size", "epochs", "max_examples", "reduction")  # settings of LocalSGD that are taken care of here
_USERS = 3  # of the trial
_RATE = 2.0**-10  # a power of two: dividing by it rounds nothing


def takes_single_steps(local: LocalTraining, population: Population) -> bool:
    """Whether every user takes at most one plain SGD step, on one example.

    Known from the settings, and from how the population was made: sizes of users decide nothing, as one user's could
    then change how others are rounded.
    """
    one_example = local.max_examples == 1 or population.example_level
    plain = type(local) is LocalSGD and all(
        getattr(local, field.name)
        == (field.default_factory() if field.default_factory is not MISSING else field.default)
        for field in fields(local)
        if field.name not in _KNOWN
    )
    return plain and one_example and local.epochs == 1


def can_share_weights(problem: Problem) -> bool:
    """Whether `SingleStep` may be tried on this problem: where it was measured to be faster, in float32 or float64."""
    return (
        problem.device.type == "cpu"
        and problem.fast.single_step
        and problem.precision != "bf16"
        and problem.model.vector.dtype in (torch.float32, torch.float64)
        and not problem.row_fields
        and not problem.model.personal_shapes
        and not takes_reference(problem.loss)
        and takes_single_steps(problem.local, problem.population)
    )


class SingleStep:
    """Trains users of one example and one step in blocks of `block_size`, whose layers all use the round's weights.

    Equal to `plain`, whose working copy of the model it uses, up to the order of additions. `CannotStack` if no weight
    can be shared, or if the model cannot run under vmap.

    A block has one of a few `widths`, for which libraries were found to round every user's update alike; places without
    a user repeat the first one's example.
    """

    def __init__(
        self, plain: OneByOne, cohort_size: int, *, varying: bool = True, block_size: int | None = None
    ) -> None:
        self.problem, self._plain = plain.problem, plain
        self._step = shared_step(plain.problem, plain.made_up)
        self.block_size = block_size or self._choose_block_size(cohort_size, varying)
        grain = full_grain(plain.problem.model.vector.dtype)
        self.widths = equal_widths(plain.problem, plain.made_up, self._step, _widths(self.block_size, grain))

    @property
    def in_words(self) -> str:
        """What runs, in a sentence."""
        names = sorted(self._step.shared)
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        return f"single step: blocks of {self.block_size} users, one example each, share the weights {shown}"

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Updates (params after the step - params) of the requests' users in blocks, one request after the other."""
        population = self.problem.population
        self.problem.isolation.before_block()  # of all blocks: none of the caller's code runs between them
        for index, request in enumerate(requests):
            users = request.cohort.users
            empty = population.offsets[users + 1] == population.offsets[users]
            if empty.any():
                without = Cohort(users[empty], request.cohort.sampling)
                for updates, _ in self._plain.train([replace(request, cohort=without)]):
                    yield updates, np.full(len(updates), index)
                users = users[~empty]
            for start in range(0, len(users), self.block_size):
                for updates in self._train_block(request, users[start : start + self.block_size]):
                    yield updates, np.full(len(updates), index)

    def _train_block(self, request: CohortRequest, users: NDArray[np.int64]) -> Iterator[Updates]:
        """The updates of these users. If they fail, as on a label out of range, each half is tried, and so on."""
        try:
            updates = self._run(request, users)
        except Exception as error:
            fatal = isinstance(error, ModuleError) or not users_own(error)  # of the model, and not of one user's data
            if fatal or self.problem.on_error == "raise":
                raise
            if len(users) == 1:
                yield Updates([Dense(0, request.params.new_full((1, self.problem.model.dim), math.nan))])
                return
            half = len(users) // 2
            yield from self._train_block(request, users[:half])
            yield from self._train_block(request, users[half:])
            return
        yield updates

    def _run(self, request: CohortRequest, users: NDArray[np.int64]) -> Updates:
        """One step of a block."""
        problem, run = self.problem, self.problem.runs[request.run]
        width = next(width for width in self.widths if width >= len(users))
        padded = np.concatenate([users, np.full(width - len(users), users[0])])
        examples = problem.examples.gather(np.asarray(problem.population.offsets[padded], np.int64))
        keys, version = self._random_keys(request, padded), request.params._version
        problem.model.module.train()
        with preserve_generators(), torch.enable_grad(), problem.arithmetic():
            # A model that draws from NumPy's or Python's generator draws the same numbers, whoever the users are.
            problem.isolation.seed(run.streams.user_key("stack", request.round_index, 0))
            try:
                updates = self._step(request.params, examples, keys, run.rate(request.round_index), len(users))
            except BaseException:
                problem.isolation.after_failure()
                raise
            problem.isolation.after_stack()
        if request.params._version != version:
            raise ModuleError("the round's parameters changed while users trained: train on the model that is given")
        return updates

    def _random_keys(self, request: CohortRequest, users: NDArray[np.int64]) -> Tensor:
        """(users, layers, 2): the keys of every `UserRandom` of the model."""
        layers = len(self.problem.model.random_layers)
        if not layers:
            return torch.empty(len(users), 0, 2, dtype=torch.int32)
        streams, identities = self.problem.runs[request.run].streams, self.problem.population.identities(users)
        keys = streams.user_keys("dropout", request.round_index, identities)
        return torch.from_numpy(random_layer_keys(keys, 1, layers)[:, 0])

    def _choose_block_size(self, cohort_size: int, varying: bool) -> int:
        """Users in a block: nearly always the whole cohort, or equal parts of it if that is large."""
        each = bytes_a_user(self.problem, self._plain.made_up, self._step)
        most = max(1, min(_MAX_BLOCK, _MAX_BYTES // each))
        expected = cohort_size + (math.ceil(3 * math.sqrt(cohort_size)) if varying else 0)
        blocks = -(-expected // most)
        return max(2, min(most, 8 * -(-expected // (8 * blocks))))


def _widths(block_size: int, grain: int) -> list[int]:
    """Multiples of `grain` to try: near the block's own size, where cohorts vary, and some for what is left over."""
    widest = -(-block_size // grain)
    near = {widest - step for step in range(7)}
    return [grain * times for times in sorted(near | {widest // 2, widest // 4, widest // 8}) if times > 0]


def shared_step(problem: Problem, made_up: Callable[[int], Batch]) -> SharedStep:
    """A step that shares all weights that can be; `CannotStack` if none can, or if it trains wrongly."""
    trial = _Trial(problem, made_up)
    shared = frozenset(problem.model.named_shapes)
    while shared:
        step = SharedStep(problem.model, problem.loss, shared)
        try:
            trial.run(step, problem.model.initial)
        except NotShared as error:  # at first also those that no layer multiplies with, such as biases
            shared = (shared & step.seen) - error.names
            continue
        if shared <= step.seen:
            with Bypass():  # type: ignore[no-untyped-call]
                trial.run(step, problem.model.initial)
            trial.check_agreement(step)
            return step
        shared &= step.seen
    raise CannotStack("no layer of the model has a weight that users could share")


def bytes_a_user(problem: Problem, made_up: Callable[[int], Batch], step: SharedStep) -> int:
    """Bytes that a user takes in a step: what the backward pass needs, and the updates."""
    kept: list[int] = []

    def counted(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(counted, lambda tensor: tensor):
        updates = _Trial(problem, made_up).run(step, problem.model.initial)
    formed = sum(one.numel() * one.element_size() for one in _tensors(updates))
    return max(1, (sum(kept) + formed) // _USERS)


def equal_widths(
    problem: Problem, made_up: Callable[[int], Batch], step: SharedStep, widths: Sequence[int]
) -> list[int]:
    """Those of the widths at which a block gives users the same updates, to the last bit, as the widest does.

    Refused with `CannotStack` if at the widest itself a user's update depends on the place in the block.
    """
    trial, widest = _Trial(problem, made_up), max(widths)
    places = torch.arange(widest, device=problem.device)
    shift, equal = widest // 2 + 1, sorted(widths)

    def numbers(params: Tensor, users: Tensor) -> list[Tensor]:
        return [one.nan_to_num() for one in _tensors(trial.run(step, params, users, of=widest))]

    for params in parameters_to_try(problem.model.initial):  # of one set of numbers few may show it
        rows = numbers(params, places)
        if not all(map(torch.equal, (one.roll(-shift, 0) for one in rows), numbers(params, places.roll(-shift)))):
            raise CannotStack("a user's update would be rounded otherwise at another place among the users")
        equal = [
            width
            for width in equal
            if width == widest or all(map(torch.equal, (one[:width] for one in rows), numbers(params, places[:width])))
        ]
    return equal


class _Trial:
    """Steps of synthetic users, each with other examples and random keys, kept apart from everything else."""

    def __init__(self, problem: Problem, made_up: Callable[[int], Batch]) -> None:
        self._problem, self._made_up = problem, made_up

    def run(
        self, step: SharedStep, params: Tensor, users: Tensor | None = None, of: int = _USERS, factor: float = 1.0
    ) -> Updates:
        """A step of these users `of` so many, or all of them; `CannotStack` where it fails.

        The data of the last user are multiplied by `factor`.
        """
        problem, keys = self._problem, self._keys(of)
        order = torch.arange(of, device=problem.device) if users is None else users
        examples = {name: problem.examples.select_rows(field, order) for name, field in self._made_up(of).items()}
        examples = other_last_batch(examples, factor)
        problem.model.module.train()
        with preserve_generators(), problem.arithmetic("float32"), torch.enable_grad(), problem.model.unreadable():
            problem.isolation.seed(0)
            before = generators_state()
            try:
                with warnings.catch_warnings():
                    # vmap warns where it falls back to a loop over the users
                    warnings.filterwarnings("error", message=".*performance drop.*")
                    updates = step(params, examples, keys[order], _RATE)
                if generators_state() != before:
                    raise CannotStack(
                        f"model {type(problem.model.module).__name__} or its loss draws from NumPy's or Python's "
                        "generator, which users would share"
                    )
                problem.isolation.after_stack()
            except (CannotStack, NotShared):
                problem.isolation.after_user()
                raise
            except Exception as error:
                if (told := exhausted(error)) is not None:
                    raise told from None
                with suppress(ModuleError):  # one by one the change may be allowed
                    problem.isolation.after_stack()
                reason = vmap_reason(error)
                raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error
        return updates

    def check_agreement(self, step: SharedStep) -> None:
        """Refuse with `WrongStack` if a parameter moves otherwise than by plain steps, at several parameters.

        Or if, at the last of these, users move otherwise where another has other data.
        """
        problem, keys = self._problem, self._keys(_USERS)
        batch = {name: field.unsqueeze(1) for name, field in self._made_up(_USERS).items()}
        shapes = problem.model.named_shapes
        sizes = [shape.numel() for shape in shapes.values()]
        for params in parameters_to_try(problem.model.initial):
            rows = self.run(step, params).dense(problem.model.dim).double() / -_RATE
            plain = plain_gradients(problem, [params] * _USERS, [], keys, batch, [1] * _USERS)
            for row, gradients in zip(rows, plain, strict=True):
                if gradients is not None:
                    pieces = torch.split(row, sizes)
                    named = zip(shapes.items(), pieces, strict=True)
                    compare(problem, {name: piece.view(shape) for (name, shape), piece in named}, gradients)
        for factor in NEIGHBOURS:
            try:
                other = self.run(step, params, factor=factor).dense(problem.model.dim).double() / -_RATE
            except CannotStack:
                continue  # blocks are halved where one fails on somebody's data
            both = zip(torch.split(rows, sizes, dim=1), torch.split(other, sizes, dim=1), strict=True)
            compare_neighbours(problem, dict(zip(shapes, both, strict=True)))

    def _keys(self, users: int) -> Tensor:
        generator = torch.Generator().manual_seed(2021)
        size = users, len(self._problem.model.random_layers), 2
        return torch.randint(2**31 - 1, size, generator=generator, dtype=torch.int32).to(self._problem.device)


def _tensors(updates: Updates) -> list[Tensor]:
    """All numbers of the updates, (users, ...) each."""
    return [
        one
        for piece in updates.pieces
        for one in ([piece.inputs, piece.outputs] if isinstance(piece, FactoredUpdates) else [piece.values])
    ]
