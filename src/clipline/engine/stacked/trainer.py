"""Local training of many users at once, each with parameters of their own: the way of a GPU, and of small models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from ...errors import ModuleError
from ...federated.backend import CohortRequest
from ...federated.local_sgd import Batch, users_own
from ...streams import keys_of
from ...vectors import side_stream
from ..batches import Steps, filled_width, plan_steps
from ..isolation.generators import kept_generators
from ..isolation.guard import IsolationError
from ..one_by_one import OneByOne
from ..precision import computing_in
from ..problem import Problem
from ..sparse.row_fields import Named, first_pieces, updates_of
from ..updates import Updates
from ..user_random import step_keys
from .block import Block, Trained
from .probe import ROOM, probe
from .step import StackStep
from .stragglers import StragglerStreams

_FREE = 0.5  # of a GPU's free memory may be taken by a block of users
_MOST = 1024  # users in a block: more do not make a GPU faster
_ON_CORES = 64  # users in a block on processor cores
_GATHERED = 1 << 28  # bytes of examples in a block there: one user with very many must not multiply by all others'
_RECORDED = 1 << 26  # bytes of a batch at most, where steps are recorded: a short one takes as much


class Stacked:
    """Trains the users of a cohort in blocks, a block as one stack: `torch.func.vmap` over parameters and batches.

    Equal to `plain`, whose working copy of the model it uses, up to the order of additions. Users are sorted by work,
    so that a block runs only as long as its longest user. With a loss for each example, a GPU runs blocks of one fixed
    size as a compiled program. A model or loss that has no version for many users is refused with `CannotStack`.

    What a model can see of a user's batch (its width, the number of rows of a small matrix) depends on that user's own
    data alone: users for whom it differs run apart.
    """

    def __init__(
        self,
        plain: OneByOne,
        cohort_size: int,
        *,
        varying: bool = True,
        block_size: int | None = None,
        compiled: bool | None = None,
        problem: Problem | None = None,
    ) -> None:
        self.problem = problem = plain.problem if problem is None else problem
        self._shapes = problem.model.named_shapes
        self._step = StackStep(problem.model, problem.loss, problem.local)
        found = probe(problem, plain.made_up, self._step)
        self._fillable, bytes_a_user = found.fillable, found.bytes_a_user
        if compiled is None:
            small = problem.local.batch_size * problem.examples.bytes_each <= _RECORDED
            compiled = problem.fast.compiled_steps and problem.device.type == "cuda" and self._fillable and small
        longest, width = 0, min(problem.local.batch_size, problem.local.max_examples or problem.local.batch_size)
        if compiled:  # what is recorded has room for the largest user
            most = min(problem.population.largest(), problem.local.max_examples or 2**62)
            longest = -(-most // problem.local.batch_size) * problem.local.epochs
        bytes_a_user += 2 * longest * width * problem.examples.bytes_each  # as gathered, and where it is recorded
        self.block_size = block_size or self._fitting(cohort_size, varying, bytes_a_user)
        self._stragglers: StragglerStreams | None = None
        if compiled:
            self._stragglers = StragglerStreams(
                self._step, users=self.block_size, steps=longest, width=width, apart=problem.fast.straggler_streams
            )

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Updates (params after local SGD - params) of the requests' users, side by side in blocks, most work first.

        With each block the place in `requests` of every user's request. A block may lie where the next one will: use it
        before asking for the next. On a GPU a block is only begun when it is given out.
        """
        users, owners = self._in_order(requests)
        end = 0
        while end < len(users):
            start, end = end, end + self._together(users[end:])
            for trained in self._started(requests, users[start:end], owners[start:end]):
                for part, stack in trained.stacks:
                    own = {name: piece if len(piece) == 1 else piece[part] for name, piece in trained.first.items()}
                    touched = {name: one.of_users(part) for name, one in trained.block.rows.items()}
                    yield updates_of(stack, own, self._shapes, touched), trained.block.owners[part]

    def _together(self, users: NDArray[np.int64]) -> int:
        """How many of these users, the first with most examples, make a block; on cores they are equally wide."""
        if self.problem.device.type != "cpu":
            return self.block_size
        local, examples = self.problem.local, self.problem.examples
        sizes = local.examples_of(examples.population, users[: self.block_size])
        fitting = _GATHERED // max(1, int(sizes[0]) * local.epochs * examples.bytes_each)
        widths = filled_width(sizes, local.batch_size)
        return max(1, min(fitting, int((widths == widths[0]).sum())))

    def _in_order(self, requests: Sequence[CohortRequest]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All users, those with most examples first, and the run of each."""
        work = [self.problem.local.examples_of(self.problem.population, request.cohort.users) for request in requests]
        owners = np.repeat(np.arange(len(requests)), [len(request.cohort.users) for request in requests])
        order = np.lexsort((owners, -np.concatenate(work)))
        return np.concatenate([request.cohort.users for request in requests])[order], owners[order]

    def _prepared(
        self, requests: Sequence[CohortRequest], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> list[Block]:
        """All that these users' training needs, in blocks of users who get equal room for rows."""
        problem, device = self.problem, self.problem.device
        steps, keys = self._plan(requests, users, owners)
        # In memory step by step: that is how they are read.
        gathered = problem.examples.gather(np.ascontiguousarray(steps.rows.swapaxes(0, 1)))
        whole = Block(
            users,
            owners,
            steps,
            {name: field.transpose(0, 1) for name, field in gathered.items()},
            {},
            torch.from_numpy(keys).to(device, non_blocking=True),
            torch.from_numpy(steps.counts).to(device, non_blocking=True),
            torch.tensor(
                [self.problem.runs[requests[owner].run].lr for owner in owners],
                dtype=problem.model.vector.dtype,
                device=device,
            ),
        )
        if not problem.row_fields:
            return [whole]
        named = {
            name: Named(whole.examples[field], self._shapes[name][0]) for name, field in problem.row_fields.items()
        }
        return [self._with_rows(whole, named, chosen, rooms) for chosen, rooms in _alike(named)]

    def _with_rows(
        self, whole: Block, named: Mapping[str, Named], chosen: NDArray[np.int64], rooms: Sequence[int]
    ) -> Block:
        """Some users of a block, and their rows in this much room for each parameter."""
        everybody = len(chosen) == len(whole.users)
        block = whole if everybody else whole.of_users(chosen)
        places = slice(None) if everybody else torch.from_numpy(chosen).to(self.problem.device)
        examples, rows = dict(block.examples), {}
        for (name, field), room in zip(self.problem.row_fields.items(), rooms, strict=True):
            rows[name], examples[field] = named[name].touched(room, places)
        return replace(block, examples=examples, rows=rows)

    def _started(
        self, requests: Sequence[CohortRequest], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> list[Trained]:
        """Train a block of users; on a GPU that is begun, and goes on by itself.

        Where training fails, as a label out of range makes it, every user of the block trains apart, and adds nothing
        if it fails again.
        """
        with side_stream(self.problem.device) as made:
            blocks = self._prepared(requests, users, owners)
            made += [tensor for block in blocks for tensor in block.tensors()]
        versions = [request.params._version for request in requests]
        parts = []
        for block in blocks:
            try:
                parts.append(self._trained(requests, block))
            except Exception as error:
                mine = isinstance(error, IsolationError) or not users_own(error)
                if mine or self.problem.on_error == "raise" or self._stragglers is not None:
                    raise  # what is recorded does not fail by what a user's examples say
                parts += [self._trained_apart(requests, block.of_users(np.array([i]))) for i in range(len(block.users))]
        if versions != [request.params._version for request in requests]:
            raise ModuleError("the round's parameters changed while users trained: train on the model that is given")
        return parts

    def _trained_apart(self, requests: Sequence[CohortRequest], block: Block) -> Trained:
        """One user alone; an update that is not a number, and so adds nothing, where that fails."""
        try:
            return self._trained(requests, block, recorded=False)
        except Exception as error:
            if isinstance(error, IsolationError) or not users_own(error):
                raise
        first = self._first(requests, block)
        return Trained(block, first, [(slice(0, 1), [torch.full_like(piece, math.nan) for piece in first.values()])])

    def _first(self, requests: Sequence[CohortRequest], block: Block) -> dict[str, Tensor]:
        run = torch.from_numpy(block.owners).to(self.problem.device) if len(requests) > 1 else None
        return first_pieces(torch.stack([request.params for request in requests]), self._shapes, block.rows, run)

    def _trained(self, requests: Sequence[CohortRequest], block: Block, *, recorded: bool = True) -> Trained:
        problem, first = self.problem, self._first(requests, block)
        arguments = (block.examples, block.chances, block.counts, block.rates)
        self.problem.model.module.train()
        problem.isolation.before_block()
        with kept_generators(), torch.enable_grad(), computing_in(problem.precision, problem.device):
            try:
                if self._stragglers is None or not recorded:
                    stack = [piece.expand(len(block.users), *piece.shape[1:]).clone() for piece in first.values()]
                    self._walk(requests[0], block.steps, stack, *arguments)
                    stacks = [(slice(0, len(block.users)), stack)]
                else:
                    stacks = self._stragglers.train(block.steps, first, *arguments)
            finally:
                problem.isolation.after_stack()
        return Trained(block, first, stacks)

    def _walk(
        self,
        request: CohortRequest,
        steps: Steps,
        stack: list[Tensor],
        examples: Batch,
        chances: Tensor,
        counts: Tensor,
        rates: Tensor,
    ) -> None:
        """Step by step, only the users who still have one.

        With a loss for each example short batches are filled up and the filling does not count; otherwise only users
        whose batches are of one size go together.
        """
        places = torch.arange(steps.rows.shape[2], device=self.problem.device)
        for step in range(steps.longest):
            # What draws from NumPy's or Python's generator draws the same for all users, whoever they are.
            key = self.problem.runs[request.run].streams.user_key("stack", request.round_index, step)
            for run, width in steps.alike(step, filled=self._fillable):
                batch = {name: field[run, step, :width] for name, field in examples.items()}
                kept = places[:width] < counts[run, step, None]
                self.problem.isolation.seed(key)
                arguments = [piece[run] for piece in stack], chances[run, step], batch, kept, rates[run]
                if run.stop - run.start > 1:
                    self._step(*arguments)
                    continue
                # Libraries choose other routines, which round otherwise, for one user than for more: never only one.
                twice: Any = tree_map(_twice, arguments)
                self._step(*twice)
                for piece, moved in zip(arguments[0], twice[0], strict=True):
                    piece.copy_(moved[:1])

    def _plan(
        self, requests: Sequence[CohortRequest], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[Steps, NDArray[np.int32]]:
        """The batches of every user, and the keys of every `UserRandom` at every step: (users, steps, chances, 2)."""
        rounds = [(self.problem.runs[request.run].streams, request.round_index) for request in requests]
        identities = self.problem.population.identities(users)
        keys_for = partial(keys_of, rounds, identities=identities, owners=owners)
        steps = plan_steps(self.problem.population, users, self.problem.local, keys_for)
        return steps, step_keys(keys_for("dropout"), steps.longest, len(self.problem.model.chances))

    def _fitting(self, cohort_size: int, varying: bool, bytes_a_user: int) -> int:
        """Users in a block: on a GPU a whole cohort, within free memory. A step runs only those who still have one."""
        problem = self.problem
        if problem.device.type != "cuda":
            return _ON_CORES
        bytes_a_user += 10 * (
            0 if problem.row_fields else self.problem.model.dim
        )  # parameters, their change, a copy in bfloat16
        fitting = int(_FREE * torch.cuda.mem_get_info(problem.device)[0] / bytes_a_user)
        expected = cohort_size + (math.ceil(4 * math.sqrt(cohort_size)) if varying else 0)
        return max(1, min(fitting, expected, _MOST))


def _twice(one: Tensor) -> Tensor:
    """(1, ...) -> (2, ...), in memory of its own: a model may write into its batch. torch cannot copy all types."""
    plain = one.view(torch.int16) if one.dtype == torch.uint16 else one
    return torch.cat([plain, plain]).view(one.dtype)


def _alike(named: Mapping[str, Named]) -> list[tuple[NDArray[np.int64], list[int]]]:
    """Users who get equal room for the rows of every parameter, most room first, and how much."""
    rooms = np.stack([one.rooms(ROOM) for one in named.values()], axis=1)
    kinds, kind = np.unique(rooms, axis=0, return_inverse=True)
    numbers = range(len(kinds) - 1, -1, -1)
    return [(np.flatnonzero(kind.reshape(-1) == number), kinds[number].tolist()) for number in numbers]
