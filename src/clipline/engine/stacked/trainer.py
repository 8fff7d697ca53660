"""Local training of many users at once, each with parameters of their own: the way of a GPU, and of small models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from ...errors import ModuleError
from ...federated.local_sgd import Batch, per_example, users_own
from ...federated.sampling import Cohort
from ...streams import keys_of
from ..batches import Steps, filled_width, plan_steps
from ..isolation.generators import generators_state, kept_generators
from ..isolation.guard import IsolationError
from ..isolation.made_up_data import parameters_to_try
from ..one_by_one import OneByOne
from ..precision import computing_in
from ..side_stream import aside
from ..sparse.row_fields import Named, first_pieces, updates_of
from ..updates import Updates
from ..user_random import step_keys
from .block import Begun, Block, Trained, Visit
from .step import SlowEngineWarning, StackStep
from .stragglers import StragglerStreams
from .vmap_layers import Bypass

_FREE = 0.5  # of a GPU's free memory may be taken by a block of users
_MOST = 1024  # users in a block: more do not make a GPU faster
_ON_CORES = 64  # users in a block on processor cores
_GATHERED = 1 << 28  # bytes of examples in a block there: one user with very many must not multiply by all others'
_RECORDED = 1 << 26  # bytes of a batch at most, where steps are recorded: a short one takes as much
_ROOM = 256  # rows that a user may touch, or twice, four times ... as many: each is a program of its own


class CannotStack(ModuleError):
    """The model or its loss uses an operation that has no version for many users at once."""


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
    ) -> None:
        self.plain = plain
        self.flat = plain.flat
        self._shapes = self.flat.named_shapes
        self._step = StackStep(plain.flat, plain.loss, plain.local)
        bytes_a_user = self._trial()
        if compiled is None:
            small = plain.local.batch_size * plain.examples.bytes_each <= _RECORDED
            compiled = plain.device.type == "cuda" and self._fillable and small
        longest, width = 0, min(plain.local.batch_size, plain.local.max_examples or plain.local.batch_size)
        if compiled:  # what is recorded has room for the largest user
            most = min(plain.examples.population.largest(), plain.local.max_examples or 2**62)
            longest = -(-most // plain.local.batch_size) * plain.local.epochs
        bytes_a_user += 2 * longest * width * plain.examples.bytes_each  # as gathered, and where it is recorded
        self.block_size = block_size or self._fitting(cohort_size, varying, bytes_a_user)
        self._begun: Begun | None = None
        self._lanes = (
            StragglerStreams(self._step, users=self.block_size, steps=longest, width=width) if compiled else None
        )

    def train(self, params: Tensor, cohort: Cohort, round_index: int) -> Iterator[Updates]:
        """Updates (params after local SGD - params) of the cohort's users, in blocks, most work first.

        A block may lie where the next one will: use it up before asking for the next.
        """
        for updates, _ in self.train_together([self._visit(params, cohort, round_index)]):
            yield updates

    def train_together(self, visits: Sequence[Visit]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Blocks of updates of users from several runs, side by side, and the number of the run of each user."""
        users, owners = self._in_order(visits)
        end = 0
        before, self._begun = self._begun, None
        while end < len(users):
            start, end = end, end + self._together(users[end:])
            begun, before = before, None
            if begun is None or not begun.is_for(visits, users[start:end]):
                begun = self._started(visits, users[start:end], owners[start:end])
            for trained in begun.parts:
                for part, stack in trained.stacks:
                    own = {name: piece if len(piece) == 1 else piece[part] for name, piece in trained.first.items()}
                    touched = {name: one.of_users(part) for name, one in trained.block.rows.items()}
                    yield updates_of(stack, own, self._shapes, touched), trained.block.owners[part]

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Let a GPU begin with the first block of a cohort, before anybody asks for it.

        Its parameters lie where those of the block before did, which must be used up.
        """
        self._begun = None
        if self._lanes is None or not len(cohort.users):
            return
        visit = self._visit(params, cohort, round_index)
        users, owners = self._in_order([visit])
        end = self._together(users)
        try:
            self._begun = self._started([visit], users[:end], owners[:end])
        except Exception as error:  # whoever asks for it may see it fail again, and the round before is not lost
            slow = f"a round could not begin before its time ({type(error).__name__}): it begins when it is asked for"
            warnings.warn(slow, SlowEngineWarning, stacklevel=2)

    def forget(self) -> None:
        """What was begun is not wanted any more."""
        self._begun = None

    def _visit(self, params: Tensor, cohort: Cohort, round_index: int) -> Visit:
        return Visit(params, cohort.users, round_index, self.plain.streams, self.plain.local.lr)

    def _together(self, users: NDArray[np.int64]) -> int:
        """How many of these users, the first with most examples, make a block; on cores they are equally wide."""
        if self.plain.device.type != "cpu":
            return self.block_size
        local, examples = self.plain.local, self.plain.examples
        sizes = local.examples_of(examples.population, users[: self.block_size])
        fitting = _GATHERED // max(1, int(sizes[0]) * local.epochs * examples.bytes_each)
        widths = filled_width(sizes, local.batch_size)
        return max(1, min(fitting, int((widths == widths[0]).sum())))

    def _in_order(self, visits: Sequence[Visit]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All users, those with most examples first, and the run of each."""
        work = [self.plain.local.examples_of(self.plain.examples.population, visit.users) for visit in visits]
        owners = np.repeat(np.arange(len(visits)), [len(visit.users) for visit in visits])
        order = np.lexsort((owners, -np.concatenate(work)))
        return np.concatenate([visit.users for visit in visits])[order], owners[order]

    def _prepared(self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]) -> list[Block]:
        """All that these users' training needs, in blocks of users who get equal room for rows."""
        plain, device = self.plain, self.plain.device
        steps, keys = self._plan(visits, users, owners)
        # In memory step by step: that is how they are read.
        gathered = plain.examples.gather(np.ascontiguousarray(steps.rows.swapaxes(0, 1)))
        whole = Block(
            users,
            owners,
            steps,
            {name: field.transpose(0, 1) for name, field in gathered.items()},
            {},
            torch.from_numpy(keys).to(device, non_blocking=True),
            torch.from_numpy(steps.counts).to(device, non_blocking=True),
            torch.tensor([visits[owner].lr for owner in owners], dtype=plain.flat.vector.dtype, device=device),
        )
        if not plain.row_fields:
            return [whole]
        named = {name: Named(whole.examples[field], self._shapes[name][0]) for name, field in plain.row_fields.items()}
        return [self._with_rows(whole, named, chosen, rooms) for chosen, rooms in _alike(named)]

    def _with_rows(
        self, whole: Block, named: Mapping[str, Named], chosen: NDArray[np.int64], rooms: Sequence[int]
    ) -> Block:
        """Some users of a block, and their rows in this much room for each parameter."""
        everybody = len(chosen) == len(whole.users)
        block = whole if everybody else whole.of_users(chosen)
        places = slice(None) if everybody else torch.from_numpy(chosen).to(self.plain.device)
        examples, rows = dict(block.examples), {}
        for (name, field), room in zip(self.plain.row_fields.items(), rooms, strict=True):
            rows[name], examples[field] = named[name].touched(room, places)
        return replace(block, examples=examples, rows=rows)

    def _started(self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]) -> Begun:
        """Train a block of users; on a GPU that is begun, and goes on by itself.

        Where training fails, as a label out of range makes it, every user of the block trains apart, and adds nothing
        if it fails again.
        """
        with aside(self.plain.device) as made:
            blocks = self._prepared(visits, users, owners)
            made += [tensor for block in blocks for tensor in block.tensors()]
        versions = [visit.params._version for visit in visits]
        parts = []
        for block in blocks:
            try:
                parts.append(self._trained(visits, block))
            except Exception as error:
                mine = isinstance(error, IsolationError) or not users_own(error)
                if mine or self.plain.on_error == "raise" or self._lanes is not None:
                    raise  # what is recorded does not fail by what a user's examples say
                parts += [self._trained_apart(visits, block.of_users(np.array([i]))) for i in range(len(block.users))]
        if versions != [visit.params._version for visit in visits]:
            raise ModuleError("the round's parameters changed while users trained: train on the model that is given")
        return Begun(visits, users, parts)

    def _trained_apart(self, visits: Sequence[Visit], block: Block) -> Trained:
        """One user alone; an update that is not a number, and so adds nothing, where that fails."""
        try:
            return self._trained(visits, block, recorded=False)
        except Exception as error:
            if isinstance(error, IsolationError) or not users_own(error):
                raise
        first = self._first(visits, block)
        return Trained(block, first, [(slice(0, 1), [torch.full_like(piece, math.nan) for piece in first.values()])])

    def _first(self, visits: Sequence[Visit], block: Block) -> dict[str, Tensor]:
        run = torch.from_numpy(block.owners).to(self.plain.device) if len(visits) > 1 else None
        return first_pieces(torch.stack([visit.params for visit in visits]), self._shapes, block.rows, run)

    def _trained(self, visits: Sequence[Visit], block: Block, *, recorded: bool = True) -> Trained:
        plain, first = self.plain, self._first(visits, block)
        arguments = (block.examples, block.chances, block.counts, block.rates)
        self.flat.module.train()
        plain.isolation.before_block()
        with kept_generators(), torch.enable_grad(), computing_in(plain.precision, plain.device):
            try:
                if self._lanes is None or not recorded:
                    stack = [piece.expand(len(block.users), *piece.shape[1:]).clone() for piece in first.values()]
                    self._walk(visits[0], block.steps, stack, *arguments)
                    stacks = [(slice(0, len(block.users)), stack)]
                else:
                    stacks = self._lanes.train(block.steps, first, *arguments)
            finally:
                plain.isolation.after_stack()
        return Trained(block, first, stacks)

    def _walk(
        self,
        visit: Visit,
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
        places = torch.arange(steps.rows.shape[2], device=self.plain.device)
        for step in range(steps.longest):
            # What draws from NumPy's or Python's generator draws the same for all users, whoever they are.
            key = visit.streams.user_key("stack", visit.round_index, step)
            for run, width in steps.alike(step, filled=self._fillable):
                batch = {name: field[run, step, :width] for name, field in examples.items()}
                kept = places[:width] < counts[run, step, None]
                self.plain.isolation.seed(key)
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
        self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[Steps, NDArray[np.int32]]:
        """The batches of every user, and the keys of every `UserRandom` at every step: (users, steps, chances, 2)."""
        rounds = [(visit.streams, visit.round_index) for visit in visits]
        identities = self.plain.examples.population.identities(users)
        keys_for = partial(keys_of, rounds, identities=identities, owners=owners)
        steps = plan_steps(self.plain.examples.population, users, self.plain.local, keys_for)
        return steps, step_keys(keys_for("dropout"), steps.longest, len(self.flat.chances))

    def _trial(self) -> int:
        """Try a step of two users who do not exist, in a stack. Gives the memory that a user took.

        It also finds out whether the loss is one for each example, and whether a batch may be filled up without another
        result. Neither decides whether users are kept apart: they are, either way.
        """
        plain, params = self.plain, self.flat.initial
        width = min(plain.local.batch_size, 64)
        example = plain.made_up(width)
        like = {name: torch.stack([field, field]) for name, field in example.items()}
        kept = torch.ones(2, width, dtype=torch.bool, device=plain.device)
        chances = torch.zeros(2, len(self.flat.chances), 2, dtype=torch.int32, device=plain.device)
        rows = {}
        for name, field in plain.row_fields.items():
            named = Named(like[field], self._shapes[name][0])
            rows[name], like[field] = named.touched(int(named.rooms(_ROOM).max()))
        first = first_pieces(params.unsqueeze(0), self._shapes, rows)
        stack = [piece.expand(2, *piece.shape[1:]).clone() for piece in first.values()]
        on_gpu = plain.device.type == "cuda"
        before = torch.cuda.memory_allocated(plain.device) if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(plain.device)
        with kept_generators(), computing_in("float32", plain.device):  # a comparison, which coarser arithmetic blurs
            self._step.per_example, self._fillable = self._looked_at()
        plain.isolation.after_user()
        with kept_generators(), computing_in(plain.precision, plain.device):
            try:
                plain.isolation.seed(0)
                unused = generators_state()
                with warnings.catch_warnings():
                    # torch warns where it would loop over the users instead
                    warnings.filterwarnings("error", message=".*performance drop.*")
                    self._step(stack, chances, like, kept, 1.0)
                with Bypass():  # type: ignore[no-untyped-call]
                    self._step(stack, chances, like, kept, 1.0)
                if generators_state() != unused:
                    raise CannotStack(
                        f"model {type(self.flat.module).__name__} or its loss draws from NumPy's or Python's "
                        "generator, which users in a stack would share"
                    )
                plain.isolation.after_stack()
            except CannotStack:
                raise
            except Exception as error:
                with suppress(ModuleError):  # one by one it may stay as it was, and be allowed
                    plain.isolation.after_stack()
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error
        peak = torch.cuda.max_memory_allocated(plain.device) if on_gpu else 0
        return max(1, (peak - before) // 2)

    def _looked_at(self) -> tuple[bool, bool]:
        """Whether the loss gives one number for each example, and whether filling up a batch leaves the others alone.

        Tried on made-up examples at several parameters: a model that looks across them, as batch statistics do, gives
        other results where a batch is filled up, and then none is.
        """
        plain = self.plain
        count = min(plain.local.batch_size, 8)
        half = (count + 1) // 2
        examples = plain.made_up(count)
        batches = [{name: field[:half] for name, field in examples.items()}]
        filled = torch.arange(count, device=plain.device)
        filled[half:] = 0  # as it will be filled up: by the first
        batches.append({name: plain.examples.pick(field, filled) for name, field in examples.items()})
        self.flat.module.train()
        same = finite = False
        for params in parameters_to_try(plain.flat.initial):
            losses = []
            for batch in batches:
                self.flat.set_keys(torch.zeros(len(self.flat.chances), 2, dtype=torch.int32, device=plain.device))
                plain.isolation.seed(0)
                with torch.enable_grad(), torch.random.fork_rng([plain.device] if plain.device.type == "cuda" else []):
                    losses.append(plain.loss(self.flat.load(params), batch).detach())
                plain.isolation.after_user()
            if not per_example(losses[1], count):
                return False, False
            alone, among = losses[0].double(), losses[1][:half].double()
            if bool(alone.isfinite().all()):
                same = bool(torch.isclose(alone, among, rtol=1e-3, atol=1e-6).all()) and (same or not finite)
                finite = True
        return True, same

    def _fitting(self, cohort_size: int, varying: bool, bytes_a_user: int) -> int:
        """Users in a block: on a GPU a whole cohort, within free memory. A step runs only those who still have one."""
        plain = self.plain
        if plain.device.type != "cuda":
            return _ON_CORES
        bytes_a_user += 10 * (0 if plain.row_fields else self.flat.dim)  # parameters, their change, a copy in bfloat16
        fitting = int(_FREE * torch.cuda.mem_get_info(plain.device)[0] / bytes_a_user)
        expected = cohort_size + (math.ceil(4 * math.sqrt(cohort_size)) if varying else 0)
        return max(1, min(fitting, expected, _MOST))


def _twice(one: Tensor) -> Tensor:
    """(1, ...) -> (2, ...), in memory of its own: a model may write into its batch. torch cannot copy all types."""
    plain = one.view(torch.int16) if one.dtype == torch.uint16 else one
    return torch.cat([plain, plain]).view(one.dtype)


def _alike(named: Mapping[str, Named]) -> list[tuple[NDArray[np.int64], list[int]]]:
    """Users who get equal room for the rows of every parameter, most room first, and how much."""
    rooms = np.stack([one.rooms(_ROOM) for one in named.values()], axis=1)
    kinds, kind = np.unique(rooms, axis=0, return_inverse=True)
    numbers = range(len(kinds) - 1, -1, -1)
    return [(np.flatnonzero(kind.reshape(-1) == number), kinds[number].tolist()) for number in numbers]
