"""Local training of many users at once, each with parameters of their own: the way of a GPU, and of small models."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ModuleError
from ..streams import keys_of
from .aside import aside
from .batches import Steps, plan_steps
from .blocks import Begun, Block, Visit
from .chance import step_keys
from .lanes import Lanes
from .local import Batch, per_example
from .one_by_one import OneByOne
from .precision import computing_in
from .program import SlowEngineWarning, StackStep
from .rows import first_pieces, renumbered, updates_of
from .sampling import Cohort
from .updates import Updates

_FREE = 0.5  # of a GPU's free memory may be taken by a block of users
_MOST = 1024  # users in a block: more do not make a GPU faster
_ON_CORES = 64  # users in a block on processor cores
_GATHERED = 1 << 28  # bytes of examples in a block there: one user with very many must not multiply by all others'
_ROOM = 256  # rows that a user may touch, or twice, four times ... as many: each is a program of its own


class CannotStack(ModuleError):
    """The model or its loss uses an operation that has no version for many users at once."""


class Stacked:
    """Trains the users of a cohort in blocks, a block as one stack: `torch.func.vmap` over parameters and batches.

    Equal to `plain`, whose working copy of the model it uses, up to the order of additions. Users are sorted by work,
    so that a block runs only as long as its longest user. With a loss for each example, a GPU runs blocks of one fixed
    size as a compiled program. A model or loss that has no version for many users is refused with `CannotStack`.
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
            compiled = plain.device.type == "cuda" and self._fillable
        most = longest = 0
        if compiled:  # what is recorded has room for the largest user
            most = min(plain.examples.population.largest(), plain.local.max_examples or 2**62)
            longest = -(-most // plain.local.batch_size) * plain.local.epochs
        width = min(most, plain.local.batch_size)
        bytes_a_user += 2 * longest * width * plain.examples.bytes_each  # as gathered, and where it is recorded
        self.block_size = block_size or self._fitting(cohort_size, varying, bytes_a_user)
        self._begun: Begun | None = None
        self._lanes = Lanes(self._step, users=self.block_size, steps=longest, width=width) if compiled else None

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
            start, end = end, end + self._together(users[end])
            begun, before = before, None
            if begun is None or not begun.is_for(visits, users[start:end]):
                begun = self._started(visits, users[start:end], owners[start:end])
            self.flat.check_buffers()
            for part, stack in begun.trained:
                own = {name: piece if len(piece) == 1 else piece[part] for name, piece in begun.first.items()}
                touched = {name: one.of_users(part) for name, one in begun.block.rows.items()}
                yield updates_of(stack, own, self._shapes, touched), begun.block.owners[part]

    def begin(self, params: Tensor, cohort: Cohort, round_index: int) -> None:
        """Let a GPU begin with the first block of a cohort, before anybody asks for it.

        Its parameters lie where those of the block before did, which must be used up.
        """
        self._begun = None
        if self._lanes is None or not len(cohort.users):
            return
        visit = self._visit(params, cohort, round_index)
        users, owners = self._in_order([visit])
        end = self._together(users[0])
        try:
            self._begun = self._started([visit], users[:end], owners[:end])
        except Exception as error:  # whoever asks for it may see it fail again, and the round before is not lost
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            slow = f"a round could not begin before its time ({reason}): it begins when it is asked for"
            warnings.warn(slow, SlowEngineWarning, stacklevel=2)

    def forget(self) -> None:
        """What was begun is not wanted any more."""
        self._begun = None

    def _visit(self, params: Tensor, cohort: Cohort, round_index: int) -> Visit:
        return Visit(params, cohort.users, round_index, self.plain.streams, self.plain.local.lr)

    def _together(self, user: int) -> int:
        """How many users train with this one, who has most examples among them."""
        if self.plain.device.type != "cpu":
            return self.block_size
        local, examples = self.plain.local, self.plain.examples
        most = int(local.examples_of(examples.population, np.array([user]))[0]) * local.epochs
        return max(1, min(self.block_size, _GATHERED // max(1, most * examples.bytes_each)))

    def _in_order(self, visits: Sequence[Visit]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """All users, those with most examples first, and the run of each."""
        work = [self.plain.local.examples_of(self.plain.examples.population, visit.users) for visit in visits]
        owners = np.repeat(np.arange(len(visits)), [len(visit.users) for visit in visits])
        order = np.lexsort((owners, -np.concatenate(work)))
        return np.concatenate([visit.users for visit in visits])[order], owners[order]

    def _prepared(self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]) -> Block:
        plain, device = self.plain, self.plain.device
        steps, keys = self._plan(visits, users, owners)
        heights = {name: self._shapes[name][0] for name in plain.row_fields}
        # In memory step by step: that is how they are read.
        gathered = plain.examples.gather(np.ascontiguousarray(steps.rows.swapaxes(0, 1)))
        examples = {name: field.transpose(0, 1) for name, field in gathered.items()}
        examples, rows = renumbered(examples, plain.row_fields, heights, least=_ROOM)
        return Block(
            users,
            owners,
            steps,
            examples,
            rows,
            torch.from_numpy(keys).to(device, non_blocking=True),
            torch.from_numpy(steps.counts).to(device, non_blocking=True),
            torch.tensor([visits[owner].lr for owner in owners], dtype=plain.flat.vector.dtype, device=device),
        )

    def _started(self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]) -> Begun:
        """Train a block of users; on a GPU that is begun, and goes on by itself."""
        plain, device = self.plain, self.plain.device
        with aside(device) as made:
            block = self._prepared(visits, users, owners)
            made += block.tensors()
        run = torch.from_numpy(block.owners).to(device) if len(visits) > 1 else None
        first = first_pieces(torch.stack([visit.params for visit in visits]), self._shapes, block.rows, run)
        arguments = (block.examples, block.chances, block.counts, block.rates)
        self.flat.module.train()
        with computing_in(plain.precision, device):
            if self._lanes is None:
                stack = [piece.expand(len(block.users), *piece.shape[1:]).clone() for piece in first.values()]
                self._walk(block.steps, stack, *arguments)
                trained = [(slice(0, len(block.users)), stack)]
            else:
                trained = self._lanes.train(block.steps, first, *arguments)
        return Begun(visits, block, first, trained)

    def _walk(
        self, steps: Steps, stack: list[Tensor], examples: Batch, chances: Tensor, counts: Tensor, rates: Tensor
    ) -> None:
        """Step by step, only the users who still have one.

        With a loss for each example short batches are filled up and the filling does not count; otherwise only users
        whose batches are of one size go together.
        """
        places = torch.arange(steps.rows.shape[2], device=self.plain.device)
        for step in range(steps.longest):
            runs = steps.alike(step)
            if self._fillable:
                runs = [slice(0, int((steps.counts[:, step] > 0).sum()))]
            for run in runs:
                width = len(places) if self._fillable else int(steps.counts[run.start, step])
                batch = {name: field[run, step, :width] for name, field in examples.items()}
                kept = places[:width] < counts[run, step, None]
                self._step([piece[run] for piece in stack], chances[run, step], batch, kept, rates[run])

    def _plan(
        self, visits: Sequence[Visit], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[Steps, NDArray[np.int32]]:
        """The batches of every user, and the keys of every `Chance` at every step: (users, steps, chances, 2)."""
        rounds = [(visit.streams, visit.round_index) for visit in visits]
        keys_for = partial(keys_of, rounds, users=users, owners=owners)
        steps = plan_steps(self.plain.examples.population, users, self.plain.local, keys_for)
        return steps, step_keys(keys_for("dropout"), steps.longest, len(self.flat.chances))

    def _trial(self) -> int:
        """Try a step of one user, alone and then twice in a stack. Gives the memory that a user took.

        It also finds out whether the loss is one for each example.
        """
        plain = self.plain
        population, params = plain.examples.population, plain.flat.initial
        user = int(np.argmax(np.diff(population.offsets[: 1 + min(len(population), 1000)])))
        if population.size(user) == 0:
            raise CannotStack("the first 1000 users have no examples to try the model on")
        plain.block(params, np.array([user]), 0)  # refuses what no engine can train
        width = min(plain.local.batch_size, 64)
        like = plain.examples.gather(np.full((2, width), int(population.offsets[user])))
        self.flat.module.train()
        kept = torch.ones(2, width, dtype=torch.bool, device=plain.device)
        chances = torch.zeros(2, len(self.flat.chances), 2, dtype=torch.int32, device=plain.device)
        heights = {name: self._shapes[name][0] for name in plain.row_fields}
        like, rows = renumbered(like, plain.row_fields, heights, least=_ROOM)
        first = first_pieces(params.unsqueeze(0), self._shapes, rows)
        stack = [piece.expand(2, *piece.shape[1:]).clone() for piece in first.values()]
        on_gpu = plain.device.type == "cuda"
        before = torch.cuda.memory_allocated(plain.device) if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(plain.device)
        with computing_in("float32", plain.device):  # a comparison, which coarser arithmetic would blur
            self._step.per_example, self._fillable = self._looked_at()
        with computing_in(plain.precision, plain.device):
            try:
                with warnings.catch_warnings():
                    # torch warns where it would loop over the users instead
                    warnings.filterwarnings("error", message=".*performance drop.*")
                    self._step(stack, chances, like, kept, 1.0)
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error
        try:
            self.flat.check_buffers()
        except ModuleError as error:  # one by one it may stay as it was, and be allowed
            raise CannotStack(str(error)) from error
        peak = torch.cuda.max_memory_allocated(plain.device) if on_gpu else 0
        return max(1, (peak - before) // 2)

    def _looked_at(self) -> tuple[bool, bool]:
        """Whether the loss gives one number for each example, and whether filling up a batch leaves the others alone.

        Tried on a few examples: a model that looks across them, as batch statistics do, must not see any filling.
        """
        plain = self.plain
        count = min(plain.local.batch_size, plain.examples.population.examples, 8)
        spread = np.linspace(0, plain.examples.population.examples - 1, count).astype(np.int64)
        half = (count + 1) // 2
        filled = np.where(np.arange(count) < half, spread, spread[0])
        losses = []
        self.flat.module.train()
        for batch in (plain.examples.gather(filled[:half]), plain.examples.gather(filled)):
            self.flat.set_keys(torch.zeros(len(self.flat.chances), 2, dtype=torch.int32, device=plain.device))
            with torch.no_grad():
                losses.append(plain.loss(self.flat.load(plain.flat.initial), batch))
        if not per_example(losses[1], count):
            return False, False
        alone, among = losses[0].double(), losses[1][:half].double()
        same = torch.isclose(alone, among, rtol=1e-3, atol=1e-6)
        return True, bool((same | ~alone.isfinite()).all())

    def _fitting(self, cohort_size: int, varying: bool, bytes_a_user: int) -> int:
        """Users in a block: on a GPU a whole cohort, within free memory. A step runs only those who still have one."""
        plain = self.plain
        if plain.device.type != "cuda":
            return _ON_CORES
        bytes_a_user += 10 * (0 if plain.row_fields else self.flat.dim)  # parameters, their change, a copy in bfloat16
        fitting = int(_FREE * torch.cuda.mem_get_info(plain.device)[0] / bytes_a_user)
        expected = cohort_size + (math.ceil(4 * math.sqrt(cohort_size)) if varying else 0)
        return max(1, min(fitting, expected, _MOST))
