"""The stacked trainer: many users at once, each with their own parameters. For GPUs, and small models on cores."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map

from ...errors import CliplineError, ModuleError, first_line
from ...federated.backend import CohortRequest
from ...federated.local_sgd import Batch
from ...random.streams import keys_of
from ..core.batches import Steps, padded_width, plan_steps, select_rows
from ..core.one_by_one import OneByOne
from ..core.problem import Problem, SlowEngineWarning
from ..core.row_fields import RowUsage, TouchedRows, build_updates, starting_params
from ..core.updates import Updates
from ..core.user_random import random_layer_keys
from ..gpu.compile_gain import WORTH_S
from ..gpu.programs.program_cache import ProgramCounts, Programs
from ..gpu.recorded_step import RecordedBlocks
from ..gpu.streams import side_stream
from ..isolation.generators import preserve_generators
from ..isolation.guard import IsolationError, exhausted, users_own
from .probe import MIN_ROOM, CannotStack, check_agreement, probe, vmap_reason
from .rounding import filled, fixed_size, one_thread
from .step import StackStep

_FREE_SHARE = 0.5  # of the free GPU memory that a block may take
_MAX_BLOCK = 1024  # users: more do not make a GPU faster
_CPU_BLOCK = 96  # users in a block on CPU cores, at most
_GATHERED = 1 << 28  # bytes of examples in a block on CPU cores, where a block is padded to its largest user
# Operations of a step. Tracing takes 2 ms for each, before it is known how many of them repeat and are compiled once.
_MOST_TRACED = 40_000
_MAX_GRAPHED_BATCH = 1 << 26  # bytes: with larger batches steps are not graphed, as every batch takes the full width


@dataclass(frozen=True, eq=False)
class Block:
    """Users sorted by work, user i of request `requests[owners[i]]`, and all that training needs except parameters."""

    users: NDArray[np.int64]
    owners: NDArray[np.int64]
    places: NDArray[np.int64]  # in the cohort of the request
    steps: Steps
    examples: Batch
    rows: dict[str, TouchedRows]
    random_keys: Tensor
    counts: Tensor
    rates: Tensor

    def of_users(self, chosen: NDArray[np.int64] | slice, rooms: Mapping[str, int] | None = None) -> Block:
        """Some of the users, in this order; with `rooms`, rows padded to these numbers and no step that nobody has."""
        place = chosen if isinstance(chosen, slice) else torch.from_numpy(chosen)
        index = place if isinstance(place, slice) else place.to(self.counts.device, non_blocking=True)
        counts, rows = self.steps.counts[chosen], {name: one.of_users(index) for name, one in self.rows.items()}
        longest = int((counts > 0).any(axis=0).sum()) if rooms else self.steps.longest  # steps leave no gaps
        return Block(
            self.users[chosen],
            self.owners[chosen],
            self.places[chosen],
            Steps(self.steps.rows[chosen, :longest], counts[:, :longest], self.steps.widths[chosen]),
            {
                name: (select_rows(one, index) if isinstance(index, Tensor) else one[index])[:, :longest]
                for name, one in self.examples.items()
            },
            {name: one.padded_to(rooms[name]) if rooms else one for name, one in rows.items()},
            self.random_keys[index, :longest],
            self.counts[index, :longest],
            self.rates[index],
        )

    def tensors(self) -> list[Tensor]:
        """All tensors on the device."""
        touched = [tensor for one in self.rows.values() for tensor in (one.rows, one.used)]
        return [*self.examples.values(), *touched, self.random_keys, self.counts, self.rates]


@dataclass(frozen=True, eq=False)
class Trained:
    """A block's users with their parameters after training; `first` is what they started from: PRIVATE."""

    block: Block
    first: dict[str, Tensor]
    stack: list[Tensor]


class Stacked:
    """Trains the users of a cohort in blocks, each as one stack: `torch.func.vmap` over parameters and batches.

    Equal to `plain`, whose working copy of the model it uses, up to the order of additions. Users are sorted by work,
    so that a block is padded little. If the loss gives one number for each example, a GPU runs the steps as a compiled
    program. A model or loss that cannot run for stacked users is refused with `CannotStack`, and with `WrongStack` if
    a stacked step of made-up users differs from plain ones.

    What a model can see of a user's batch (its width, the number of rows of a small matrix) depends on that user's own
    data alone: users for whom it differs run in different blocks or calls.
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
        self._step.check = problem.isolation.after_step
        found = probe(problem, plain.made_up, self._step)
        self._paddable, bytes_a_user = found.paddable, found.bytes_a_user
        self._check_agreement(plain)
        self._grain, self.rounds_by_company = fixed_size(problem, plain.made_up, self._step)
        saved = math.inf  # by compiling, where that is for us to decide
        if compiled is None:
            if problem.fast.compiled_steps == "auto":
                saved = found.work.seconds_saved(cohort_size, problem.rounds, problem.local)
            small = problem.local.batch_size * problem.examples.bytes_each <= _MAX_GRAPHED_BATCH
            compiled = (
                problem.fast.compiled_steps != "never" and problem.device.type == "cuda" and self._paddable and small
            )
        longest, batch_size = 0, problem.local.batch_size
        width = int(padded_width(np.array([problem.local.max_examples or batch_size]), batch_size)[0])
        if compiled:  # static buffers hold the largest user
            most_examples = min(problem.population.largest(), problem.local.max_examples or 2**62)
            longest = -(-most_examples // problem.local.batch_size) * problem.local.epochs
        bytes_a_user += 2 * longest * width * problem.examples.bytes_each  # as gathered, and in the static buffers
        self.block_size = block_size or self._choose_block_size(cohort_size, varying, bytes_a_user)
        # Why not in a faster way, if there is one.
        unseen = "; batches of other lengths run apart, as all examples of the trial are equal: give a trial_batch"
        self.reason = unseen if found.unknown else ""
        pays = saved >= WORTH_S * self._most_programs()
        if compiled and not pays:
            self.reason += f"; compiling would save about {saved:.1f} s of {problem.rounds:,} rounds"
        self.compiles = bool(compiled) and pays and found.work.operations <= _MOST_TRACED  # as it is made, on a GPU
        self._recorded: RecordedBlocks | None = None
        if compiled:
            self._recorded = RecordedBlocks(
                self._step,
                users=self.block_size,
                steps=longest,
                width=width,
                programs=Programs(kept=problem.fast.kept_programs, notices=problem.notices),
                compiled=self.compiles,
            )

    @property
    def in_words(self) -> str:
        """What runs, for the caller to read."""
        how = self._recorded.in_words if self._recorded is not None else "step by step"
        on_gpu = self.problem.device.type == "cuda"
        frozen = on_gpu and any(not param.requires_grad for param in self.problem.model.module.parameters())
        parts = [f"stacked, up to {self.block_size} users at a time, {how}"]
        parts += ["one product over all users' rows where weights are frozen"] * frozen
        parts += [self.problem.model.attention] * bool(self.problem.model.attention)
        return "; ".join(parts) + self.reason

    @property
    def programs(self) -> ProgramCounts:
        """What has been compiled and recorded so far."""
        return ProgramCounts() if self._recorded is None else self._recorded.programs.counts

    def _most_programs(self) -> int:
        """How many programs the steps may need: one for each padded number of rows, see `_parted_by_rows`."""
        heights = [self._shapes[name][0] for name in self.problem.row_fields]
        return math.prod(1 + max(0, math.ceil(math.log2(height / MIN_ROOM) / 2)) for height in heights)

    def _check_agreement(self, plain: OneByOne) -> None:
        """Refuse a stack that would train wrongly. Where a GPU has no room or no plain step to compare with, say so."""
        try:
            by_gradient = StackStep(self.problem.model, self.problem.loss, self.problem.local, plain=True)
            by_gradient.per_example = self._step.per_example
            check_agreement(self.problem, plain.made_up, by_gradient, padded=self._paddable)
        except RuntimeError as error:
            if isinstance(error, CliplineError) or exhausted(error) is not None:
                raise
            if self.problem.device.type != "cuda":
                reason = vmap_reason(error)
                raise CannotStack(f"the model or its loss cannot run for many users at once ({reason})") from error
            reason = first_line(error)
            unknown = f"a stacked step could not be compared with plain ones before training ({reason})"
            warnings.warn(unknown, SlowEngineWarning, stacklevel=2)

    def train(self, requests: Sequence[CohortRequest]) -> Iterator[tuple[Updates, NDArray[np.int64]]]:
        """Updates (params after local SGD - params) of all requests' users, in blocks, most work first.

        With each block comes the index in `requests` of every user's request. Blocks share memory: use one before
        asking for the next. On a GPU a block is yielded while it is still training.
        """
        users, owners, places = self._sorted_by_work(requests)
        self.problem.isolation.before_block()  # of all blocks: none of the caller's code runs between them
        end = 0
        while end < len(users):
            start, end = end, end + self._next_block(users[end:])
            for trained in self._train_block(requests, users[start:end], owners[start:end], places[start:end]):
                yield self._updates_of(requests, trained), trained.block.owners

    def _updates_of(self, requests: Sequence[CohortRequest], trained: Trained) -> Updates:
        """The updates of a block. Personal parameters are handed back; who failed keeps what was there."""
        block, stack = trained.block, trained.stack
        updates = build_updates(stack[: len(self._shapes)], trained.first, self._shapes, block.rows)
        if pieces := stack[len(self._shapes) :]:
            rows = torch.cat([piece.reshape(len(piece), -1) for piece in pieces], dim=1)
            rows = rows.where(updates.norms().isfinite().unsqueeze(1), math.nan)
            for number, request in enumerate(requests):
                of_request = block.owners == number
                if request.personal is not None and of_request.any():
                    request.personal.write(block.places[of_request], rows[torch.from_numpy(of_request).to(rows.device)])
        return updates

    def _next_block(self, users: NDArray[np.int64]) -> int:
        """How many of these users, sorted by work, make the next block.

        On CPU cores a block has one batch width, and the users of a width are shared evenly among blocks: a step of few
        users costs nearly as much as one of many.
        """
        if self.problem.device.type != "cpu":
            return self.block_size
        local, examples = self.problem.local, self.problem.examples
        sizes = local.examples_of(examples.population, users)
        widths = padded_width(sizes, local.batch_size)
        alike = int((widths == widths[0]).sum())
        fitting = _GATHERED // max(1, int(sizes[0]) * local.epochs * examples.bytes_each)
        return max(1, min(fitting, math.ceil(alike / math.ceil(alike / self.block_size))))

    def _sorted_by_work(
        self, requests: Sequence[CohortRequest]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """All users, those with most examples first; the index of each user's request, and the place in its cohort."""
        cohorts = [request.cohort.users for request in requests]
        users, places = np.concatenate(cohorts), np.concatenate([np.arange(len(one)) for one in cohorts])
        owners = np.repeat(np.arange(len(requests)), [len(one) for one in cohorts])
        order = np.lexsort((owners, -self.problem.local.examples_of(self.problem.population, users)))
        return users[order], owners[order], places[order]

    def _prepare(
        self,
        requests: Sequence[CohortRequest],
        users: NDArray[np.int64],
        owners: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> list[Block]:
        """All that these users' training needs except parameters; one block for each padded number of rows."""
        problem, device = self.problem, self.problem.device
        steps, keys = self._plan_steps(requests, users, owners)
        rates = np.array([problem.runs[request.run].rate(request.round_index) for request in requests])
        # Laid out by step first, as they are read.
        gathered = problem.examples.gather(np.ascontiguousarray(steps.rows.swapaxes(0, 1)))
        whole = Block(
            users,
            owners,
            places,
            steps,
            {name: field.transpose(0, 1) for name, field in gathered.items()},
            {},
            torch.from_numpy(keys).to(device, non_blocking=True),
            torch.from_numpy(steps.counts).to(device, non_blocking=True),
            torch.from_numpy(rates[owners]).to(device, problem.model.vector.dtype, non_blocking=True),
        )
        return self._parted_by_rows(whole) if problem.row_fields else [whole]

    def _parted_by_rows(self, whole: Block) -> list[Block]:
        """The block with the rows that each user touches: one block for each padded number of them, largest first.

        Rows are found for all users at once, padded to the largest number, and users of one number put side by side, so
        that the blocks are slices: on a GPU few operations to launch count for more than small ones.
        """
        fields, examples, rows = self.problem.row_fields, dict(whole.examples), dict[str, TouchedRows]()
        idle: NDArray[np.bool_] = (whole.steps.counts == 0).all(axis=1)
        named = {name: RowUsage(examples[field], self._shapes[name][0], idle) for name, field in fields.items()}
        rooms = np.stack([one.rooms(MIN_ROOM) for one in named.values()], axis=1)
        rooms[idle] = rooms[~idle][-1] if not idle.all() else rooms[0]  # they have no step: any group will do
        for (name, field), largest in zip(fields.items(), rooms.max(axis=0).tolist(), strict=True):
            rows[name], examples[field] = named[name].touched(largest)
        whole = replace(whole, examples=examples, rows=rows)
        kinds, kind = np.unique(rooms, axis=0, return_inverse=True)
        if len(kinds) == 1:
            return [whole]
        whole = whole.of_users(np.argsort(-kind.reshape(-1), kind="stable"))  # of one kind, most work stays first
        ends = np.cumsum(np.bincount(kind.reshape(-1))[::-1]).tolist()
        return [
            whole.of_users(slice(start, stop), dict(zip(fields, of_kind, strict=True)))
            for start, stop, of_kind in zip([0, *ends], ends, kinds[::-1].tolist(), strict=False)
        ]

    def _train_block(
        self,
        requests: Sequence[CohortRequest],
        users: NDArray[np.int64],
        owners: NDArray[np.int64],
        places: NDArray[np.int64],
    ) -> list[Trained]:
        """Train a block of users; on a GPU this only launches the work.

        If training fails, on a label out of range for instance, every user of the block trains alone, and adds nothing
        if that fails again.
        """
        with side_stream(self.problem.device) as made:
            blocks = self._prepare(requests, users, owners, places)
            made += [tensor for block in blocks for tensor in block.tensors()]
        versions = [request.params._version for request in requests]
        parts = []
        for block in blocks:
            try:
                parts.append(self._train_stack(requests, block))
            except Exception as error:
                fatal = isinstance(error, IsolationError) or not users_own(error)
                if fatal or self.problem.on_error == "raise" or self._recorded is not None:
                    raise  # a graphed step cannot fail because of a user's examples
                # Made anew: a model may have written into its batches, or its random keys, before it failed.
                for one in (slice(i, i + 1) for i in range(len(block.users))):
                    (again,) = self._prepare(requests, block.users[one], block.owners[one], block.places[one])
                    parts.append(self._train_single(requests, again))
        if versions != [request.params._version for request in requests]:
            raise ModuleError("the round's parameters changed while users trained: train on the model that is given")
        return parts

    def _train_single(self, requests: Sequence[CohortRequest], block: Block) -> Trained:
        """Train one user alone; if that fails, the update is NaN and adds nothing."""
        try:
            return self._train_stack(requests, block, recorded=False)
        except Exception as error:
            if isinstance(error, IsolationError) or not users_own(error):
                raise
        first = self._starting_params(requests, block)
        return Trained(block, first, [torch.full_like(piece, math.nan) for piece in first.values()])

    def _starting_params(self, requests: Sequence[CohortRequest], block: Block) -> dict[str, Tensor]:
        if len(requests) == 1:
            first = starting_params(requests[0].params.unsqueeze(0), self._shapes, block.rows)
        else:
            run = torch.from_numpy(block.owners).to(self.problem.device, non_blocking=True)
            params = torch.stack([request.params for request in requests])
            first = starting_params(params, self._shapes, block.rows, run)
        if not self.problem.model.personal_dim:
            return first
        rows = self.problem.model.initial_personal.repeat(len(block.users), 1)
        for number, request in enumerate(requests):
            of_request = block.owners == number
            own = self.problem.personal_rows(request.personal, block.places[of_request])
            rows[torch.from_numpy(of_request).to(rows.device)] = own
        return first | self.problem.model.personal_pieces(rows)

    def _train_stack(self, requests: Sequence[CohortRequest], block: Block, *, recorded: bool = True) -> Trained:
        problem, first = self.problem, self._starting_params(requests, block)
        arguments = (block.examples, block.random_keys, block.counts, block.rates)
        self.problem.model.module.train()
        with preserve_generators(), torch.enable_grad(), problem.arithmetic(), one_thread(problem.device):
            try:
                if self._recorded is None or not recorded:
                    whole = self._step.complete(first).values()
                    stack = [piece.expand(len(block.users), *piece.shape[1:]).clone() for piece in whole]
                    self._train_eagerly(requests[0], block.steps, stack, *arguments)
                else:
                    stack = self._recorded.train(block.steps, self._step.complete(first), *arguments)
            except BaseException:
                problem.isolation.after_failure()
                raise
            problem.isolation.after_stack()
        return Trained(block, first, stack[: len(first)])

    def _train_eagerly(
        self,
        request: CohortRequest,
        steps: Steps,
        stack: list[Tensor],
        examples: Batch,
        random_keys: Tensor,
        counts: Tensor,
        rates: Tensor,
    ) -> None:
        """The eager steps; each runs only the users who still have one.

        If batches may be padded, users of one padded width run together and padding is masked; otherwise only users
        whose batches have the same number of examples run together.
        """
        places = torch.arange(steps.rows.shape[2], device=self.problem.device)
        for step in range(steps.longest):
            # A model that draws from NumPy's or Python's generator draws the same numbers, whoever the users are.
            key = self.problem.runs[request.run].streams.user_key("stack", request.round_index, step)
            for run, width in steps.alike(step, filled=self._paddable):
                batch = {name: field[run, step, :width] for name, field in examples.items()}
                kept = places[:width] < counts[run, step, None]
                self.problem.isolation.seed(key)
                arguments = [piece[run] for piece in stack], random_keys[run, step], batch, kept, rates[run]
                users = run.stop - run.start
                # At least two: libraries use other routines, with other rounding, for a stack of one.
                whole: Any = tree_map(partial(filled, max(2, -(-users // self._grain) * self._grain)), arguments)
                self._step(*whole)
                self.problem.isolation.after_step()
                for piece, moved in zip(arguments[0], whole[0], strict=True):
                    if moved is not piece:
                        piece.copy_(moved[:users])

    def _plan_steps(
        self, requests: Sequence[CohortRequest], users: NDArray[np.int64], owners: NDArray[np.int64]
    ) -> tuple[Steps, NDArray[np.int32]]:
        """The batches of every user, and the keys of every `UserRandom` at every step: (users, steps, layers, 2)."""
        rounds = [(self.problem.runs[request.run].streams, request.round_index) for request in requests]
        identities = self.problem.population.identities(users)
        keys_for = partial(keys_of, rounds, identities=identities, owners=owners)
        steps = plan_steps(self.problem.population, users, self.problem.local, keys_for)
        return steps, random_layer_keys(keys_for("dropout"), steps.longest, len(self.problem.model.random_layers))

    def _choose_block_size(self, cohort_size: int, varying: bool, bytes_a_user: int) -> int:
        """Users in a block: on a GPU a whole cohort, if memory allows. A step runs only users who still have one."""
        problem = self.problem
        if problem.device.type != "cuda":
            return _CPU_BLOCK
        # Parameters, their change, a cast to bfloat16; what else is in the stack (an optimiser's state) at 4 bytes.
        nothing = {name: problem.model.vector.new_zeros(1, 0) for name in self._step.names}
        beside = len(self._step.complete(nothing)) // len(nothing) - 1
        bytes_a_user += (10 + 4 * beside) * (0 if problem.row_fields else self.problem.model.dim)
        fitting = int(_FREE_SHARE * torch.cuda.mem_get_info(problem.device)[0] / bytes_a_user)
        expected = cohort_size + (math.ceil(4 * math.sqrt(cohort_size)) if varying else 0)
        return max(1, min(fitting, expected, _MAX_BLOCK))
