"""The trainer of users with one example and one plain SGD step: many at once, with shared weights. On CPU cores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...data.population import Population
from ...errors import ModuleError
from ...federated.backend import CohortRequest
from ...federated.local_sgd import LocalSGD, LocalTraining, takes_reference
from ...federated.sampling import Cohort
from ..core.one_by_one import OneByOne
from ..core.problem import Problem
from ..core.updates import Dense, Updates
from ..core.user_random import random_layer_keys
from ..isolation.generators import preserve_generators
from ..isolation.guard import users_own
from .rounding import full_grain
from .single_step_trial import bytes_a_user, equal_widths, shared_step

_MAX_BLOCK = 512  # users: more do not make a core faster
_MAX_BYTES = 1 << 29  # in what a block keeps for its backward pass, and in its updates
_KNOWN = ("lr", "batch_size", "epochs", "max_examples", "reduction")  # settings of LocalSGD that are taken care of here


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
