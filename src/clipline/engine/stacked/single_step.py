"""Users with one example and one plain SGD step each: many at once, with shared weights. On CPU cores.

vmap keeps users apart: a model sees one user's example, and nothing of the others. A weight that is not batched is the
same for all of them, so a layer's products run as one product over all users. autograd would add up their gradients of
such a weight. The functions here form none: their backward passes note the layer's inputs and the gradients of its
outputs, user by user, and pass on the gradient of the inputs. Convolutions note gradients of the weight.

A trial on made-up examples finds out which weights users can share and compares the result with plain steps. Users are
kept apart by vmap, whatever it finds; a weight that is used otherwise later is refused then.

Plain twin: one user after the other, `OneByOne`. Switch: `FastParts.single_step`.
Held equal by: tests/engine/stacked/test_single_step.py, and by the trial on the user's own model.
Buys: an epoch of 60,000 images in 7.4 s instead of 52 (small CNN), in 0.6 instead of 6.7 (logistic regression), on one
thread of 2 cores, 2026-11-16. Opacus takes 12.2 and 0.7 at best (benchmarks/against_opacus.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import Function
from torch.func import functional_call, vmap
from torch.nn.grad import conv2d_input
from torch.overrides import TorchFunctionMode

from ...data.population import Population
from ...errors import ModuleError
from ...federated.backend import CohortRequest
from ...federated.local_sgd import Batch, LocalSGD, LocalTraining, Loss, per_example, takes_reference
from ...federated.sampling import Cohort
from ..core.batches import select_rows
from ..core.one_by_one import OneByOne
from ..core.problem import Problem
from ..core.updates import Dense, FactoredUpdates, Piece, Rows, Updates
from ..core.user_random import random_layer_keys
from ..core.vmap_axis import is_batched
from ..core.working_model import LossOf, WorkingModel
from ..isolation.generators import preserve_generators
from ..isolation.guard import users_own
from ..isolation.made_up_data import parameters_to_try
from ..isolation.state import bits
from .probe import (
    NEIGHBOURS,
    CannotStack,
    compare,
    compare_neighbours,
    made_up_users,
    other_last_batch,
    plain_gradients,
)
from .rounding import full_grain
from .vmap_layers import Bypass, StackSafe

_PATCHED = 32  # images whose patches are formed at a time: more do not fit the cache

Kind = Literal["linear", "convolution", "embedding"]


@dataclass(frozen=True, eq=False)
class Use:
    """One use of a weight, by all users: the inputs, and the gradients of what came out. PRIVATE.

    A convolution has no inputs here, and its gradients are those of the weight itself, (users, numbers in it): it has
    so many positions and so few weights that forming them is less work than anything else.
    """

    kind: Kind
    inputs: Tensor | None = field(repr=False)  # (users, positions, in); for an embedding (users, positions) row numbers
    gradients: Tensor = field(repr=False)  # (users, positions, out)

    def first(self, count: int | None) -> Use:
        """That of the first `count` users, or of all."""
        return Use(self.kind, None if self.inputs is None else self.inputs[:count], self.gradients[:count])


class Notes:
    """What the backward pass of a step notes: the uses of each weight, by name."""

    def __init__(self) -> None:
        self.uses: dict[str, list[Use]] = {}
        self.open = False  # whether the step's own backward pass runs

    def add(self, name: str, use: Use) -> None:
        """Note a use. Refused outside the step's own backward pass, as where a loss takes a gradient itself."""
        if not self.open:
            raise NotImplementedError("a gradient that is taken inside the loss has no version for shared weights")
        inputs = None if use.inputs is None else use.inputs.detach()
        self.uses.setdefault(name, []).append(Use(use.kind, inputs, use.gradients.detach()))


class SharedWeights(TorchFunctionMode):
    """Active while the loss of users is computed under vmap: products with the weights in `shared` are noted.

    Names of weights that are used so, shared or not, are added to `seen`. `zero` is a 0 that is batched over users.
    """

    def __init__(self, named: Mapping[str, Tensor], shared: frozenset[str], notes: Notes, zero: Tensor) -> None:
        super().__init__()
        self._names = {id(weight): name for name, weight in named.items()}
        self._shared, self._notes, self._zero = shared, notes, zero
        self.seen: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        noted = _NOTED.get(func)
        name = self._names.get(id(args[1])) if noted is not None and len(args) > 1 else None
        prepared = None if noted is None or name is None else noted(*args, **(kwargs or {}))
        if prepared is None or name is None:
            return func(*args, **(kwargs or {}))
        self.seen.add(name)
        if name not in self._shared:
            return func(*args, **(kwargs or {}))
        values, function, more, bias = prepared
        # What no user's data enter, such as positions, is batched too: its gradient would else be a sum over users.
        values = values if is_batched(values) else values + self._zero.to(values.dtype)
        out = _for_all_users(function, values, args[1], self._notes, name, *more)
        return out if bias is None else out + bias


# A function's inputs; the function below that notes it and what that takes; the bias, in shape to be added.
Prepared = tuple[Tensor, type[Function], tuple[Any, ...], Tensor | None]


def _linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Prepared:
    return values, _Linear, (), bias


def _embedding(
    numbers: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Prepared | None:
    """Within `StackSafe`, which takes care of `padding_idx` and of numbers out of range."""
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return None
    return numbers, _Embedding, (), None


def _convolution(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | str | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Prepared | None:
    """`conv2d` of a batch; not in groups, nor with padding by a word."""
    if groups != 1 or isinstance(padding, str) or images.ndim != 4:
        return None
    how = tuple((one, one) if isinstance(one, int) else tuple(one) for one in (stride, padding, dilation))
    return images, _Convolution, how, None if bias is None else bias.view(-1, 1, 1)


_NOTED: dict[Any, Callable[..., Prepared | None]] = {
    F.linear: _linear,
    torch.conv2d: _convolution,
    F.embedding: _embedding,
}


def _for_all_users(function: type[Function], values: Tensor, *arguments: Any) -> Tensor:
    """`function` of the values of all users at once, (users, ...), where `values` are one user's under vmap.

    Below vmap, as a rule of vmap for `function` would run, but without its search for tensors among all arguments,
    which takes longer than a small product. Within a further transform, as of a loss, `function` refuses to run.
    """
    level, axis = _functorch.maybe_get_level(values), _functorch.maybe_get_bdim(values)
    rows = _functorch.get_unwrapped(values).movedim(axis, 0)
    with temporarily_pop_interpreter_stack():
        out = function.apply(rows, *arguments)  # type: ignore[no-untyped-call]
    batched: Tensor = _functorch._add_batch_dim(out, 0, level)
    return batched


class _Linear(Function):
    """(users, ..., in) by (out, in) -> (users, ..., out)."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, notes: Notes, name: str) -> Tensor:
        """One product over all users."""
        ctx.save_for_backward(values, weight)
        ctx.notes, ctx.name = notes, name
        return F.linear(values, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Note inputs and gradients."""
        values, weight = ctx.saved_tensors
        ctx.notes.add(ctx.name, Use("linear", _rows(values), _rows(gradient)))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _Embedding(Function):
    """(users, ...) numbers of rows of (height, out) -> (users, ..., out)."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: Tensor, notes: Notes, name: str) -> Tensor:
        """One look-up for all users."""
        ctx.save_for_backward(numbers)
        ctx.notes, ctx.name = notes, name
        return F.embedding(numbers, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, ...]:
        """Note numbers and gradients."""
        (numbers,) = ctx.saved_tensors
        users, positions = len(numbers), numbers[0].numel()
        ctx.notes.add(
            ctx.name, Use("embedding", numbers.reshape(users, positions), gradient.reshape(users, positions, -1))
        )
        return None, None, None, None


class _Convolution(Function):
    """(users, images, channels, height, width) by (out, channels, height, width), as `F.conv2d`.

    Channels are last in memory, in which torch pools several times faster.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, notes: Notes, name: str, *how: Any) -> Tensor:
        """One convolution of all users' images."""
        sizes, images = images.shape[:2], images.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        kernel = weight.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(images, kernel)
        ctx.notes, ctx.name, ctx.sizes, ctx.how = notes, name, sizes, how
        out = F.conv2d(images, kernel, None, *how).contiguous(memory_format=torch.channels_last)
        return out.reshape(*sizes, *out.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Note the users' gradients of the weight, (users, out * channels * height * width)."""
        images, kernel = ctx.saved_tensors
        gradient = gradient.flatten(0, 1).contiguous(memory_format=torch.channels_last)
        images_each = ctx.sizes[1]
        step, formed = max(1, _PATCHED // images_each) * images_each, []
        for some, outputs in zip(torch.split(images, step), torch.split(gradient, step), strict=True):
            rows = (_patches(some, kernel.shape, *ctx.how), outputs.permute(0, 2, 3, 1).flatten(1, 2))
            inputs, outputs = (one.reshape(-1, images_each * one.shape[1], one.shape[2]) for one in rows)
            formed.append(outer_products(outputs, inputs))
        ctx.notes.add(ctx.name, Use("convolution", None, torch.cat(formed)))
        found = None
        if ctx.needs_input_grad[0]:
            found = conv2d_input(images.shape, kernel, gradient, *ctx.how).unflatten(0, ctx.sizes)  # type: ignore[no-untyped-call]
        return found, None, None, None, None, None, None


def _patches(
    images: Tensor, kernel: torch.Size, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """(images, channels, ...) -> (images, places, channels * height * width): what the kernel sees at each place."""
    (down, right), zeros = padding, any(padding)
    maps = (F.pad(images, (right, right, down, down)) if zeros else images).permute(0, 2, 3, 1)
    for axis in (0, 1):
        covered = dilation[axis] * (kernel[2 + axis] - 1) + 1
        maps = maps.unfold(1 + axis, covered, stride[axis])[..., :: dilation[axis]]
    return maps.flatten(3).flatten(1, 2)


def _rows(values: Tensor) -> Tensor:
    """(users, ..., width) -> (users, positions, width)."""
    return values.reshape(len(values), -1, values.shape[-1])


def outer_products(outputs: Tensor, inputs: Tensor) -> Tensor:
    """(users, positions, out) and (users, positions, in) -> (users, out * in): summed over positions."""
    return torch.bmm(outputs.transpose(1, 2), inputs).flatten(1)


class NotShared(CannotStack):
    """A weight that was to be shared is used in a way for which its users' gradients cannot be told apart."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(
            f"parameter {names[0]!r} is used otherwise than in the trial, where it went into a layer's products alone: "
            "let the model do the same in every call, or use FastParts(single_step=False)"
        )
        self.names = frozenset(names)


class SharedStep:
    """The updates of a block of users who take one step each, on one example each.

    The parameters in `shared` are the same tensors for all users; of the others every user has a copy under vmap.
    """

    def __init__(self, model: WorkingModel, loss: Loss, shared: frozenset[str] = frozenset()) -> None:
        self.shared = shared
        self.seen: set[str] = set()  # names of parameters that were used as weights of a layer
        self._shapes = model.named_shapes
        ends = list(accumulate(shape.numel() for shape in self._shapes.values()))
        self._starts = dict(zip(self._shapes, [0, *ends[:-1]], strict=True))
        self._loss = LossOf(model.module, loss)
        self._keys = ["model." + f"{name}.key".lstrip(".") for name in model.random_layers]
        self._random_layers = list(model.random_layers.values())
        self._notes = Notes()

    def __call__(
        self, params: Tensor, examples: Batch, random_keys: Tensor, lr: float, count: int | None = None
    ) -> Updates:
        """The updates -lr * gradient, PRIVATE, from examples (users, ...) and random keys (users, layers, 2).

        With `count`, only of the first users: the others fill the block.
        """
        users, copied = len(random_keys), params.clone()  # a model may write into its parameters
        pieces = torch.split(copied, [shape.numel() for shape in self._shapes.values()])
        named = {name: piece.view(self._shapes[name]) for name, piece in zip(self._shapes, pieces, strict=True)}
        shared = {name: named[name].detach().requires_grad_() for name in self.shared}
        own = {
            name: piece.detach().expand(users, *piece.shape).requires_grad_()
            for name, piece in named.items()
            if name not in shared
        }
        zeros = params.new_zeros(users)
        self._notes = Notes()
        # Tensors alone, one after the other: vmap looks through nested arguments, which takes as long as a product.
        loss_of_one = partial(self._loss_of_one, shared, list(own), list(examples))
        losses = vmap(loss_of_one, randomness="error")(zeros, random_keys, *own.values(), *examples.values())
        self._notes.open = True
        leaves = [*own.values(), *shared.values()]
        try:
            found = torch.autograd.grad(losses, leaves, torch.full_like(losses, -lr), allow_unused=True)
        finally:
            self._notes.open = False
        if not torch.equal(bits(copied), bits(params)):
            raise ModuleError(
                "the model writes into a parameter that all users share, or its loss does: compute from it without "
                "writing, or use FastParts(single_step=False)"
            )
        gradients = dict(zip([*own, *shared], found, strict=True))
        mixed = {name for name, uses in self._notes.uses.items() if len({use.kind for use in uses}) > 1}
        if wrong := sorted(mixed | {name for name in shared if gradients[name] is not None}):
            raise NotShared(wrong)
        updates: list[Piece] = [Dense(self._starts[name], gradient.reshape(users, -1)[:count])
                                for name in own if (gradient := gradients[name]) is not None]  # fmt: skip
        updates += [self._piece(name, [use.first(count) for use in uses]) for name, uses in self._notes.uses.items()]
        self._notes = Notes()
        if not updates:
            raise ModuleError("the loss does not depend on the model's trainable parameters: return what it computed")
        lost = ~losses.detach()[:count].isfinite()
        if bool(lost.any()):  # who has such a loss adds nothing: some of torch's gradients at NaN depend on alignment
            updates = [_spoiled(piece, lost) for piece in updates]
        return Updates(updates)

    def _loss_of_one(
        self,
        shared: dict[str, Tensor],
        own: Sequence[str],
        fields: Sequence[str],
        zero: Tensor,
        random_keys: Tensor,
        *tensors: Tensor,
    ) -> Tensor:
        """The loss of one user, under vmap: the model sees a batch of one example. `tensors`: own, then fields."""
        named = dict(zip(own, tensors[: len(own)], strict=True)) | shared
        state = {f"model.{name}": param for name, param in named.items()}
        state |= dict(zip(self._keys, random_keys.unbind(0), strict=True))
        for source in self._random_layers:
            source.draws = 0
        batch = {name: field.unsqueeze(0) for name, field in zip(fields, tensors[len(own) :], strict=True)}
        with SharedWeights(named, self.shared, self._notes, zero) as weights, StackSafe() as safe:
            losses: Tensor = functional_call(self._loss, state, (batch,))
        self.seen |= weights.seen
        per_example(losses, 1)  # refuses other shapes; the mean and the sum of one number are that number
        loss: Tensor = safe.spoiled(losses.reshape(()))
        return loss + zero  # batched, also where the loss uses no example

    def _piece(self, name: str, uses: Sequence[Use]) -> Piece:
        """The updates of a shared weight."""
        start, shape = self._starts[name], self._shapes[name]
        if uses[0].kind == "convolution":
            return Dense(start, sum((use.gradients for use in uses[1:]), uses[0].gradients))
        inputs = _joined([use.inputs for use in uses if use.inputs is not None])
        outputs = _joined([use.gradients for use in uses])
        if uses[0].kind == "embedding":
            return _rows_of_embedding(start, shape[0], inputs, outputs)
        if inputs.shape[1] == 1:  # one outer product each
            return FactoredUpdates(start, inputs[:, 0], outputs[:, 0])
        return Dense(start, outer_products(outputs, inputs))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """All positions of a weight's uses."""
    return torch.cat(list(parts), dim=1) if len(parts) > 1 else parts[0]


def _rows_of_embedding(start: int, height: int, numbers: Tensor, gradients: Tensor) -> Rows:
    """Rows of an embedding, (users, positions) and their gradients, with every row of a user once."""
    if numbers.shape[1] > 1:
        numbers, order = numbers.sort(dim=1, stable=True)
        gradients = gradients.gather(1, order.unsqueeze(2).expand_as(gradients))
        place = torch.zeros_like(numbers)
        place[:, 1:] = (numbers[:, 1:] != numbers[:, :-1]).cumsum(dim=1)
        gradients = torch.zeros_like(gradients).scatter_add_(1, place.unsqueeze(2).expand_as(gradients), gradients)
        numbers = torch.zeros_like(numbers).scatter_(1, place, numbers)
    return Rows(start, height, numbers, gradients)


def _spoiled(piece: Piece, lost: Tensor) -> Piece:
    """The piece with NaN for the users who are lost."""
    if isinstance(piece, FactoredUpdates):
        return replace(piece, outputs=_with_nan(piece.outputs, lost))
    return replace(piece, values=_with_nan(piece.values, lost))


def _with_nan(values: Tensor, lost: Tensor) -> Tensor:
    return values.masked_fill(lost.view(-1, *[1] * (values.ndim - 1)), math.nan)


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
    plain = type(local) is LocalSGD and local == LocalSGD(**{name: getattr(local, name) for name in _KNOWN})
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
        examples = {name: select_rows(field, order) for name, field in self._made_up(of).items()}
        examples = other_last_batch(examples, factor)
        problem.model.module.train()
        with (
            preserve_generators(),
            problem.arithmetic("float32"),
            torch.enable_grad(),
            problem.model.unreadable(),
            made_up_users(problem),
        ):
            return step(params, examples, keys[order], _RATE)

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
